"""How much memory lives while each operator of a run runs, and what it is when it is the most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from microtome.results.memory import Alive, Kind, Timeline
from microtome.results.trace import Trace, Value

#: So many of the largest that live at the peak are named.
_NAMED = 40


def timeline(trace: Trace, live: Sequence[int]) -> Timeline:
    """That of a trace, from the bytes that live while each of its operators runs."""
    forward = [call for call in trace.calls if call.phase == "forward"]
    rows = {call.address: at for at, call in enumerate(forward)}
    owners = [rows.get(call.address, 0) for call in trace.calls]
    count = len(trace.ops)
    made = Timeline(
        live_bytes=tuple(live[:count]),
        calls=tuple(0 if op.call is None else owners[op.call] for op in trace.ops),
        forward=sum(op.phase == "forward" for op in trace.ops),
        alive=(),
    )
    if made.peak is None:
        return made
    return Timeline(made.live_bytes, made.calls, made.forward, tuple(_alive(trace, made.peak)))


def _alive(trace: Trace, at: int) -> Iterator[Alive]:
    """What lives while an operator runs."""
    first: dict[int, Value] = {}
    for value in trace.values:
        first.setdefault(value.memory, value)
    sums: dict[Kind, list[int]] = {}
    single: list[Alive] = []
    for memory, (nbytes, begins, ends) in enumerate(trace.memories):
        if begins > at or (ends is not None and ends <= at) or memory not in first:
            continue
        value = first[memory]
        if value.origin in ("parameter", "buffer"):
            sums.setdefault(value.origin, []).append(nbytes)
        else:
            single.append(Alive(value.origin, _name(trace, value), nbytes))
    single.sort(key=lambda one: -one.nbytes)
    whole = [Alive(kind, "", sum(several), len(several)) for kind, several in sums.items()]
    if rest := single[_NAMED:]:
        whole.append(Alive("rest", "", sum(one.nbytes for one in rest), len(rest)))
    yield from sorted((*whole, *single[:_NAMED]), key=lambda one: -one.nbytes)


def _name(trace: Trace, value: Value) -> str:
    if value.producer is None:
        return value.name or ""
    call = trace.ops[value.producer].call
    return "" if call is None else trace.calls[call].address
