"""What writes a run down."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
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
from microtome.engine.standin import CannotStand, Originals, Stand
from microtome.errors import Unsupported
from microtome.inputs import Inputs
from microtome.trace.data import How, Memory, Op, Trace, TracedCall, Value


@dataclass(slots=True, eq=False)
class _Memory:
    index: int
    nbytes: int
    begins: int
    ends: int | None = None
    values: dict[Any, _Value] = field(default_factory=dict)
    first: _Value | None = None
    alive: Any = None


@dataclass(slots=True, eq=False)
class _Value:
    index: int
    origin: Any
    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    nbytes: int
    producer: int | None
    memory: _Memory
    alias_of: int | None
    consumers: list[int] = field(default_factory=list)
    mutated_by: list[int] = field(default_factory=list)


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
    """A function shown whole: the index of its operator, and what its backward costs."""

    op: int
    backward: Cost


@dataclass
class _Fold:
    """Operators in a row that are part of the backward of one function, and become one operator."""

    where: Where
    read: list[_Value]
    made: list[weakref.ref[Tensor]]


class Recorder(Probe):
    """Writes down what a session tells of one run. It holds no tensor: that would keep their memory from ending.

    Attributes:
        by_module: What the convention counts for modules as such, by the index of the call.
        originals: What is told before a tensor is written to.
    """

    def __init__(self, stand: Stand, device: str | None, convention: Convention) -> None:
        self._convention = convention
        self.by_module: dict[int, Cost] = {}
        self.originals = Originals()
        self._stand = stand
        self._device = device if stand == "meta" else None
        self._operands: tuple[list[_Value], list[_Value]] = [], []
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
        if (where.whole is not None or self._fold is not None) and self._folds(where, args, kwargs):
            return
        facts = _facts.get(id(func)) or _facts_of(func)
        if not facts.may_write:  # what it reads is afterwards as it was
            return
        with plain():
            written = facts.written(args, kwargs)
            for tensor in written:
                if self._stand == "real":
                    self.originals.before_write(tensor)
                elif not is_stand_in(tensor):
                    raise CannotStand(f"{facts.name} would write into a tensor that the model keeps")
            self._operands = self._read(args, kwargs), [self._value(tensor) for tensor in written]

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._paused:
            return
        if where.phase == "forward":  # then torch's functions do not ask our mode, which slows down everything
            self._record(where, func, args, kwargs, output)
        else:
            with plain():
                self._record(where, func, args, kwargs, output)

    def _record(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """All the cost per operator is here and in what it calls, so these are few and flat."""
        if self._fold is not None:
            self._fold.made.extend(map(weakref.ref, _tensors(output)))
            return
        facts = _facts.get(id(func)) or _facts_of(func)
        read, written = self._operands if facts.may_write else (self._read(args, kwargs), _NONE)
        index = len(self._ops)
        if output.__class__ is Tensor:
            made = [self._value(output, "op", None, index)]
        else:
            made = list(dict.fromkeys([self._value(tensor, "op", None, index) for tensor in _tensors(output)]))
        convention = self._convention
        cost: Cost | None = None
        if where.whole is not None and where.phase != "backward":
            cost, backward = convention.of_whole(func, args, kwargs, output)
            self._functions[where.whole] = _Function(index, backward)
        elif where.phase == "forward" or convention.has_backward:
            cost = convention.op(where.function, func, args, kwargs, output)
        self._write(where, facts.name, read, written, made, cost, facts.is_view)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Value]:
        """The values among the arguments of an operator, which are at most lists of tensors."""
        found: list[_Value] = []
        for argument in (*args, *kwargs.values()) if kwargs else args:
            if argument.__class__ in _NO_TENSORS:
                continue
            if isinstance(argument, Tensor):
                value = self._value(argument)
                if value not in found:
                    found.append(value)
            else:
                for value in map(self._value, _tensors(argument)):
                    if value not in found:
                        found.append(value)
        return found

    def _write(
        self,
        where: Where,
        name: str,
        read: list[_Value],
        written: list[_Value],
        made: list[_Value],
        cost: Cost | None,
        is_view: bool = False,
    ) -> None:
        index = len(self._ops)
        memories = []
        in_bytes = out_bytes = 0
        for value in read:
            value.consumers.append(index)
            memory = value.memory
            memories.append(memory)
            # An expanded tensor has fewer bytes in memory than elements.
            in_bytes += value.nbytes if value.nbytes < memory.nbytes else memory.nbytes
        moves = not is_view and (bool(written) or not made)
        for value in made:
            memory = value.memory
            if memory not in memories:
                moves = not is_view
            if value not in read:
                out_bytes += value.nbytes if value.nbytes < memory.nbytes else memory.nbytes
        for value in written:
            value.mutated_by.append(index)
            out_bytes += min(value.nbytes, value.memory.nbytes)
        call = None
        if where.call is not None:
            record = self._calls[where.call]
            record.ops.append(index)
            call = record.index
        macs, flops, madds = (None, None, None) if cost is None else cost[:3]
        self._ops.append(
            Op(
                index,
                name,
                call,
                where.phase,
                tuple([value.index for value in read]),
                tuple([value.index for value in made]),
                tuple([value.index for value in written]),
                in_bytes if moves else 0,
                out_bytes if moves else 0,
                macs,
                flops,
                madds,
            )
        )

    # -- the backward of a function shown whole ------------------------------------------------------------------------

    def _folds(self, where: Where, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the operator that begins is part of such a backward, and goes into one operator with its like."""
        whole = where.whole if where.phase == "backward" else None
        with plain():
            if self._fold is not None and self._fold.where.whole is not whole:
                self._unfold()
            if whole is None or whole not in self._functions:
                return False
            if self._fold is None:
                self._fold = _Fold(where, [], [])
            known = map(self._known, tensors_in((args, kwargs)))
            self._fold.read += [value for value in known if value is not None]
        return True

    def _unfold(self) -> None:
        """Write the operators down as one, which reads what the function read and made, and makes what is left."""
        assert self._fold is not None
        fold, self._fold = self._fold, None
        assert fold.where.whole is not None
        function = self._functions[fold.where.whole]
        forward = self._ops[function.op]
        index = len(self._ops)
        alive = [tensor for made in fold.made if (tensor := made()) is not None]
        own = [self._values[at] for at in (*forward.inputs, *forward.outputs)]
        made = dict.fromkeys(self._value(tensor, "op", None, index) for tensor in alive)
        cost = function.backward if self._convention.has_backward else None
        function.backward = Cost()  # a backward in two parts costs it once
        read = list(dict.fromkeys([*own, *fold.read]))
        self._write(fold.where, f"{forward.name}_backward", read, [], [v for v in made if v not in own], cost)
        for value in own:  # which memory the kernels keep depends on the device: the function's own is kept
            if value.memory.ends is not None:
                value.memory.ends = max(value.memory.ends, index + 1)

    def _known(self, tensor: Tensor) -> _Value | None:
        memory = self._by_storage.get(id(tensor.untyped_storage()))
        key = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        return None if memory is None else memory.values.get(key)

    # -- values --------------------------------------------------------------------------------------------------------

    def _indices(self, structure: Any) -> tuple[int, ...]:
        return tuple(self._value(tensor).index for tensor in tensors_in(structure))

    def _value(
        self, tensor: Tensor, origin: str = "constant", name: str | None = None, producer: int | None = None
    ) -> _Value:
        memory = self._by_storage.get(id(_storage_of(tensor))) or self._memory(tensor)
        key = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        value = memory.values.get(key)
        if value is None:
            first = memory.first
            value = memory.values[key] = _Value(
                len(self._values),
                origin,
                name,
                tuple(key[0]),
                key[3],
                self._device or _device_name(tensor.device),
                tensor.nbytes,
                producer,
                memory,
                None if first is None else first.index,
            )
            self._values.append(value)
            if first is None:
                memory.first = value
            else:
                memory.nbytes = max(memory.nbytes, _storage_of(tensor).nbytes())  # it may have been resized
        return value

    def _memory(self, tensor: Tensor) -> _Memory:
        if tensor.is_nested:
            raise _lies_apart("nested")
        storage = _storage_of(tensor)
        key = id(storage)
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
                v.index,
                v.origin,
                v.name,
                v.shape,
                v.dtype,
                v.device,
                v.nbytes,
                v.producer,
                tuple(v.consumers),
                tuple(v.mutated_by),
                v.alias_of,
                v.memory.index,
            )
            for v in self._values
        )
        memories = (Memory(memory.nbytes, memory.begins, memory.ends) for memory in self._memories)
        return Trace(how, tuple(calls), tuple(self._ops), tuple(values), tuple(memories))


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    try:
        return tensor.untyped_storage()
    except NotImplementedError as error:
        raise _lies_apart(str(tensor.layout)) from error


