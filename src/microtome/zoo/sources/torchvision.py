"""`torchvision:NAME`: every model that torchvision registers; the input is the one its weights were trained for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from microtome.inputs import Inputs
from microtome.zoo.sources.source import FoundModel, unknown
from microtome.zoo.torchvision_import import import_torchvision, operators_note

PACKAGE = "torchvision"


def names() -> list[str]:
    known: list[str] = import_torchvision().models.list_models()
    return known


def find(name: str, args: dict[str, Any]) -> FoundModel:
    models = import_torchvision().models
    if name not in models.list_models():
        raise unknown("torchvision", name, models.list_models())
    builder = models.get_model_builder(name)
    kind = builder.__module__.removeprefix("torchvision.models.").partition(".")[0]
    notes = operators_note()
    if kind == "detection" and not hasattr(torch.ops.torchvision, "roi_align"):
        notes += (f"{name} stops where it reaches a compiled operator of torchvision: they are missing",)
    return FoundModel(
        lambda: builder(**(_defaults(builder) | args)),
        lambda model: _example(kind, model, models.get_model_weights(name)),
        notes,
    )


def _defaults(builder: Callable[..., nn.Module]) -> dict[str, Any]:
    """Arguments without which a builder downloads weights or warns."""
    given: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        given["weights_backbone"] = None
    if builder.__name__ in ("googlenet", "inception_v3"):
        given["init_weights"] = True
    return given


def _example(kind: str, model: nn.Module, weights: Any) -> Any:
    default = getattr(weights, "DEFAULT", None)
    if default is None:
        return None
    if kind == "detection":
        # The size to which the model itself brings every image.
        transform: Any = model.transform
        height, width = transform.fixed_size or 2 * transform.min_size[-1:]
        return Inputs([torch.rand(3, height, width)])
    if kind == "optical_flow":
        # The crops of FlyingChairs, on which RAFT is trained first.
        return Inputs(torch.rand(1, 3, 368, 496), torch.rand(1, 3, 368, 496))
    transforms = default.transforms()
    size = getattr(model, "image_size", None) or getattr(transforms, "crop_size", None) or transforms.resize_size
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    if kind == "video":
        return torch.rand(1, 3, max(16, default.meta.get("min_temporal_size", 0)), height, width)
    return torch.rand(1, 3, height, width)
