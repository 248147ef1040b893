"""`torchvision:NAME`: the models that torchvision registers, with the input size of their weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from microtome.inputs import Inputs
from microtome.zoo.packages import import_torchvision, operators_note
from microtome.zoo.sources.base import ModelSpec, no_such_model

PREFIX = "torchvision"


def names() -> list[str]:
    registered: list[str] = import_torchvision().models.list_models()
    return registered


def find(name: str, args: dict[str, Any]) -> ModelSpec:
    models = import_torchvision().models
    if name not in models.list_models():
        raise no_such_model("torchvision", name, models.list_models())
    builder = models.get_model_builder(name)
    task = builder.__module__.removeprefix("torchvision.models.").partition(".")[0]
    notes = operators_note()
    if task == "detection" and not hasattr(torch.ops.torchvision, "roi_align"):
        notes += (f"{name} fails when it calls a compiled operator of torchvision: they are missing",)
    return ModelSpec(
        lambda: builder(**(_defaults(builder) | args)),
        lambda model: _example(task, model, models.get_model_weights(name)),
        notes,
    )


def _defaults(builder: Callable[..., nn.Module]) -> dict[str, Any]:
    """Return arguments that keep a builder from downloading weights and from warning."""
    defaults: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        defaults["weights_backbone"] = None
    if builder.__name__ in ("googlenet", "inception_v3"):
        defaults["init_weights"] = True
    return defaults


def _example(task: str, model: nn.Module, weights: Any) -> Any:
    default = getattr(weights, "DEFAULT", None)
    if default is None:
        return None
    if task == "detection":
        # The size to which the model resizes every image.
        transform: Any = model.transform
        height, width = transform.fixed_size or 2 * transform.min_size[-1:]
        return Inputs([torch.rand(3, height, width)])
    if task == "optical_flow":
        # The crop size of FlyingChairs, on which RAFT is trained first.
        return Inputs(torch.rand(1, 3, 368, 496), torch.rand(1, 3, 368, 496))
    transforms = default.transforms()
    size = getattr(model, "image_size", None) or getattr(transforms, "crop_size", None) or transforms.resize_size
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    if task == "video":
        return torch.rand(1, 3, max(16, default.meta.get("min_temporal_size", 0)), height, width)
    return torch.rand(1, 3, height, width)
