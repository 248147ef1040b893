"""Record one run as a trace."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from microtome.addresses import number_calls
from microtome.engine import Call, Probe, tensors_in
from microtome.engine.arguments import CannotSubstitute
from microtome.engine.composite_ops import CompositeOp, is_meta_or_fake
from microtome.engine.module_index import untraced_root_error
from microtome.engine.probes import AnyOp, Where
from microtome.engine.snapshot import WriteBackups
from microtome.engine.torch_internals import DisableTorchFunction, is_autocast_enabled
from microtome.errors import Unsupported
from microtome.flops.composite import composite_costs
from microtome.flops.registry import NOTHING, OpCost, cost_of
from microtome.inputs import Inputs
from microtome.results.trace import How, Op, Read, TensorMode, Trace, TracedCall
from microtome.trace.costs import TraceCosts
from microtome.trace.op_schema import OpSchema, op_schema, tensors
from microtome.trace.storages import Storages, ValueRecord


@dataclass
class _OpenCall:
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
    """A composite operator: its index, and the cost of its backward."""

    op: int
    backward: OpCost | None


@dataclass
class _Fold:
    """Operators in a row that are part of the backward of one function, and become one operator."""

    where: Where
    read: list[ValueRecord]
    made: list[weakref.ref[Tensor]]


class TraceRecorder(Probe):
    """Writes down what a session tells of one run. It holds no tensor: that would keep their memory from ending.

    Attributes:
        costs: What any convention needs to price the run.
        backups: What is told before a tensor is written to.
    """

    def __init__(self, tensor_mode: TensorMode, device: str | None, *, digest_constants: bool = False) -> None:
        self._model: type[nn.Module] = nn.Module
        self.costs = TraceCosts()
        self.backups = WriteBackups()
        self._tensor_mode: TensorMode = tensor_mode
        self._device = device
        self._operands: tuple[list[ValueRecord], list[ValueRecord]] = [], []
        self._paused = False
        self._running_op: AnyOp | None = None
        self._calls: dict[Call, _OpenCall] = {}
        self._ops: list[Op] = []
        self._reads: list[Read] = []
        self._values = Storages(device if tensor_mode == "meta" else None, digest_constants=digest_constants)
        self._failed = False
        self._functions: dict[CompositeOp, _Function] = {}
        self._fold: _Fold | None = None

    def value_of(self, tensor: Tensor) -> int | None:
        """The index of the value that a tensor is; None: it was not seen so far."""
        value = self._values.find(tensor)
        return None if value is None else value.index

    def fork(self) -> TraceRecorder:
        """A recorder of one more run on the same stand-ins."""
        other = TraceRecorder(self._tensor_mode, self._device)
        other.backups = self.backups
        return other

    def register_tensors(self, model: nn.Module, inputs: Inputs) -> None:
        """Know the tensors that are there before the run begins."""
        self._model = type(model)
        for name, parameter in model.named_parameters():
            self._values.of(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            self._values.of(buffer, "buffer", name)
        places = {**{f"args[{at}]": value for at, value in enumerate(inputs.args)}, **inputs.kwargs}
        for place, value in places.items():
            for at, tensor in enumerate(tensors := list(tensors_in(value))):
                self._values.of(tensor, "input", place if len(tensors) == 1 else f"{place}[{at}]")

    # -- what the session tells ----------------------------------------------------------------------------------------

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._tensor_mode == "meta" and is_autocast_enabled():
            raise CannotSubstitute("autocast chooses dtypes by the device")
        if call.parent is None and call.phase == "forward":
            self._check_root(call)
        with DisableTorchFunction():
            parent = None if call.parent is None else self._calls[call.parent]
            index = None if parent is None else parent.index
            record = _OpenCall(
                len(self._calls), call, index, type(call.module).__name__, self._values.indices_in((args, kwargs))
            )
        record.begins = len(self._ops)
        self._calls[call] = record
        if parent is not None:
            parent.children.append(record.index)

    def _check_root(self, call: Call) -> None:
        """Raise if a call that is inside no other is not the one run of the model."""
        if call.path and not self._calls:
            raise untraced_root_error(self._model)
        if self._calls and not call.path:
            raise Unsupported(
                f"expected one run of the model, got a second: {self._model.__name__}.__call__ runs it again. Run it "
                "once there, or give a module that holds the model and calls it, such as nn.Sequential(model)"
            )
        if self._calls:
            raise Unsupported(f"{call.address!r} runs in another thread than the model: its operators cannot be seen")

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        record = self._calls[call]
        with DisableTorchFunction():
            record.outputs = self._values.indices_in(output)
            record.ends = len(self._ops)
            record.done = True
            if call.module is not None:
                self.costs.add_call(record.index, call.module, (*args, *kwargs.values()), output)

    def fail(self, call: Call, error: BaseException) -> None:
        if not self._failed:  # the innermost is told first
            self._failed = True
            where = f"the call {call.address!r}" if call.address else "the model itself"
            error.add_note(f"in {where} ({type(call.module).__name__})")
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

    def unfinished_op(self) -> tuple[int, str] | None:
        """The operator that began and did not end: its index, and its name."""
        return None if self._running_op is None else (len(self._ops), op_schema(self._running_op).name)

    def has_op(self, index: int, name: str) -> bool:
        """Whether the operator with this index has this name."""
        return index < len(self._ops) and self._ops[index].name == name

    def op_begins(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running_op = func
        if where.autocast and self._tensor_mode == "meta":
            raise CannotSubstitute("autocast chooses dtypes by the device")
        if (where.part_of is not None or self._fold is not None) and self._fold_backward_op(where, args, kwargs):
            return
        schema = op_schema(func)
        if not schema.may_write:  # what it reads is afterwards as it was
            return
        with DisableTorchFunction():
            written = schema.written(args, kwargs)
            for tensor in written:
                if self._tensor_mode == "real":
                    self.backups.before_write(tensor)
                    if self._values.is_external(tensor):
                        self.backups.before_write_outside(tensor)
                elif not is_meta_or_fake(tensor):
                    raise CannotSubstitute(f"{schema.name} would write into a tensor that the model keeps")
            self._operands = self._values.operands_of(args, kwargs), [self._values.of(tensor) for tensor in written]

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._running_op = None
        if self._paused:
            return
        if where.phase == "forward":  # then torch's functions do not ask our mode, which slows down everything
            self._record(where, func, args, kwargs, output)
        else:
            with DisableTorchFunction():
                self._record(where, func, args, kwargs, output)

    def read(self, where: Where, tensor: Tensor) -> None:
        with DisableTorchFunction():
            call = None if where.call is None else self._calls[where.call].index
            self._reads.append(Read(len(self._ops), call, self._values.of(tensor).index))

    def _record(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """All the cost per operator is here and in what it calls, so these are few and flat."""
        if self._fold is not None:
            self._fold.made.extend(map(weakref.ref, tensors(output)))
            return
        schema = op_schema(func)
        read, written = self._operands if schema.may_write else (self._values.operands_of(args, kwargs), [])
        if schema.is_product and self._tensor_mode != "real":
            _check_dtypes(schema, read)
        index = len(self._ops)
        if output.__class__ is Tensor:
            made = [self._values.of(output, "op", None, index)]
        else:
            made = list(dict.fromkeys([self._values.of(tensor, "op", None, index) for tensor in tensors(output)]))
        if where.composite is not None:
            cost, backward = composite_costs(func, args, kwargs, output)
            self._functions[where.composite] = _Function(index, backward)
        else:
            cost = cost_of(func, args, kwargs, output)
            if cost is not None and where.phase == "forward":
                self.costs.count(index, where.function, func, args, output, cost)
        self._write(where, schema.name, read, written, made, cost, schema)

    def _write(
        self,
        where: Where,
        name: str,
        read: list[ValueRecord],
        written: list[ValueRecord],
        made: list[ValueRecord],
        cost: OpCost | None,
        schema: OpSchema | None = None,
    ) -> None:
        is_view = schema is not None and schema.is_view
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
        if schema is not None and schema.is_gather and read:
            in_bytes -= max(min(read[0].nbytes, read[0].memory.nbytes) - out_bytes, 0)
        for value in written:
            value.mutated_by.append(index)
            out_bytes += min(value.nbytes, value.memory.nbytes)
        call = None
        if where.call is not None:
            record = self._calls[where.call]
            record.ops.append(index)
            call = record.index
        macs = flops = madds = None
        if cost is NOTHING:
            macs = flops = madds = 0
        elif cost is not None:
            macs, flops, madds = cost.macs, cost.flops, cost.madds
        self.costs.ops.append(cost)
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
        self._values.clock = index + 1

    # -- the backward of a function shown whole ------------------------------------------------------------------------

    def _fold_backward_op(self, where: Where, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the operator that begins is part of such a backward, and goes into one operator with its like."""
        with DisableTorchFunction():
            if self._fold is not None and self._fold.where.part_of is not where.part_of:
                self._write_fold()
            if where.part_of is None or where.part_of not in self._functions:
                return False
            if self._fold is None:
                self._fold = _Fold(where, [], [])
            known = map(self._values.find, tensors_in((args, kwargs)))
            self._fold.read += [value for value in known if value is not None]
        return True

    def _write_fold(self) -> None:
        """Write the operators down as one, which reads what the function read and made, and makes what is left."""
        assert self._fold is not None
        fold, self._fold = self._fold, None
        assert fold.where.part_of is not None
        function = self._functions[fold.where.part_of]
        forward = self._ops[function.op]
        index = len(self._ops)
        alive = [tensor for made in fold.made if (tensor := made()) is not None]
        own = [self._values[at] for at in (*forward.inputs, *forward.outputs)]
        made = dict.fromkeys(self._values.of(tensor, "op", None, index) for tensor in alive)
        cost = function.backward
        function.backward = NOTHING  # a backward in two parts costs it once
        read = list(dict.fromkeys([*own, *fold.read]))
        self._write(fold.where, f"{forward.name}_backward", read, [], [v for v in made if v not in own], cost)
        for value in own:  # which memory the kernels keep depends on the device: the function's own is kept
            if value.memory.ends is not None:
                value.memory.ends = max(value.memory.ends, index + 1)

    # -- the result ----------------------------------------------------------------------------------------------------

    def trace(self, how: How) -> Trace:
        if not self._calls:
            raise untraced_root_error(self._model)
        if self._fold is not None:
            self._write_fold()
        addresses = number_calls(record.call.address for record in self._calls.values())
        calls = (
            TracedCall(
                index=record.index,
                address=address,
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
            for record, address in zip(self._calls.values(), addresses, strict=True)
        )
        return Trace(how, tuple(calls), tuple(self._ops), *self._values.as_data(), tuple(self._reads))


def _check_dtypes(schema: OpSchema, read: list[ValueRecord]) -> None:
    dtypes = dict.fromkeys(value.dtype for value in read)
    if len(dtypes) > 1:
        raise CannotSubstitute(f"{schema.name} takes one dtype, and got {' and '.join(map(str, dtypes))}")
