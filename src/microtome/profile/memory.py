"""Compute the live memory over the operators of a run, and the tensors at its peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from microtome.results.measurements import Alive, Kind, Timeline
from microtome.results.trace import Trace, Value

#: The number of tensors at the peak that are reported, the largest first.
_MAX_TENSORS = 40


def live_bytes(trace: Trace) -> tuple[list[int], list[int]]:
    """Return the bytes alive while each operator runs, and those alive between operators."""
    count = len(trace.ops)
    during = [0] * (count + 2)
    between = [0] * (count + 2)
    for memory in trace.memories:
        end = count + 1 if memory.ends is None else memory.ends
        during[memory.begins] += memory.nbytes
        during[end] -= memory.nbytes
        begin = memory.begins + 1 if memory.begins else 0  # before the run: alive before the first operator too
        if begin < end:
            between[begin] += memory.nbytes
            between[end] -= memory.nbytes
    return list(accumulate(during)), list(accumulate(between))


def timeline(trace: Trace, live: Sequence[int]) -> Timeline:
    """Build the timeline of a trace, from the bytes alive while each of its operators runs."""
    forward = [call for call in trace.calls if call.phase == "forward"]
    rows = {call.address: index for index, call in enumerate(forward)}
    owners = [rows.get(call.address, 0) for call in trace.calls]
    count = len(trace.ops)
    without_tensors = Timeline(
        live_bytes=tuple(live[:count]),
        calls=tuple(0 if op.call is None else owners[op.call] for op in trace.ops),
        forward=sum(op.phase == "forward" for op in trace.ops),
        alive=(),
    )
    if without_tensors.peak is None:
        return without_tensors
    return replace(without_tensors, alive=tuple(_alive(trace, without_tensors.peak)))


def _alive(trace: Trace, index: int) -> Iterator[Alive]:
    """Yield the tensors alive while an operator runs, the largest first."""
    first: dict[int, Value] = {}
    for value in trace.values:
        first.setdefault(value.memory, value)
    sums: dict[Kind, list[int]] = {}
    single: list[Alive] = []
    for memory, (nbytes, begins, ends) in enumerate(trace.memories):
        if begins > index or (ends is not None and ends <= index) or memory not in first:
            continue
        value = first[memory]
        if value.origin in ("parameter", "buffer"):
            sums.setdefault(value.origin, []).append(nbytes)
        else:
            single.append(Alive(value.origin, _name(trace, value), nbytes))
    single.sort(key=lambda tensor: -tensor.nbytes)
    groups = [Alive(kind, "", sum(sizes), len(sizes)) for kind, sizes in sums.items()]
    if rest := single[_MAX_TENSORS:]:
        groups.append(Alive("rest", "", sum(tensor.nbytes for tensor in rest), len(rest)))
    yield from sorted((*groups, *single[:_MAX_TENSORS]), key=lambda tensor: -tensor.nbytes)


def _name(trace: Trace, value: Value) -> str:
    if value.producer is None:
        return value.name or ""
    call = trace.ops[value.producer].call
    return "" if call is None else trace.calls[call].address
