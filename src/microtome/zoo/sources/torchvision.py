"""`torchvision:NAME`: the models that torchvision registers, with the input size of their weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from microtome.example_inputs import torchvision_example
from microtome.zoo.packages import explain_missing_operators, import_torchvision
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
    reason = explain_missing_operators() if task == "detection" else None  # no other task calls them
    notes = () if reason is None else (f"{name} fails if it calls an operator of torchvision: {reason}",)
    return ModelSpec(
        lambda: builder(**(_defaults(builder) | args)),
        lambda model: _example(model, models.get_model_weights(name)),
        notes,
        has_random_weights=args.get("weights") is None,
    )


def _defaults(builder: Callable[..., nn.Module]) -> dict[str, Any]:
    """Return arguments that keep a builder from downloading weights and from warning."""
    defaults: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        defaults["weights_backbone"] = None
    if builder.__name__ in ("googlenet", "inception_v3"):
        defaults["init_weights"] = True
    return defaults


def _example(model: nn.Module, weights: Any) -> Any:
    default = getattr(weights, "DEFAULT", None)
    if default is None:
        return None
    transforms = default.transforms()
    size = getattr(transforms, "crop_size", None) or getattr(transforms, "resize_size", None)
    example = torchvision_example(model, size)
    frames = default.meta.get("min_temporal_size", 0)
    if isinstance(example, torch.Tensor) and example.ndim == 5 and frames > example.shape[2]:
        return torch.rand(1, 3, frames, *example.shape[3:])
    return example
