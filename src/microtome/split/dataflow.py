"""Digests of where the arguments of calls come from: the same in every process, in whatever order calls run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from microtome.split.signature import Flow

if TYPE_CHECKING:
    from microtome.trace.data import Trace, TracedCall


class Dataflow:
    """The digests of what each call is given, of tensors from the operators and weights that they were made with.

    There are two of each call: one of everything, and one without integers, which may depend on the sizes of the
    example. The second is empty where it does not tell apart the calls of a module in the same call.
    """

    def __init__(self, trace: Trace, given: Sequence[Sequence[Any]], scalars: Sequence[Scalars]) -> None:
        self._trace = trace
        self._given = [scalars_of((*plain,), {}) for plain in given]
        self._scalars = scalars if len(scalars) == len(trace.ops) else [("", "")] * len(trace.ops)
        full, rough = self._walk(0), self._walk(1)
        self._flows: dict[int, Flow] = {}
        for call in trace.calls:
            groups: dict[str, list[TracedCall]] = {}
            for child in call.children:
                groups.setdefault(trace.calls[child].path, []).append(trace.calls[child])
            for group in groups.values():
                counts = Counter(rough[one.index] for one in group)
                for one in group if len(group) > 1 else ():
                    distinct = rough[one.index] if counts[rough[one.index]] == 1 else ""
                    self._flows[one.index] = full[one.index], distinct

    def of(self, call: int) -> Flow | None:
        """The digests of a call; None: its module runs once in the call around it."""
        return self._flows.get(call)

    def _walk(self, which: int) -> list[str]:
        """The digest of the arguments of each call."""
        trace, values = self._trace, self._trace.values
        made: dict[int, str] = {}
        written: dict[int, str] = {}

        def of(at: int) -> str:
            value = values[at]
            if at not in made:
                made[at] = f"{value.origin} {value.name} {value.dtype}"
            return made[at] + written.get(value.memory, "")

        found: list[str] = []
        starting = iter(trace.calls)  # in the order in which they begin
        call = next(starting, None)
        for op in (*trace.ops, None):
            while call is not None and (op is None or call.begins <= op.index):
                found.append(_digest(self._given[call.index][which], *map(of, call.inputs)))
                call = next(starting, None)
            if op is None:
                break
            path = "" if op.call is None else trace.calls[op.call].path
            digest = _digest(op.name, path, self._scalars[op.index][which], *map(of, op.inputs))
            for at in {values[at].memory for at in op.mutates}:
                written[at] = _digest(written.get(at, ""), digest)
            for position, at in enumerate(op.outputs):
                made.setdefault(at, f"{digest}{position}")
        return found


def _digest(*parts: str) -> str:
    return xxh3_64_hexdigest("|".join(parts).encode())


#: The arguments of an operator that are no tensors: all of them, and all but the integers.
Scalars = tuple[str, str]


def scalars_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scalars:
    full: list[str] = []
    rough: list[str] = []

    def add(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                add(item)
        elif isinstance(value, bool | float | str | None | torch.dtype):
            full.append(str(value))
            rough.append(str(value))
        elif not isinstance(value, Tensor | torch.device):
            full.append(str(value) if isinstance(value, int) else type(value).__name__)

    for value in args:
        add(value)
    for name, value in kwargs.items():
        if name not in ("device", "pin_memory"):
            add(value)
    return ",".join(full), ",".join(rough)
