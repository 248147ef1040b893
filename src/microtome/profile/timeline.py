"""How much memory lives while each operator of a run runs, and what it is when it is the most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from microtome.trace import Trace, Value

#: So many of the largest that live at the peak are named.
_NAMED = 40

Kind = Literal["parameter", "buffer", "input", "constant", "op", "rest"]


@dataclass(frozen=True, slots=True)
class Alive:
    """Memory that is in use at the peak.

    Attributes:
        kind: What it was made by: `"op"` for an operator, else what it was when the run began; `"rest"` for all that
            are not named.
        name: The address of the call that made it; of an input its place; empty where several are one.
        count: How many pieces of memory. All parameters are one entry, and so are all buffers.
    """

    kind: Kind
    name: str
    nbytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory of a run, operator by operator, weights and inputs included.

    Attributes:
        live_bytes: What lives while each operator runs.
        calls: The row whose code ran each, by its index among the rows; of the backward, the row it belongs to.
        forward: How many of them are of the forward; those of the backward follow.
        alive: What lives while the operator with the most runs, the largest first.
    """

    live_bytes: tuple[int, ...]
    calls: tuple[int, ...]
    forward: int
    alive: tuple[Alive, ...]

    @property
    def peak(self) -> int | None:
        """The operator while which the most lives; None where none ran."""
        return max(range(len(self.live_bytes)), key=self.live_bytes.__getitem__, default=None)

    @classmethod
    def from_dict(cls, data: dict[str, Any], rows: int) -> Self:
        """The timeline that a dict describes, of a profile with so many rows."""
        alive = tuple(Alive(**one) for one in data["alive"])
        made = cls(tuple(data["live_bytes"]), tuple(data["calls"]), data["forward"], alive)
        if len(made.calls) != len(made.live_bytes) or not 0 <= made.forward <= len(made.calls):
            raise ValueError(f"expected a row for each of {len(made.live_bytes)} operators, got {len(made.calls)}")
        if outside := [at for at in made.calls if not 0 <= at < rows]:
            raise ValueError(f"expected operators of {rows} rows, got one of row {outside[0]}")
        return made


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
