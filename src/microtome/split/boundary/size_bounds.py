"""Bound the sizes that a boundary states for tensors it does not hold, by the bytes that it does hold.

Placeholders and views cost nothing to describe, and a tail may allocate what they state: `zeros_like(placeholder)`,
`arange(placeholder.shape[1])`, a sum over a view of stride 0. A head with larger inputs than the example also sends
more. So all that a boundary states may have at most as many bytes as the model computed on the example, times the
growth of what was sent, and some to spare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from microtome.errors import BadBoundary
from microtome.results.trace import Trace
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.tensor_bytes import span_of
from microtome.split.cuts.crossing import Crossing
from microtome.units import size


class ExampleBytes(NamedTuple):
    """The bytes of the tensors that cross on the example, and of all inputs and operator outputs, views included."""

    sent: int
    computed: int


def example_bytes(trace: Trace, crossing: Crossing) -> ExampleBytes:
    """Add up the bytes of the example."""
    sent: dict[Any, int] = {}
    for location, index in crossing.values.items():
        value = trace.values[index]
        if location in crossing.copied:
            sent[location] = value.nbytes
        elif value.memory in crossing.joined:
            sent["memory", value.memory] = trace.memories[value.memory].nbytes
        else:
            sent[index] = value.nbytes
    computed = (value for value in trace.values if value.origin in ("input", "op"))
    return ExampleBytes(sum(sent.values()), sum(stated_bytes(value.shape, None, value.dtype) for value in computed))


def stated_bytes(shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype) -> int:
    """The most bytes that a model may allocate for a tensor of this shape; an empty one states its other dimensions.

    >>> stated_bytes((2, 3), None, torch.float32), stated_bytes((0, 3), None, torch.float32)
    (24, 12)
    >>> stated_bytes((2, 3), (0, 1), torch.float32), stated_bytes((2, 3), (100, 1), torch.float32)
    (24, 412)
    """
    elements = math.prod(max(extent, 1) for extent in shape)
    return max(elements, 0 if strides is None else span_of(shape, strides)) * dtype.itemsize


class SizeBudget:
    """The bytes that a boundary may still state; unlimited for a boundary of this process."""

    def __init__(self, boundary: Boundary, example: ExampleBytes) -> None:
        self._remaining: int | None = None
        if boundary.spare_bytes is not None:
            growth = max(boundary.nbytes / example.sent, 1.0) if example.sent else 1.0
            self._explained = round(example.computed * growth)
            self._remaining = self._explained + boundary.spare_bytes

    def charge(self, owner: str, shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype) -> None:
        """Subtract the bytes of a tensor that the boundary states.

        Raises:
            BadBoundary: If the budget is spent.
        """
        if self._remaining is None:
            return
        need = stated_bytes(shape, strides, dtype)
        self._remaining -= need
        if self._remaining < 0:
            raise BadBoundary(
                f"the boundary states shape {shape!r:.80} for {owner!r} ({size(need)}): expected at most "
                f"{size(self._explained)} in all for what it does not hold, by the example and by the bytes that were "
                "sent. Split both sides on an example as large as the largest inputs, or raise limit= (for a server, "
                "max_message)"
            )
