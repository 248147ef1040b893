"""Build the rows of a profile from a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from microtome.engine.selectors import named_modules
from microtome.engine.torch_internals import own_buffers, own_parameters
from microtome.flops.conventions.base import Convention
from microtome.profile.memory import live_bytes, timeline
from microtome.results.measurements import Timeline
from microtome.results.metrics import Amounts
from microtome.results.profile import Coverage, UnknownOp
from microtome.results.rows import Group, Row, Tensor, add, group
from microtome.results.trace import Op, Trace, TracedCall
from microtome.trace.costs import TraceCosts

_FORWARD = ("macs", "flops", "madds", "read_bytes", "write_bytes")


class ProfileBuilder:
    """Builds the rows of one trace, priced by a convention."""

    def __init__(
        self, trace: Trace, costs: TraceCosts, model: nn.Module, convention: Convention, *, backward: bool
    ) -> None:
        self._trace = trace
        self._convention = convention
        self._model = model
        self._op_costs = costs.price_ops(trace, convention)
        self._module_costs = costs.price_calls(convention)
        self._backward = backward
        self._counts_backward = backward and convention.has_backward
        self._calls = [call for call in trace.calls if call.phase == "forward"]
        self._counted = {call.address: call.index for call in self._calls}
        self._parameter_owners = _ParameterOwners(model, self._calls)
        self._live, self._between = live_bytes(trace)
        self._saved = self._saved_bytes() if backward else {}

    def rows(self) -> tuple[Row, ...]:
        """Return a row for each call of the forward, in the order they began."""
        backward = self._backward_ops()
        rows: dict[int, Row] = {}
        for call in reversed(self._calls):  # calls inside a call begin after it
            inside = [rows[child] for child in call.children if child in rows]
            rows[call.index] = self._row(call, inside, backward.get(call.index, []))
        return tuple(rows[call.index] for call in self._calls)

    def coverage(self) -> Coverage:
        ops = [op for op in self._trace.ops if op.phase == "forward" or self._counts_backward]
        unknown = [op for op in ops if self._op_costs[op.index] is None]
        by_name = group((op.name, op) for op in unknown)
        unknown_ops = [
            UnknownOp(name, len(runs), tuple(dict.fromkeys(map(self._address, runs))), sum(map(_moved_bytes, runs)))
            for name, runs in sorted(by_name.items(), key=lambda item: -len(item[1]))
        ]
        never_ran = tuple(_never_ran(self._model, {call.path for call in self._calls}))
        return Coverage(len(ops), tuple(unknown_ops), never_ran, sum(map(_moved_bytes, ops)))

    def _address(self, op: Op) -> str:
        return "" if op.call is None else self._trace.calls[op.call].address

    def timeline(self) -> Timeline:
        return timeline(self._trace, self._live)

    # -- one row -------------------------------------------------------------------------------------------------------

    def _ops(self, call: TracedCall) -> list[Group]:
        """Group the operators that the call's own code ran, and add the convention's price of the module itself."""
        by_name: dict[str, list[Op]] = {}
        for index in call.ops:
            if (op := self._trace.ops[index]).phase == "forward":
                by_name.setdefault(op.name, []).append(op)
        cost = self._module_costs.get(call.index)
        moves = cost is None or cost.read_bytes is None
        groups = [self._group(name, ops, moves=moves) for name, ops in by_name.items()]
        if cost is not None:
            read, written = cost.read_bytes or 0, cost.write_bytes or 0
            amounts = cost.macs, cost.flops, self._madds(cost.madds), read, written
            groups.append(Group(name="(module)", runs=1, **dict(zip(_FORWARD, amounts, strict=True))))  # type: ignore[arg-type]
        return groups

    def _group(self, name: str, ops: list[Op], *, moves: bool) -> Group:
        macs, flops, madds = self._sum_costs(ops)
        return Group(
            name=name,
            runs=len(ops),
            macs=macs,
            flops=flops,
            madds=self._madds(madds),
            read_bytes=sum(op.read_bytes for op in ops) if moves else 0,
            write_bytes=sum(op.write_bytes for op in ops) if moves else 0,
        )

    def _sum_costs(self, ops: list[Op]) -> tuple[int | None, int | None, int | None]:
        """Sum the MACs, FLOPs and MAdds of operators of known cost; None if there are operators and none is known."""
        known = [cost for op in ops if (cost := self._op_costs[op.index]) is not None]
        if ops and not known:
            return None, None, None
        return _sum(cost.macs for cost in known), _sum(cost.flops for cost in known), _sum(cost.madds for cost in known)

    def _madds(self, madds: int | None) -> int | None:
        return madds if self._convention.has_madds else None

    def _own(self, call: TracedCall, groups: list[Group], backward: list[Op]) -> Amounts:
        forward = {name: _sum(getattr(group, name) for group in groups) for name in _FORWARD}
        forward["madds"] = self._madds(forward["madds"])
        backward_macs, backward_flops, _ = self._sum_costs(backward) if self._counts_backward else (None, None, None)
        return Amounts(
            **self._parameter_owners.counted(call),
            **forward,  # type: ignore[arg-type]
            backward_macs=backward_macs,
            backward_flops=backward_flops,
            saved_bytes=self._saved.get(call.index, 0) if self._backward else None,
        )

    def _row(self, call: TracedCall, inside: list[Row], backward: list[Op]) -> Row:
        groups = self._ops(call)
        own = self._own(call, groups, backward)
        values = self._trace.values
        return Row(
            **add([own, *inside]),
            address=call.address,
            path=call.path,
            type=call.type,
            depth=call.depth,
            height=1 + max((row.height for row in inside), default=0),
            parent=None if call.parent is None else self._trace.calls[call.parent].address,
            inputs=tuple(_tensor(values[index].shape, values[index].dtype) for index in call.inputs),
            outputs=tuple(_tensor(values[index].shape, values[index].dtype) for index in call.outputs),
            shared_params=self._parameter_owners.shared(call),
            output_bytes=sum(values[index].nbytes for index in dict.fromkeys(call.outputs)),
            peak_bytes=self._peak(call, inside),
            own=own,
            ops=tuple(groups),
        )

    def _peak(self, call: TracedCall, inside: list[Row]) -> int:
        """Return the peak of live bytes while a call runs; if it runs no operator, those alive at that moment."""
        own = [self._live[index] for index in call.ops if self._trace.ops[index].phase == "forward"]
        return max([*own, *(row.peak_bytes for row in inside)], default=self._between[call.begins])

    # -- the backward --------------------------------------------------------------------------------------------------

    def _backward_ops(self) -> dict[int, list[Op]]:
        """Return the operators of the backward, by the call of the forward; those of no call belong to the root."""
        backward: dict[int, list[Op]] = {}
        for op in self._trace.ops if self._backward else ():
            if op.phase != "forward":
                address = None if op.call is None else self._trace.calls[op.call].address
                backward.setdefault(self._counted.get(address or "", 0), []).append(op)
        return backward

    def _saved_bytes(self) -> dict[int, int]:
        """Return the bytes that the forward saves for the backward, by the call whose operator created them."""
        trace = self._trace
        end = self._calls[0].ends
        producers: dict[int, int] = {}
        read: set[int] = set()
        for value in trace.values:
            if value.alias_of is None and value.producer is not None and trace.ops[value.producer].phase == "forward":
                producers[value.memory] = trace.ops[value.producer].call or 0
            if any(trace.ops[op].phase == "backward" for op in value.consumers):
                read.add(value.memory)
        saved: dict[int, int] = {}
        for memory in producers.keys() & read:
            ends = trace.memories[memory].ends
            if trace.memories[memory].begins < end and (ends is None or ends > end):
                saved[producers[memory]] = saved.get(producers[memory], 0) + trace.memories[memory].nbytes
        return saved


class _ParameterOwners:
    """Attributes each parameter to the first call of its module or, if that never ran, of the nearest ancestor."""

    def __init__(self, model: nn.Module, calls: list[TracedCall]) -> None:
        first: dict[str, TracedCall] = {}
        for call in calls:
            first.setdefault(call.path, call)
        self._used: dict[str, list[Parameter]] = {}
        self._params: dict[int, list[Parameter]] = {}
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._inside: dict[int, tuple[dict[int, int], set[int]]] = {}
        seen: set[int] = set()
        for path, module in named_modules(model):
            owner = path
            while owner and owner not in first:  # at the latest the root ran: a trace begins with it
                owner = owner.rpartition(".")[0]
            index = first[owner].index
            params = [tensor for tensor in own_parameters(module).values() if tensor is not None]
            buffers = [tensor for tensor in own_buffers(module).values() if tensor is not None]
            self._used.setdefault(owner, []).extend(params)
            self._params.setdefault(index, []).extend(_new(params, seen))
            self._buffers.setdefault(index, []).extend(_new(buffers, seen))

    def counted(self, call: TracedCall) -> dict[str, int]:
        """Return the amounts attributed to a call."""
        params, buffers = self._params.get(call.index, []), self._buffers.get(call.index, [])
        return {
            "params": sum(param.numel() for param in params),
            "trainable_params": sum(param.numel() for param in params if param.requires_grad),
            "param_bytes": sum(param.nbytes for param in params),
            "buffer_bytes": sum(buffer.nbytes for buffer in buffers),
        }

    def shared(self, call: TracedCall) -> int:
        """Count the parameters used in a call and attributed outside. Calls inside must come first."""
        used = {id(param): param.numel() for param in self._used.get(call.path, [])}
        counted = {id(param) for param in self._params.get(call.index, [])}
        for child in call.children:
            inside_used, inside_counted = self._inside.get(child, ({}, set()))
            used |= inside_used
            counted |= inside_counted
        self._inside[call.index] = used, counted
        return sum(count for key, count in used.items() if key not in counted)


def _new(tensors: list[Any], seen: set[int]) -> list[Any]:
    """Return the tensors that are not in `seen`, and add them to it."""
    new = list({id(tensor): tensor for tensor in tensors if id(tensor) not in seen}.values())
    seen.update(map(id, new))
    return new


def _moved_bytes(op: Op) -> int:
    return op.read_bytes + op.write_bytes


def _sum(numbers: Iterable[int | None]) -> int | None:
    """Return the sum of known numbers; None if there are numbers and none is known."""
    every = list(numbers)
    known = [number for number in every if number is not None]
    return sum(known) if known or not every else None


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return Tensor(shape, str(dtype).removeprefix("torch."))


def _never_ran(model: nn.Module, ran: set[str]) -> Iterator[str]:
    """Yield the paths of modules that did not run, without those inside them."""
    skipped: str | None = None
    for path, module in named_modules(model):
        if skipped is not None and path.startswith(skipped + "."):
            continue
        has_forward: Any = type(module).forward is not nn.Module.forward
        if path not in ran and has_forward:
            skipped = path
            yield path
