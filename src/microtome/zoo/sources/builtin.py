"""`zoo:NAME`: the built-in models."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from microtome.errors import NoMatch
from microtome.zoo.models import Decoder, LSTMClassifier, ResNet, UNet, ViT
from microtome.zoo.sources.base import ModelSpec, seeded

PREFIX = "zoo"

Inputs = Tensor | dict[str, Any]


def _image() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def _tokens() -> Tensor:
    return torch.randint(0, 64, (2, 12))


def _build_writer() -> nn.Module:
    from microtome.zoo.writer import build_writer  # imports safetensors

    return build_writer()


_MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[], Inputs]]] = {
    "tiny-decoder": (Decoder, lambda: {"input_ids": _tokens()}),
    "tiny-lstm": (LSTMClassifier, _tokens),
    "tiny-resnet": (ResNet, _image),
    "tiny-unet": (UNet, _image),
    "tiny-vit": (ViT, _image),
    "tiny-writer": (_build_writer, lambda: {"input_ids": _tokens()}),
}


def names() -> tuple[str, ...]:
    """List the names that `build` accepts."""
    return tuple(_MODELS)


def find(name: str, args: dict[str, Any]) -> ModelSpec:
    if name not in _MODELS:
        near = difflib.get_close_matches(name, _MODELS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise NoMatch(f"the zoo has no model {name!r}. {hint}It has: {', '.join(_MODELS)}.")
    model_class, example = _MODELS[name]
    return ModelSpec(lambda: model_class(**args), lambda _: example())


def build(name: str, *, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """Build a model in eval mode and inputs for it: a tensor, or a dict of keyword arguments.

    Weights and inputs depend only on the seed; the weights of `tiny-writer` are trained. The global random state is
    restored. `resolve` builds models of other sources.
    """
    if ":" in name:
        raise NoMatch(
            f"expected the name of a built-in model, such as 'tiny-resnet', got {name!r}: zoo.resolve({name!r}) builds "
            "models of any source, and has .model and .inputs"
        )
    spec = find(name, {})
    with seeded(seed), torch.device("cpu"):
        model = spec.build().eval()
        return model, spec.example(model)
