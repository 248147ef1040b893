"""The built-in models by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from microtome.errors import NoMatch
from microtome.zoo.models import Decoder, LSTMClassifier, ResNet, UNet, ViT
from microtome.zoo.seed import seeded

Inputs = Tensor | dict[str, Any]


def _image(size: int) -> Tensor:
    return torch.randn(2, 3, size, size)


def _tokens(length: int) -> Tensor:
    return torch.randint(0, 64, (2, length))


_MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[], Inputs]]] = {
    "tiny-decoder": (Decoder, lambda: {"input_ids": _tokens(12)}),
    "tiny-lstm": (LSTMClassifier, lambda: _tokens(12)),
    "tiny-resnet": (ResNet, lambda: _image(32)),
    "tiny-unet": (UNet, lambda: _image(32)),
    "tiny-vit": (ViT, lambda: _image(32)),
}


def names() -> tuple[str, ...]:
    """The models that `build` knows."""
    return tuple(sorted(_MODELS))


def parts(name: str) -> tuple[Callable[..., nn.Module], Callable[[], Inputs]]:
    """Return the functions that make the model and its inputs."""
    if name not in _MODELS:
        near = difflib.get_close_matches(name, _MODELS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise NoMatch(f"the zoo has no model {name!r}. {hint}It has: {', '.join(names())}.")
    return _MODELS[name]


def build(name: str, *, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """A model in eval mode and inputs for it: a tensor, or a dict of keyword arguments.

    Weights and inputs depend on the seed alone; the random state of the process is left as it was.
    """
    model, inputs = parts(name)
    with seeded(seed), torch.device("cpu"):
        return model().eval(), inputs()
