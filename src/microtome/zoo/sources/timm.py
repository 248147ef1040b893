"""`timm:NAME`: every model that timm registers; the input is that of its pretrained configuration."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn

from microtome.zoo.packages import need
from microtome.zoo.sources.source import FoundModel, unknown
from microtome.zoo.torchvision_import import import_torchvision, operators_note

PACKAGE = "timm"


def names() -> list[str]:
    known: list[str] = _timm().list_models()
    return known


def find(name: str, args: dict[str, Any]) -> FoundModel:
    timm = _timm()
    # Of the names that timm takes, those with a prefix such as hf-hub: would download.
    if not timm.is_model(name):
        raise unknown("timm", name, timm.list_models())

    def example(model: nn.Module) -> torch.Tensor:
        return torch.randn(1, *timm.data.resolve_model_data_config(model, args=args)["input_size"])

    return FoundModel(lambda: timm.create_model(name, **({"pretrained": False} | args)), example, operators_note())


def _timm() -> ModuleType:
    need("timm", import_torchvision)  # timm imports torchvision
    return need("timm")
