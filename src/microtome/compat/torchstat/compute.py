"""`compute_flops`, `compute_madd` and `compute_memory`: what one call of one module costs."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from microtome.count import torchstat
from microtome.engine import tensors_in


def compute_flops(module: nn.Module, inp: Any, out: Any) -> int:
    """Multiply-accumulates of the whole batch; 0 and a warning for a kind of module without a formula.

    >>> from torch import nn, ones
    >>> conv = nn.Conv2d(3, 10, 5)
    >>> x = ones(1, 3, 224, 224)
    >>> compute_flops(conv, x, conv(x)), compute_madd(conv, x, conv(x)), compute_memory(conv, x, conv(x))
    (36784000, 72600000, (151288, 484000))
    """
    return _known("Flops", module, torchstat.flops(module, first(inp), first(out)), 0)


def compute_madd(module: nn.Module, inp: Any, out: Any) -> int:
    """Multiplications and additions of one image; 0 and a warning for a kind of module without a formula."""
    return _known("MAdd", module, torchstat.madds(module, first(inp), first(out)), 0)


def compute_memory(module: nn.Module, inp: Any, out: Any) -> tuple[int, int]:
    """Elements read and written by the whole batch; (0, 0) and a warning for a kind of module without a formula."""
    return _known("Memory", module, torchstat.memory(module, first(inp), first(out)), (0, 0))


def first(value: Any) -> Any:
    """The first tensor in what a module takes or returns, or None."""
    return next(tensors_in(value), None)


def _known(what: str, module: nn.Module, count: Any, zero: Any) -> Any:
    if count is not None:
        return count
    # Python shows one text once for each place, and so this once for each kind of module.
    warnings.warn(f"[{what}]: {type(module).__name__} is not supported: counted as 0", stacklevel=3)
    return zero
