"""`timm:NAME`: the models that timm registers, with the input size of their pretrained configuration."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from microtome.example_inputs import timm_example
from microtome.zoo.packages import import_package, import_torchvision
from microtome.zoo.sources.base import ModelSpec, no_such_model

PREFIX = "timm"


def names() -> list[str]:
    registered: list[str] = _import_timm().list_models()
    return registered


def find(name: str, args: dict[str, Any]) -> ModelSpec:
    timm = _import_timm()
    # timm downloads models whose names have a prefix such as hf-hub:, and does not list them.
    if not timm.is_model(name):
        raise no_such_model("timm", name, timm.list_models())

    return ModelSpec(
        lambda: timm.create_model(name, **({"pretrained": False} | args)),
        lambda model: timm_example(model, **args),
        has_random_weights=not args.get("pretrained"),
    )


def _import_timm() -> ModuleType:
    import_package("timm", import_torchvision)  # timm imports torchvision
    return import_package("timm")
