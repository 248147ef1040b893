"""Bound the sizes that a boundary states for tensors it does not hold, by the bytes that it does hold.

Placeholders and views cost nothing to describe, and a tail may allocate what they state: `zeros_like(placeholder)`,
`arange(placeholder.shape[1])`, a sum over a view of stride 0. A head that was given more than the example sends more,
too. So all that a boundary states may have at most as many bytes as the model computed on the example, times the growth
of what was sent, and some to spare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from microtome.errors import BadBoundary
from microtome.results.trace import Trace
from microtome.split.boundary import Boundary
from microtome.split.crossing import Crossing
from microtome.split.tensor_bytes import span_of
from microtome.units import size


class Volume(NamedTuple):
    """The bytes of the example.

    Attributes:
        sent: Of the tensors that cross.
        computed: Of all inputs, and of all that operators made, views included.
    """

    sent: int
    computed: int


def volume_of(trace: Trace, crossing: Crossing) -> Volume:
    """The volume of a cut's example."""
    sent: dict[Any, int] = {}
    for place, at in crossing.values.items():
        value = trace.values[at]
        if place in crossing.copied:
            sent[place] = value.nbytes
        elif value.memory in crossing.joined:
            sent["memory", value.memory] = trace.memories[value.memory].nbytes
        else:
            sent[at] = value.nbytes
    made = (value for value in trace.values if value.origin in ("input", "op"))
    return Volume(sum(sent.values()), sum(stated_bytes(one.shape, None, one.dtype) for one in made))


def stated_bytes(shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype) -> int:
    """The most bytes that a tensor of this shape may have a model allocate; an empty one states its other dimensions.

    >>> stated_bytes((2, 3), None, torch.float32), stated_bytes((0, 3), None, torch.float32)
    (24, 12)
    >>> stated_bytes((2, 3), (0, 1), torch.float32), stated_bytes((2, 3), (100, 1), torch.float32)
    (24, 412)
    """
    elements = math.prod(max(extent, 1) for extent in shape)
    return max(elements, 0 if strides is None else span_of(shape, strides)) * dtype.itemsize


class SizeBudget:
    """The sizes that a boundary may still state. One that was made in this process may state anything."""

    def __init__(self, boundary: Boundary | None = None, example: Volume | None = None) -> None:
        self._left: int | None = None
        if boundary is not None and boundary.spare_bytes is not None and example is not None:
            sent = boundary.nbytes
            growth = sent / example.sent if example.sent and sent > example.sent else 1.0
            self._explained = round(example.computed * growth)
            self._left = self._explained + boundary.spare_bytes

    def take(self, of: str, shape: Any, strides: Any, dtype: torch.dtype) -> None:
        """Count a tensor that is stated.

        Raises:
            ValueError: If no tensor has such a shape.
            BadBoundary: If it has more bytes than are left.
        """
        for numbers in (shape,) if strides is None else (shape, strides):
            if not _are_sizes(numbers):
                raise ValueError(f"expected sizes and strides, got {numbers!r:.80}")
        if strides is not None and len(strides) != len(shape):
            raise ValueError(f"expected {len(shape)} strides, got {strides!r:.80}")
        if self._left is None:
            return
        need = stated_bytes(shape, strides, dtype)
        self._left -= need
        if self._left < 0:
            raise BadBoundary(
                f"the boundary states shape {shape!r:.80} for {of!r} ({size(need)}): expected at most "
                f"{size(self._explained)} in all for what it does not hold, by the example and by the bytes that were "
                "sent. Split both sides on an example as large as the largest inputs, or raise limit= (for a server, "
                "max_message)"
            )


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list | tuple) and all(type(one) is int and 0 <= one < 2**62 for one in numbers)
