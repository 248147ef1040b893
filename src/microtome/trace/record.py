"""What writes a run down."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from microtome.count.conventions import Convention, Cost
from microtome.engine import Call, Probe, tensors_in
from microtome.engine.functions import Whole, is_stand_in, plain
from microtome.engine.probes import AnyOp, Where
from microtome.engine.standin import CannotStand, Stand
from microtome.errors import Unsupported
from microtome.inputs import Inputs
from microtome.trace.data import How, Memory, Op, Trace, TracedCall, Value


@dataclass
class _Memory:
    index: int
    nbytes: int
    begins: int
    ends: int | None = None
    values: dict[Any, _Value] = field(default_factory=dict)
    alive: Any = None


@dataclass
class _Value:
    index: int
    origin: Any
    name: str | None
    tensor: tuple[tuple[int, ...], torch.dtype, str, int]
    producer: int | None
    memory: _Memory
    alias_of: int | None
    consumers: list[int] = field(default_factory=list)
    mutated_by: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.tensor[3]


@dataclass
class _Call:
    index: int
    call: Call
    parent: int | None
    type: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    begins: int = 0
    ends: int = 0
    done: bool = False
    children: list[int] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)


@dataclass
class _Function:
    """A function shown whole, and what its backward costs."""

    op: Op
    backward: Cost


@dataclass
class _Fold:
    """Operators in a row that are part of the backward of one function, and become one operator."""

    where: Where
    read: dict[int, _Value]
    made: list[weakref.ref[Tensor]]


class Recorder(Probe):
    """Writes down what a session tells of one run. It holds no tensor: that would keep their memory from ending.

    Attributes:
        by_module: What the convention counts for modules as such, by the index of the call.
    """

    def __init__(self, stand: Stand, device: str | None, convention: Convention) -> None:
        self._convention = convention
        self.by_module: dict[int, Cost] = {}
        self._stand = stand
        self._device = device if stand == "meta" else None
        self._operands: tuple[dict[int, _Value], dict[int, _Value]] = {}, {}
        self._paused = False
        self._calls: dict[Call, _Call] = {}
        self._ops: list[Op] = []
        self._values: list[_Value] = []
        self._memories: list[_Memory] = []
        self._by_storage: dict[int, _Memory] = {}
        self._failed = False
        self._functions: dict[Whole, _Function] = {}
        self._fold: _Fold | None = None

    def name(self, model: nn.Module, inputs: Inputs) -> None:
        """Know the tensors that are there before the run begins."""
        for name, parameter in model.named_parameters():
            self._value(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            self._value(buffer, "buffer", name)
        places = {**{f"args[{at}]": value for at, value in enumerate(inputs.args)}, **inputs.kwargs}
        for place, value in places.items():
            for at, tensor in enumerate(tensors := list(tensors_in(value))):
                self._value(tensor, "input", place if len(tensors) == 1 else f"{place}[{at}]")

    # -- what the session tells ----------------------------------------------------------------------------------------

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stand == "meta" and torch._C._is_any_autocast_enabled():
            raise CannotStand("autocast chooses dtypes by the device")
        with plain():
            parent = None if call.parent is None else self._calls[call.parent]
            index = None if parent is None else parent.index
            record = _Call(len(self._calls), call, index, type(call.module).__name__, self._indices((args, kwargs)))
        record.begins = len(self._ops)
        self._calls[call] = record
        if parent is not None:
            parent.children.append(record.index)

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        record = self._calls[call]
        with plain():
            record.outputs = self._indices(output)
            record.ends = len(self._ops)
            record.done = True
            if self._convention.module is not None and call.module is not None:
                self.by_module[record.index] = self._convention.module(call.module, (*args, *kwargs.values()), output)

    def fail(self, call: Call, error: BaseException) -> None:
        if not self._failed:  # the innermost is told first
            self._failed = True
            error.add_note(f"in the call {call.address!r} ({type(call.module).__name__})")
            done = [record.call.address for record in self._calls.values() if record.done and not record.children]
            shown = ", ".join(done if len(done) <= 12 else ["…", *done[-12:]])
            error.add_note(f"layers that ran before: {shown}" if done else "no layer ran before")

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def op_begins(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with plain():
            operands = _operands((*args, *kwargs.values()))
            if self._folds(where, operands):
                return
            written = _mutated(func, args, kwargs)
            if written and self._stand != "real" and not all(map(is_stand_in, written)):
                raise CannotStand(f"{_name(func)} would write into a tensor that the model keeps")
            self._operands = (
                {value.index: value for value in map(self._value, operands)},
                {value.index: value for value in map(self._value, written)},
            )

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._paused:
            return
        with plain():
            outputs = _operands(output if isinstance(output, tuple | list) else (output,))
            if self._fold is not None:
                self._fold.made.extend(map(weakref.ref, outputs))
                return
            index = len(self._ops)
            made = {v.index: v for v in [self._value(tensor, "op", None, index) for tensor in outputs]}
            if where.whole is None or where.phase == "backward":
                cost = self._cost(where, func, args, kwargs, output)
            else:
                cost, backward = self._convention.of_whole(func, args, kwargs, output)
        self._write(where, _name(func), *self._operands, made, cost, moves=not _only_views(func))
        if where.whole is not None and where.phase != "backward":
            self._functions[where.whole] = _Function(self._ops[-1], backward)

    def _cost(
        self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Cost | None:
        if where.phase != "forward" and not self._convention.has_backward:
            return None
        return self._convention.op(where.function, func, args, kwargs, output)

    def _write(
        self,
        where: Where,
        name: str,
        read: dict[int, _Value],
        written: dict[int, _Value],
        made: dict[int, _Value],
        cost: Cost | None,
        *,
        moves: bool = True,
    ) -> None:
        index = len(self._ops)
        for value in read.values():
            value.consumers.append(index)
        for value in written.values():
            value.mutated_by.append(index)
        if moves and not written and made:
            memory = {value.memory.index for value in read.values()}
            moves = not all(value.memory.index in memory for value in made.values())
        moved_out = [value for value in made.values() if value.index not in read] + list(written.values())
        call = None if where.call is None else self._calls[where.call]
        if call is not None:
            call.ops.append(index)
        self._ops.append(
            Op(
                index=index,
                name=name,
                call=None if call is None else call.index,
                phase=where.phase,
                inputs=tuple(read),
                outputs=tuple(made),
                mutates=tuple(written),
                read_bytes=sum(map(_moved, read.values())) if moves else 0,
                write_bytes=sum(map(_moved, moved_out)) if moves else 0,
                macs=None if cost is None else cost.macs,
                flops=None if cost is None else cost.flops,
                madds=None if cost is None else cost.madds,
            )
        )

    # -- the backward of a function shown whole ------------------------------------------------------------------------

    def _folds(self, where: Where, operands: list[Tensor]) -> bool:
        """Whether the operator that begins is part of such a backward, and goes into one operator with its like."""
        whole = where.whole if where.phase == "backward" else None
        if self._fold is not None and self._fold.where.whole is not whole:
            self._unfold()
        if whole is None or whole not in self._functions:
            return False
        if self._fold is None:
            self._fold = _Fold(where, {}, [])
        known = (self._known(tensor) for tensor in operands)
        self._fold.read.update({value.index: value for value in known if value is not None})
        return True

    def _unfold(self) -> None:
        """Write the operators down as one, which reads what the function read and made, and makes what is left."""
        assert self._fold is not None
        fold, self._fold = self._fold, None
        assert fold.where.whole is not None
        function = self._functions[fold.where.whole]
        index = len(self._ops)
        alive = [tensor for made in fold.made if (tensor := made()) is not None]
        made = {value.index: value for value in [self._value(tensor, "op", None, index) for tensor in alive]}
        read = {at: self._values[at] for at in (*function.op.inputs, *function.op.outputs)}
        cost = function.backward if self._convention.has_backward else None
        function.backward = Cost()  # a backward in two parts costs it once
        name = f"{function.op.name}_backward"
        self._write(fold.where, name, read | fold.read, {}, {at: v for at, v in made.items() if at not in read}, cost)
        for value in read.values():  # which memory the kernels keep depends on the device: the function's own is kept
            if value.memory.ends is not None:
                value.memory.ends = max(value.memory.ends, index + 1)

    def _known(self, tensor: Tensor) -> _Value | None:
        memory = self._by_storage.get(id(tensor.untyped_storage()))
        return None if memory is None else memory.values.get(_key(tensor))

    # -- values --------------------------------------------------------------------------------------------------------

    def _indices(self, structure: Any) -> tuple[int, ...]:
        return tuple(self._value(tensor).index for tensor in tensors_in(structure))

    def _value(
        self, tensor: Tensor, origin: str = "constant", name: str | None = None, producer: int | None = None
    ) -> _Value:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise Unsupported(f"the run has a tensor whose parts lie apart in memory ({kind}): it cannot be traced yet")
        memory = self._memory(tensor)
        key = _key(tensor)
        value = memory.values.get(key)
        if value is None:
            first = next(iter(memory.values.values()), None)
            device = self._device or str(tensor.device)
            facts = (tuple(tensor.shape), tensor.dtype, device, tensor.numel() * tensor.element_size())
            alias = None if first is None else first.index
            value = _Value(len(self._values), origin, name, facts, producer, memory, alias)
            memory.values[key] = value
            self._values.append(value)
        return value

    def _memory(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = id(storage)
        memory = self._by_storage.get(key)
        if memory is not None:
            memory.nbytes = max(memory.nbytes, storage.nbytes())  # it may have been resized
        else:
            memory = _Memory(len(self._memories), storage.nbytes(), len(self._ops))
            memory.alive = weakref.ref(storage, lambda _: self._gone(key))
            self._by_storage[key] = memory
            self._memories.append(memory)
        return memory

    def _gone(self, key: int) -> None:
        self._by_storage.pop(key).ends = len(self._ops)

    # -- the result ----------------------------------------------------------------------------------------------------

    def trace(self, how: How) -> Trace:
        if self._fold is not None:
            self._unfold()
        calls = (
            TracedCall(
                index=record.index,
                address=record.call.address,
                path=record.call.path,
                type=record.type,
                phase=record.call.phase,
                parent=record.parent,
                children=tuple(record.children),
                depth=record.call.depth,
                inputs=record.inputs,
                outputs=record.outputs,
                ops=tuple(record.ops),
                begins=record.begins,
                ends=record.ends,
            )
            for record in self._calls.values()
        )
        values = (
            Value(
                index=value.index,
                origin=value.origin,
                name=value.name,
                shape=value.tensor[0],
                dtype=value.tensor[1],
                device=value.tensor[2],
                nbytes=value.tensor[3],
                producer=value.producer,
                consumers=tuple(value.consumers),
                mutated_by=tuple(value.mutated_by),
                alias_of=value.alias_of,
                memory=value.memory.index,
            )
            for value in self._values
        )
        memories = (Memory(memory.nbytes, memory.begins, memory.ends) for memory in self._memories)
        return Trace(how, tuple(calls), tuple(self._ops), tuple(values), tuple(memories))


def _moved(value: _Value) -> int:
    """The bytes that reading or writing it moves: an expanded tensor has fewer in memory than elements."""
    return min(value.nbytes, value.memory.nbytes)


def _operands(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments of an operator, which are at most lists of tensors."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found.extend(item for item in argument if isinstance(item, Tensor))
    return found


def _key(tensor: Tensor) -> Any:
    """What tells the values in one memory apart."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _mutated(func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if func in _BATCH_NORMS and args[5]:
        return _operands(args[3:5])  # running statistics, which the schema does not say are written in training
    return _operands(args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(func))


_BATCH_NORMS = {
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
}


@cache
def _name(func: AnyOp) -> str:
    return str(func) if isinstance(func, OpOverload) else f"aten.{func.__name__}"


@cache
def _only_views(func: AnyOp) -> bool:
    return isinstance(func, OpOverload) and torch.Tag.inplace_view in func.tags


@cache
def _written_arguments(func: AnyOp) -> tuple[tuple[int, str], ...]:
    if not isinstance(func, OpOverload):
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple((at, a.name) for at, a in arguments if a.alias_info is not None and a.alias_info.is_write)
