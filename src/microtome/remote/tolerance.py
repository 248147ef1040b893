"""Compare answers of a batch with those of each request alone, element by element, to the precision of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from microtome.split.comparison import differences
from microtome.split.structure_spec import flatten

#: By how much an answer may differ from that of the request alone, relative to each number and to its column's largest.
_PRECISION = 1e-4
#: How many roundings of the largest in its row or column that is, at most: other kernels sum up in another order.
_ROUNDINGS = 64


def tolerances(outputs: Sequence[Any]) -> list[list[Tensor]]:
    """Return, for each output, by how much each element of its tensors may differ in a batch.

    Rounding moves a small element by some roundings of the largest one in its row. That alone would let a large column
    hide errors in a small one, so it is no more than `_PRECISION` of the largest in the element's column. A column is
    what has one index in a dimension, over all outputs; of several dimensions, the one whose largest is the smallest.
    """
    several = []
    for tensors in zip(*map(_real_tensors, outputs), strict=True):
        if not (tensors[0].is_floating_point() and tensors[0].numel()):
            several.append([torch.zeros_like(tensor, dtype=torch.float64) for tensor in tensors])
            continue
        sizes = torch.stack([tensor.detach().abs().to(torch.float64) for tensor in tensors])
        sizes = torch.where(sizes.isfinite(), sizes, 0.0)
        row = sizes.amax([*range(2, sizes.dim())], keepdim=True) if sizes.dim() > 2 else sizes
        column = sizes.amax().expand_as(sizes)
        for dim in range(min(2, sizes.dim() - 1), sizes.dim()):
            column = column.minimum(sizes.amax([at for at in range(sizes.dim()) if at != dim], keepdim=True))
        rounding = _ROUNDINGS * torch.finfo(tensors[0].dtype).eps * row.maximum(column)
        several.append([*(rounding.minimum(_PRECISION * column) + _PRECISION * sizes)])
    return [list(limits) for limits in zip(*several, strict=True)]


def is_near(joined: Any, alone: Any, allowed: Sequence[Tensor]) -> bool:
    """Whether an answer of a batch is that of the request alone, to these tolerances."""
    if any(found.largest is None for found in differences(joined, alone)):
        return False
    pairs = zip(_real_tensors(joined), _real_tensors(alone), allowed, strict=True)
    return all(bool(_are_close(one, other, limit).all()) for one, other, limit in pairs)


def _are_close(one: Tensor, other: Tensor, allowed: Tensor) -> Tensor:
    """Compare two tensors by element: equal, both NaN, or finite and within the tolerance."""
    apart = (one.to(torch.float64) - other.to(torch.float64)).abs()
    near = one.isfinite() & other.isfinite() & (apart <= allowed) & one.is_floating_point()
    return (one == other) | (one.isnan() & other.isnan()) | near


def _real_tensors(output: Any) -> list[Tensor]:
    """The tensors of an output, with real and imaginary parts apart."""
    tensors = flatten(output)[1]
    return [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in tensors]
