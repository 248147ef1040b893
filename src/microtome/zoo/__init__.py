"""Small built-in models, torch alone, the same weights on every machine: what the demo, the examples and the tests run
on.

>>> names()
('tiny-decoder', 'tiny-lstm', 'tiny-resnet', 'tiny-unet', 'tiny-vit')
>>> model, inputs = build("tiny-resnet")
>>> model(inputs).shape
torch.Size([2, 10])
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from microtome.errors import NoMatch
from microtome.zoo.models import Decoder, LSTMClassifier, ResNet, UNet, ViT

Inputs = Tensor | dict[str, Any]


def _image(size: int) -> Tensor:
    return torch.randn(2, 3, size, size)


def _tokens(length: int) -> Tensor:
    return torch.randint(0, 64, (2, length))


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "tiny-decoder": (Decoder, lambda: {"input_ids": _tokens(12)}),
    "tiny-lstm": (LSTMClassifier, lambda: _tokens(12)),
    "tiny-resnet": (ResNet, lambda: _image(32)),
    "tiny-unet": (UNet, lambda: _image(32)),
    "tiny-vit": (ViT, lambda: _image(32)),
}


def names() -> tuple[str, ...]:
    """The models that `build` knows."""
    return tuple(sorted(_MODELS))


def build(name: str, *, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """A model in eval mode and inputs for it: a tensor, or a dict of keyword arguments.

    Weights and inputs depend on the seed alone; the random state of the process is left as it was.
    """
    if name not in _MODELS:
        near = difflib.get_close_matches(name, _MODELS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise NoMatch(f"the zoo has no model {name!r}. {hint}It has: {', '.join(names())}.")
    model, inputs = _MODELS[name]
    # Only the CPU's generator is used, so only it is kept and seeded; torch.manual_seed would reseed every device.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return model().eval(), inputs()


def resolve(text: str) -> tuple[nn.Module, Inputs]:
    """The model that a text like `zoo:tiny-resnet` names, and inputs for it."""
    source, colon, name = text.partition(":")
    if source != "zoo" or not colon:
        near = difflib.get_close_matches(name or source, _MODELS, n=1, cutoff=0.4) or ["tiny-resnet"]
        raise NoMatch(f"{text!r} does not name a model: write the source and the name, such as 'zoo:{near[0]}'")
    return build(name)
