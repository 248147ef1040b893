"""What a recording says of itself: the model, what was selected, and how it was reduced."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import nn

from microtome.capture.reduction import Reduce
from microtome.engine.call_selection import other_names
from microtome.engine.selectors import named


def manifest_of(model: nn.Module, selectors: list[str], reduce: Reduce | None) -> dict[str, Any]:
    """What a folder says of its recording; appending asks for the same, but for torch's version and other names."""
    return {
        "model": type(model).__qualname__,
        "layout": _layout(model),
        "selectors": selectors,
        "reduce": reduce if reduce is None or isinstance(reduce, str) else text_of(reduce),
        "other_names": other_names(model),
        "torch": torch.__version__,
    }


def _layout(model: nn.Module) -> str:
    """What the modules and parameters of a model are, in a few letters: another layout has others."""
    modules = [f"{path}:{type(module).__name__}" for path, module in named(model)]
    shapes = [f"{name}:{tuple(value.shape)}" for name, value in model.named_parameters()]
    return f"{crc32(' '.join(modules + shapes).encode()):08x}"


def text_of(selector: Any) -> str:
    """A selector or a function in words that are the same in another process."""
    if isinstance(selector, list | tuple | set | frozenset):
        return ", ".join(sorted(map(text_of, selector)))
    if isinstance(selector, str) or selector is None:
        return selector or "all"
    if isinstance(selector, nn.Module):
        return type(selector).__name__
    return str(getattr(selector, "pattern", None) or getattr(selector, "__qualname__", type(selector).__name__))