def _lies_apart(kind: str) -> Unsupported:
    return Unsupported(f"the run has a tensor whose parts lie apart in memory ({kind}): it cannot be traced yet")


def _tensors(argument: Any) -> list[Tensor]:
    """A tensor, or the tensors in a list of them."""
    if isinstance(argument, Tensor):
        return [argument]
    return [item for item in argument if isinstance(item, Tensor)] if isinstance(argument, list | tuple) else []


_NONE: list[_Value] = []
_device_name = cache(str)
#: Kinds of arguments that hold no tensor, so that they need not be looked at.
_NO_TENSORS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))


class _Facts:
    """What is asked of an operator each time that it runs.

    Attributes:
        writes: The positions and names of the arguments that it writes to.
        is_view: Whether it only changes the shape of its first argument, in place.
    """

    __slots__ = ("func", "is_batch_norm", "is_view", "may_write", "name", "writes")

    def __init__(self, func: AnyOp) -> None:
        self.func = func  # held, since facts are found by its identity
        self.name = f"aten.{func.__name__}"
        self.writes: tuple[tuple[int, str], ...] = ()
        self.is_view = self.is_batch_norm = False
        if isinstance(func, OpOverload):
            self.name = str(func)
            self.is_view = torch.Tag.inplace_view in func.tags
            self.is_batch_norm = func in _BATCH_NORMS
            arguments = enumerate(func._schema.arguments)
            self.writes = tuple((at, a.name) for at, a in arguments if a.alias_info and a.alias_info.is_write)
        self.may_write = bool(self.writes) or self.is_batch_norm

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        if self.is_batch_norm and args[5]:
            return _tensors(args[3:5])  # running statistics, which the schema does not say are written in training
        given = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.writes]
        return [tensor for item in given for tensor in _tensors(item)]


_facts: dict[int, _Facts] = {}


def _facts_of(func: AnyOp) -> _Facts:
    facts = _facts.get(id(func))
    if facts is None:
        facts = _facts[id(func)] = _Facts(func)
    return facts


_BATCH_NORMS = {
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
}
