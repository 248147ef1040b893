"""Hash how each call's arguments were computed, independent of call order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from microtome.split.signature import UNKNOWN, Flow

if TYPE_CHECKING:
    from microtome.results.trace import Trace, TracedCall


class Dataflow:
    """Digests of the tensors that calls take and return, from the operators, constants and weights they depend on.

    There are three of each: of everything; without the elements of constants and without integers of operators that
    take sizes; and without these and all integers. Sizes and constants may depend on the example. The last two are
    empty where they do not tell apart the calls of a module in the same call. A digest ends with `UNKNOWN` if anything
    that it depends on cannot be compared between processes, such as a constant on the meta device.

    Args:
        given: Of each call, the arguments that are no tensors.
        scalars: The same of each operator.
        draws: The operators that draw random numbers, which are known by their order.
    """

    def __init__(
        self, trace: Trace, given: Sequence[Sequence[Any]], scalars: Sequence[Scalars], draws: Collection[int] = ()
    ) -> None:
        self._trace = trace
        self._given = [describe_scalars((*plain,), {}) for plain in given]
        self._scalars = scalars if len(scalars) == len(trace.ops) else [(UNKNOWN,) * 3] * len(trace.ops)
        self._order = {op: at for at, op in enumerate(sorted(draws))}
        inputs = [f"{value.name} {value.shape} {value.dtype}" for value in trace.values if value.origin == "input"]
        self._example = _digest(self._given[0][0], *inputs)
        walks = [self._walk(which) for which in range(3)]
        self._outputs = [returned for _, returned in walks]
        full, *partial = [taken for taken, _ in walks]
        self._flows: dict[int, Flow] = {}
        for call in trace.calls:
            groups: dict[str, list[TracedCall]] = {}
            for child in call.children:
                groups.setdefault(trace.calls[child].path, []).append(trace.calls[child])
            for group in groups.values():
                counts = [Counter(digests[one.index] for one in group) for digests in partial]
                for one in group if len(group) > 1 else ():
                    pairs = zip(partial, counts, strict=True)
                    distinct = [found[one.index] if count[found[one.index]] == 1 else "" for found, count in pairs]
                    self._flows[one.index] = (full[one.index], *distinct)

    def arguments(self, call: int) -> Flow | None:
        """The digests of the arguments of a call; None: its module runs once in the call around it."""
        return self._flows.get(call)

    def outputs(self, call: int) -> Flow:
        """The digest of the tensors that a call returns, in order, that of the example, and the first without sizes.

        The last is for other examples, and empty where it does not tell the tensors apart.
        """
        full, partial, _ = (returned[call] for returned in self._outputs)
        distinct = _digest(*partial) if len(set(partial)) == len(partial) else ""
        return _digest(*full), self._example, distinct

    def _walk(self, which: int) -> tuple[list[str], list[list[str]]]:
        """The digest of the arguments of each call, and those of the tensors that it returns."""
        trace, values = self._trace, self._trace.values
        made: dict[int, str] = {}
        written: dict[int, str] = {}

        def of(at: int) -> str:
            value = values[at]
            if at not in made:
                content = "" if which or value.origin != "constant" else value.content or UNKNOWN
                made[at] = f"{value.origin} {value.name} {value.dtype} {content}"
            return made[at] + written.get(value.memory, "")

        taken: list[str] = []
        returned: list[list[str]] = [[] for _ in trace.calls]
        starting = iter(trace.calls)  # in the order in which they begin
        ending: dict[int, list[TracedCall]] = {}
        for one in trace.calls:
            ending.setdefault(one.ends, []).append(one)
        call = next(starting, None)
        for op in (*trace.ops, None):
            for one in ending.get(len(trace.ops) if op is None else op.index, ()):
                returned[one.index] = list(map(of, one.outputs))
            while call is not None and (op is None or call.begins <= op.index):
                taken.append(_digest(self._given[call.index][which], *map(of, call.inputs)))
                call = next(starting, None)
            if op is None:
                break
            path = "" if op.call is None else trace.calls[op.call].path
            drawn = str(self._order.get(op.index, ""))
            digest = _digest(
                op.name, path, drawn, _scalars_in(self._scalars[op.index], op.name, which), *map(of, op.inputs)
            )
            for at in {values[at].memory for at in op.mutates}:
                written[at] = _digest(written.get(at, ""), digest)
            for position, at in enumerate(op.outputs):
                made.setdefault(at, f"{digest}{position}")
        return taken, returned


def _digest(*parts: str) -> str:
    text = "|".join(parts)
    return xxh3_64_hexdigest(text.encode()) + (UNKNOWN if UNKNOWN in text else "")


#: The arguments of an operator that are no tensors: all of them, all again, and all but the integers.
Scalars = tuple[str, ...]

#: Parts of the names of operators whose integers are sizes, which depend on the example.
_SIZED = ("view", "reshape", "expand", "empty", "zeros", "ones", "full", "arange", "repeat", "split", "upsample", "pad",
          "as_strided", "rand", "linspace", "unflatten")  # fmt: skip


def _scalars_in(scalars: Scalars, name: str, which: int) -> str:
    return scalars[2 if which == 1 and any(part in name for part in _SIZED) else which]


def describe_scalars(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scalars:
    full: list[str] = []
    without_ints: list[str] = []
    tensors: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                add(item)
        elif isinstance(value, int) and not isinstance(value, bool):
            full.append(str(value))
        elif not isinstance(value, torch.device):
            text = (
                _text_of(value) if not isinstance(value, Tensor) else f"T{tensors.setdefault(id(value), len(tensors))}"
            )
            full.append(text)
            without_ints.append(text)

    for value in args:
        add(value)
    for name, value in kwargs.items():
        if name not in ("device", "pin_memory"):
            full.append(f"{name}=")
            without_ints.append(f"{name}=")
            add(value)
    everything = ",".join(full)
    return everything, everything, ",".join(without_ints)


def _text_of(value: Any) -> str:
    if isinstance(value, bool | float | complex | str | None | torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.Generator):  # what is drawn from it is known by its order
        return "generator"
    return type(value).__name__ + UNKNOWN
