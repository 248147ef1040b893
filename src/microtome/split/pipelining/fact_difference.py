"""Describe how the facts of a boundary differ from those of the example."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from microtome.split.boundary.schema import BoundaryRecord, SkippedCallRecord


def describe_difference(expected: BoundaryRecord, got: BoundaryRecord, addresses: Sequence[str]) -> str:
    """Describe the first difference, as "expected X, got Y".

    Args:
        addresses: Those of the calls before the cut, in the order of their records.
    """
    for index, (one, other) in enumerate(zip_longest(expected.calls, got.calls)):
        if one == other:
            continue
        where = f"of {addresses[index]!r} " if index < len(addresses) else ""
        if one is None or other is None:
            return f"expected {len(expected.calls)} calls before the cut, got {len(got.calls)}"
        if _arguments(one) != _arguments(other):
            return f"expected arguments {where}{_arguments(one)}, got {_arguments(other)}"
        if one.plain != other.plain:
            return f"expected an output {where}with the values {one.plain}, got {other.plain}"
        return f"expected outputs {where}{one.outputs}, got {other.outputs}"
    if expected.requires_grad != got.requires_grad:
        return f"expected gradients of {_list(expected.requires_grad)}, got those of {_list(got.requires_grad)}"
    fields = [name for name in expected._fields if getattr(expected, name) != getattr(got, name)]
    return f"expected other {_list(fields)}" if fields else "expected other tensors"


def _arguments(call: SkippedCallRecord) -> str:
    tensors = (f"{dtype}{sizes}" for dtype, *sizes in call.signature.tensors)
    return f"({', '.join((*tensors, *map(repr, call.signature.plain)))})"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
