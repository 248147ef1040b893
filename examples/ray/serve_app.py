"""The application of `kuberay.yaml`: the tail of a model, from a folder that `Stages.save` wrote.

`serve run serve_app:app` runs it on any Ray cluster. The folder is that of the variable `PARTS`.
"""

from __future__ import annotations

import os

from torch import nn

from microtome import zoo
from microtome.scale.ray import application


def build() -> nn.Module:
    """Build the model of the folder; its weights are read from there."""
    model, _ = zoo.build("tiny-resnet")
    return model


app = application(
    os.environ.get("PARTS", "/models/parts"),
    model=build,
    inputs="1x3x32x32",
    only=[1],
    replicas=2,
    batch=8,
    listen="0.0.0.0:7070",
    ingress_resources={"edge": 0.01},
    token=os.environ.get("TOKEN"),
)
