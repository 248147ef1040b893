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

from microtome.engine import Call, Probe, tensors_in
from microtome.engine.probes import Where
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
    children: list[int] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)


class Recorder(Probe):
    """Writes down what a session tells of one run. It holds no tensor: that would keep their memory from ending."""

    def __init__(self, stand: Stand, device: str | None) -> None:
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
        parent = None if call.parent is None else self._calls[call.parent].index
        record = _Call(len(self._calls), call, parent, type(call.module).__name__, self._indices((args, kwargs)))
        self._calls[call] = record
        if call.parent is not None:
            self._calls[call.parent].children.append(record.index)

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._calls[call].outputs = self._indices(output)

    def fail(self, call: Call, error: BaseException) -> None:
        if not self._failed:  # the innermost is told first
            self._failed = True
            error.add_note(f"in the call {call.address!r} ({type(call.module).__name__})")

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def op_begins(self, where: Where, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written = _mutated(func, args, kwargs)
        if self._stand != "real" and any(not _is_stand_in(tensor) for tensor in written):
            raise CannotStand(f"{_name(func)} would write into a tensor that the model keeps")
        read = map(self._value, _operands((*args, *kwargs.values())))
        self._operands = {v.index: v for v in read}, {v.index: v for v in map(self._value, written)}

    def op(self, where: Where, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._paused:
            return
        index = len(self._ops)
        read, written = self._operands
        made: dict[int, _Value] = {}
        for tensor in _operands(output if isinstance(output, tuple | list) else (output,)):
            value = self._value(tensor, "op", None, index)
            made[value.index] = value
        for value in read.values():
            value.consumers.append(index)
        for value in written.values():
            value.mutated_by.append(index)
        memory = {value.memory.index for value in read.values()}
        views = not written and bool(made) and all(value.memory.index in memory for value in made.values())
        free = views or torch.Tag.inplace_view in func.tags
        moved_out = [value for value in made.values() if value.index not in read] + list(written.values())
        call = None if where.call is None else self._calls[where.call]
        if call is not None:
            call.ops.append(index)
        self._ops.append(
            Op(
                index=index,
                name=_name(func),
                call=None if call is None else call.index,
                phase=where.phase,
                inputs=tuple(read),
                outputs=tuple(made),
                mutates=tuple(written),
                read_bytes=0 if free else sum(map(_moved, read.values())),
                write_bytes=0 if free else sum(map(_moved, moved_out)),
            )
        )

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
        shape = tuple(tensor.shape)
        key = (shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        value = memory.values.get(key)
        if value is None:
            first = next(iter(memory.values.values()), None)
            device = self._device or str(tensor.device)
            facts = (shape, tensor.dtype, device, tensor.numel() * tensor.element_size())
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


def _is_stand_in(tensor: Tensor) -> bool:
    if tensor.is_meta:
        return True
    from torch._subclasses.fake_tensor import FakeTensor  # slow to import, seldom needed

    return isinstance(tensor, FakeTensor)


def _operands(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments of an operator, which are at most lists of tensors."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found.extend(item for item in argument if isinstance(item, Tensor))
    return found


def _mutated(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if func in _BATCH_NORMS and args[5]:
        return _operands(args[3:5])  # running statistics, which the schema does not say are written in training
    return _operands(args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(func))


_BATCH_NORMS = {
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
}


_name = cache(str)


@cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((at, a.name) for at, a in arguments if a.alias_info is not None and a.alias_info.is_write)
