"""Digests of how the arguments and outputs of each call were computed, independent of the order of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from microtome.split.analysis.signature import INCOMPARABLE, Flow

if TYPE_CHECKING:
    from microtome.results.trace import Trace, TracedCall

#: How much of a computation a digest covers: everything; not the elements of constants, nor the integers of operators
#: that take sizes; no elements of constants and no integers at all. Sizes and constants may depend on the example.
_FULL, _UNSIZED, _NO_INTEGERS = range(3)

#: Parts of the names of operators whose integers are sizes.
_SIZED = ("view", "reshape", "expand", "empty", "zeros", "ones", "full", "arange", "repeat", "split", "upsample", "pad",
          "as_strided", "rand", "linspace", "unflatten")  # fmt: skip


class Scalars(NamedTuple):
    """The arguments of an operator or a call other than tensors, as text."""

    full: str
    without_integers: str


class Dataflow:
    """Digests of the tensors that calls take and return, from the operators, constants and weights they depend on.

    There is one of each level of detail. The less detailed ones are empty where they do not distinguish the calls of a
    module in the same call. A digest ends with `INCOMPARABLE` if it depends on anything that cannot be compared between
    processes, such as a constant on the meta device.

    Args:
        plain_arguments: The plain values among the arguments of each call.
        scalars: The scalar arguments of each operator.
        draws: The operators that draw random numbers, which are identified by their order.
    """

    def __init__(
        self,
        trace: Trace,
        plain_arguments: Sequence[Sequence[Any]],
        scalars: Sequence[Scalars],
        draws: Collection[int] = (),
    ) -> None:
        self._trace = trace
        self._call_scalars = [describe_scalars((*plain,), {}) for plain in plain_arguments]
        unknown = Scalars(INCOMPARABLE, INCOMPARABLE)
        self._op_scalars = scalars if len(scalars) == len(trace.ops) else [unknown] * len(trace.ops)
        self._draw_numbers = {op: number for number, op in enumerate(sorted(draws))}
        inputs = [f"{value.name} {value.shape} {value.dtype}" for value in trace.values if value.origin == "input"]
        self._example = _digest(self._call_scalars[0].full, *inputs)
        walks = [self._walk(detail) for detail in (_FULL, _UNSIZED, _NO_INTEGERS)]
        self._outputs = [outputs for _, outputs in walks]
        self._flows: dict[int, Flow] = {}
        full, *partial = [arguments for arguments, _ in walks]
        for parent in trace.calls:
            groups: dict[str, list[int]] = {}
            for child in parent.children:
                groups.setdefault(trace.calls[child].path, []).append(child)
            for group in groups.values():
                counts = [Counter(digests[call] for call in group) for digests in partial]
                for call in group if len(group) > 1 else ():
                    pairs = zip((digests[call] for digests in partial), counts, strict=True)
                    self._flows[call] = (full[call], *(digest if count[digest] == 1 else "" for digest, count in pairs))

    def arguments(self, call: int) -> Flow | None:
        """The digests of the arguments of a call; None: its module runs once in the enclosing call."""
        return self._flows.get(call)

    def outputs(self, call: int) -> Flow:
        """The digests of a call's outputs: in full, of the example's inputs, and without sizes.

        The last is for other examples, and empty where it does not distinguish the outputs.
        """
        full, unsized, _ = (outputs[call] for outputs in self._outputs)
        return _digest(*full), self._example, _digest(*unsized) if len(set(unsized)) == len(unsized) else ""

    def _walk(self, detail: int) -> tuple[list[str], list[list[str]]]:
        """The digest of the arguments of each call, and those of its outputs."""
        trace, values = self._trace, self._trace.values
        computed: dict[int, str] = {}
        written: dict[int, str] = {}

        def digest_of(index: int) -> str:
            value = values[index]
            if index not in computed:
                content = value.content or INCOMPARABLE if detail == _FULL and value.origin == "constant" else ""
                computed[index] = f"{value.origin} {value.name} {value.dtype} {content}"
            return computed[index] + written.get(value.memory, "")

        arguments: list[str] = []
        outputs: list[list[str]] = [[] for _ in trace.calls]
        exits: dict[int, list[TracedCall]] = {}
        for call in trace.calls:
            exits.setdefault(call.ends, []).append(call)
        entering = iter(trace.calls)  # in the order in which they begin
        entered = next(entering, None)
        for op in (*trace.ops, None):
            for call in exits.get(len(trace.ops) if op is None else op.index, ()):
                outputs[call.index] = list(map(digest_of, call.outputs))
            while entered is not None and (op is None or entered.begins <= op.index):
                scalars = self._call_scalars[entered.index]
                text = scalars.without_integers if detail == _NO_INTEGERS else scalars.full
                arguments.append(_digest(text, *map(digest_of, entered.inputs)))
                entered = next(entering, None)
            if op is None:
                break
            path = "" if op.call is None else trace.calls[op.call].path
            scalars = self._op_scalars[op.index]
            has_sizes = detail == _UNSIZED and any(part in op.name for part in _SIZED)
            text = scalars.without_integers if detail == _NO_INTEGERS or has_sizes else scalars.full
            number = str(self._draw_numbers.get(op.index, ""))
            digest = _digest(op.name, path, number, text, *map(digest_of, op.inputs))
            for memory in {values[index].memory for index in op.mutates}:
                written[memory] = _digest(written.get(memory, ""), digest)
            for position, index in enumerate(op.outputs):
                computed.setdefault(index, f"{digest}{position}")
        return arguments, outputs


def _digest(*parts: str) -> str:
    text = "|".join(parts)
    return xxh3_64_hexdigest(text.encode()) + (INCOMPARABLE if INCOMPARABLE in text else "")


def describe_scalars(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scalars:
    """Describe the arguments of an operator other than tensors, in a string that is the same in every process."""
    full: list[str] = []
    without_integers: list[str] = []
    tensors: dict[int, int] = {}

    def add(values: Iterable[Any]) -> None:
        for value in values:
            cls = value.__class__
            if cls is list or cls is tuple:
                add(value)
            elif cls is int:
                full.append(str(value))
            elif isinstance(value, Tensor):
                text = f"T{tensors.setdefault(id(value), len(tensors))}"
                full.append(text)
                without_integers.append(text)
            elif isinstance(value, list | tuple):
                add(value)
            elif isinstance(value, int) and cls is not bool:
                full.append(str(value))
            elif cls is not torch.device:
                text = _describe_scalar(value)
                full.append(text)
                without_integers.append(text)

    add(args)
    for name, value in kwargs.items():
        if name not in ("device", "pin_memory"):
            full.append(f"{name}=")
            without_integers.append(f"{name}=")
            add((value,))
    return Scalars(",".join(full), ",".join(without_integers))


_SPELLED = frozenset((bool, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format))


def _describe_scalar(value: Any) -> str:
    if value.__class__ in _SPELLED:
        return str(value)
    if isinstance(value, bool | float | complex | str | None | torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.Generator):  # what is drawn from it is identified by its order
        return "generator"
    return type(value).__name__ + INCOMPARABLE
