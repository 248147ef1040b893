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
from microtome.engine.argument_names import named_arguments
from microtome.engine.arguments import CannotSubstitute
from microtome.engine.composite_ops import CompositeOp, is_meta_or_fake
from microtome.engine.module_index import untraced_root_error
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import is_state, reachable_tensors
from microtome.engine.snapshot import WriteBackups
from microtome.engine.torch_internals import DisableTorchFunction, is_autocast_enabled, own_children
from microtome.errors import MicrotomeError, Unsupported
from microtome.flops.composite import composite_costs
from microtome.flops.registry import NOTHING, OpCost, cost_of
from microtome.inputs import Inputs
from microtome.results.trace import How, Op, Read, TensorMode, Trace, TracedCall
from microtome.trace.costs import TraceCosts
from microtome.trace.op_schema import OpSchema, op_schema, tensors
from microtome.trace.storages import Storages, ValueRecord


@dataclass
class _CallRecord:
    call: Call
    type: str
    index: int
    parent: int | None
    inputs: tuple[int, ...]
    begins: int
    ends: int = 0
    outputs: tuple[int, ...] = ()
    has_returned: bool = False
    children: list[int] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)


@dataclass
class _CompositeRecord:
    """The index of a composite operator in the trace, and the cost of its backward."""

    op: int
    backward: OpCost | None


@dataclass
class _BackwardGroup:
    """Consecutive operators in the backward of one composite operator, which are recorded as one operator."""

    where: Where
    read: list[ValueRecord]
    outputs: list[weakref.ref[Tensor]]


class TraceRecorder(Probe):
    """Records one run. It keeps no tensor alive, since that would change the lifetimes it records.

    Attributes:
        costs: The costs from which any convention prices the run.
        backups: Notified before a tensor is mutated.
    """

    def __init__(self, tensor_mode: TensorMode, device: str | None, *, digest_constants: bool = False) -> None:
        self.costs = TraceCosts()
        self.backups = WriteBackups()
        self._model: type[nn.Module] = nn.Module
        self._tensor_mode: TensorMode = tensor_mode
        self._device = device
        self._calls: dict[Call, _CallRecord] = {}
        self._ops: list[Op] = []
        self._reads: list[Read] = []
        self._values = Storages(device if tensor_mode == "meta" else None, digest_constants=digest_constants)
        self._composites: dict[CompositeOp, _CompositeRecord] = {}
        #: Of each path whose calls were recomputed in a backward: the composite operators that ran again, by name.
        self._recomputed: dict[str, list[tuple[str, int]]] = {}
        self._group: _BackwardGroup | None = None
        # What the running operator reads and mutates, recorded before it runs if it mutates anything.
        self._operands: tuple[list[ValueRecord], list[ValueRecord]] = [], []
        self._running_op: AnyOp | None = None
        self._is_paused = False
        self._has_failed = False

    def value_of(self, tensor: Tensor) -> int | None:
        """The index of a tensor's value; None if it has not been recorded."""
        value = self._values.find(tensor)
        return None if value is None else value.index

    def fork(self) -> TraceRecorder:
        """A recorder of another run on the same substitute tensors."""
        other = TraceRecorder(self._tensor_mode, self._device)
        other.backups = self.backups
        return other

    def register_tensors(self, model: nn.Module, inputs: Inputs) -> None:
        """Record the tensors that exist before the run."""
        self._model = type(model)
        for name, parameter in model.named_parameters():
            self._values.record(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            self._values.record(buffer, "buffer", name)
        children = own_children(model)
        for argument, value in named_arguments(model, inputs).items():
            name = f"kwargs[{argument!r}]" if argument in children else argument  # outputs of modules have their names
            for index, tensor in enumerate(found := list(tensors_in(value))):
                self._values.record(tensor, "input", name if len(found) == 1 else f"{name}[{index}]")
            if is_state(value):  # a leaf, whose tensors calls write to
                for tensor in reachable_tensors(value):
                    self._values.record(tensor, "constant", name)

    # -- events of the session -----------------------------------------------------------------------------------------

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._tensor_mode == "meta" and is_autocast_enabled():
            raise CannotSubstitute("autocast chooses dtypes by the device")
        if call.parent is None and call.phase == "forward":
            self._check_root(call)
        parent = None if call.parent is None else self._calls[call.parent]
        with DisableTorchFunction():
            inputs = self._values.indices_in((args, kwargs))
        record = _CallRecord(call, type(call.module).__name__, len(self._calls), None, inputs, len(self._ops))
        self._calls[call] = record
        if parent is not None:
            record.parent = parent.index
            parent.children.append(record.index)

    def _check_root(self, call: Call) -> None:
        """Raise if an outermost call is not the only run of the model."""
        if call.path and not self._calls:
            raise untraced_root_error(self._model)
        if self._calls and not call.path:
            raise Unsupported(
                f"expected one run of the model, got a second: {self._model.__name__}.__call__ runs it again. Run it "
                "once there, or pass a module that contains the model and calls it, such as nn.Sequential(model)"
            )
        if self._calls:
            raise Unsupported(
                f"{call.address!r} runs in another thread than the model: its operators cannot be observed"
            )

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        record = self._calls[call]
        with DisableTorchFunction():
            record.outputs = self._values.indices_in(output)
            record.ends = len(self._ops)
            record.has_returned = True
            if call.module is not None:
                self.costs.add_call(record.index, call.module, (*args, *kwargs.values()), output)

    def fail(self, call: Call, error: BaseException) -> None:
        if self._has_failed or isinstance(error, MicrotomeError):  # a call around the one that failed
            return
        self._has_failed = True
        records = self._calls.values()
        returned = [record.call.address for record in records if record.has_returned and not record.children]
        shown = ", ".join(returned if len(returned) <= 12 else ["…", *returned[-12:]])
        error.add_note(f"layers that ran before: {shown}" if returned else "no layer ran before")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no operators in the block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def unfinished_op(self) -> tuple[int, str] | None:
        """The index and name of the operator that began and did not end."""
        return None if self._running_op is None else (len(self._ops), op_schema(self._running_op).name)

    def has_op(self, index: int, name: str) -> bool:
        """Whether the operator with this index has this name."""
        return index < len(self._ops) and self._ops[index].name == name

    def op_begins(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running_op = func
        if where.autocast and self._tensor_mode == "meta":
            raise CannotSubstitute("autocast chooses dtypes by the device")
        if (where.part_of is not None or self._group is not None) and self._add_to_group(where, args, kwargs):
            return
        schema = op_schema(func)
        if not schema.may_write:  # its operands are the same afterwards
            return
        with DisableTorchFunction():
            written = schema.written(args, kwargs)
            for tensor in written:
                if self._tensor_mode == "real":
                    self.backups.before_write(tensor)
                    if self._values.is_external(tensor):
                        self.backups.before_write_outside(tensor)
                elif not is_meta_or_fake(tensor):
                    raise CannotSubstitute(f"{schema.name} would mutate a tensor that the model keeps")
            self._operands = self._values.operands(args, kwargs), [self._values.record(tensor) for tensor in written]

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._running_op = None
        if self._is_paused:
            return
        if where.phase == "forward":  # our function mode is disabled already, and disabling it again is slow
            self._record(where, func, args, kwargs, output)
        else:
            with DisableTorchFunction():
                self._record(where, func, args, kwargs, output)

    def read(self, where: Where, tensor: Tensor) -> None:
        with DisableTorchFunction():
            call = None if where.call is None else self._calls[where.call].index
            self._reads.append(Read(len(self._ops), call, self._values.record(tensor).index))

    # -- operators -----------------------------------------------------------------------------------------------------

    def _record(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """All the cost per operator is here and in what it calls, so these are few and flat."""
        if self._group is not None:
            self._group.outputs.extend(map(weakref.ref, tensors(output)))
            return
        schema = op_schema(func)
        read, written = self._operands if schema.may_write else (self._values.operands(args, kwargs), [])
        if schema.is_product and self._tensor_mode != "real":
            _check_dtypes(schema, read)
        index = len(self._ops)
        if where.phase == "recompute" and where.call is not None:
            again = self._recomputed.setdefault(where.call.path, [])
            if where.composite is not None:
                again.append((schema.name, index))
        if output.__class__ is Tensor:
            outputs = [self._values.record(output, "op", None, index)]
        else:
            outputs = list(dict.fromkeys([self._values.record(item, "op", None, index) for item in tensors(output)]))
        if where.composite is not None:
            cost, backward = composite_costs(func, args, kwargs, output)
            self._composites[where.composite] = _CompositeRecord(index, backward)
        else:
            cost = cost_of(func, args, kwargs, output)
            if cost is not None and where.phase == "forward":
                self.costs.count(index, where.function, func, args, output, cost)
        self._append(where, schema.name, read, written, outputs, cost, schema)

    def _append(
        self,
        where: Where,
        name: str,
        read: list[ValueRecord],
        written: list[ValueRecord],
        outputs: list[ValueRecord],
        cost: OpCost | None,
        schema: OpSchema | None = None,
    ) -> None:
        is_view = schema is not None and schema.is_view
        index = len(self._ops)
        storages = []
        read_bytes = write_bytes = 0
        for value in read:
            value.consumers.append(index)
            storage = value.storage
            storages.append(storage)
            # An expanded tensor has fewer bytes in memory than elements.
            read_bytes += value.nbytes if value.nbytes < storage.nbytes else storage.nbytes
        moves_data = not is_view and (bool(written) or not outputs)
        for value in outputs:
            storage = value.storage
            if storage not in storages:
                moves_data = not is_view
            if value not in read:
                write_bytes += value.nbytes if value.nbytes < storage.nbytes else storage.nbytes
        if schema is not None and schema.is_gather and read:
            read_bytes -= max(min(read[0].nbytes, read[0].storage.nbytes) - write_bytes, 0)
        elif schema is not None and schema.is_grouped_product:
            read_bytes -= _unread_bytes(read)
        for value in written:
            value.mutated_by.append(index)
            write_bytes += min(value.nbytes, value.storage.nbytes)
        call = None
        if where.call is not None:
            record = self._calls[where.call]
            record.ops.append(index)
            call = record.index
        if not moves_data:
            read_bytes = write_bytes = 0
        operands = _indices(read), _indices(outputs), _indices(written)
        counts = (None, None, None) if cost is None else (cost.macs, cost.flops, cost.madds)
        self._ops.append(Op(index, name, call, where.phase, *operands, read_bytes, write_bytes, *counts))
        self.costs.ops.append(cost)
        self._values.clock = index + 1

    # -- backward of composite operators -------------------------------------------------------------------------------

    def _add_to_group(self, where: Where, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Add the operator that begins to a group if it is in the backward of a composite operator."""
        with DisableTorchFunction():
            if self._group is not None and self._group.where.part_of is not where.part_of:
                self._append_group()
            if where.part_of is None or where.part_of not in self._composites:
                return False
            if self._group is None:
                self._group = _BackwardGroup(where, [], [])
            operands = map(self._values.find, tensors_in((args, kwargs)))
            self._group.read += [value for value in operands if value is not None]
        return True

    def _append_group(self) -> None:
        """Record a group as one operator, which reads inputs and outputs of the forward and returns what is alive."""
        assert self._group is not None
        group, self._group = self._group, None
        assert group.where.part_of is not None
        composite = self._composites[group.where.part_of]
        forward = self._ops[composite.op]
        index = len(self._ops)
        alive = [tensor for ref in group.outputs if (tensor := ref()) is not None]
        own = self._saved_by(forward, group.where)
        made = dict.fromkeys(self._values.record(tensor, "op", None, index) for tensor in alive)
        cost = composite.backward
        composite.backward = NOTHING  # a backward in two parts is counted once
        read = list(dict.fromkeys([*own, *group.read]))
        outputs = [value for value in made if value not in own]
        self._append(group.where, f"{forward.name}_backward", read, [], outputs, cost)
        for value in own:  # which tensors the kernels save depends on the device: inputs and outputs count as saved
            if value.storage.ends is not None:
                value.storage.ends = max(value.storage.ends, index + 1)

    def _saved_by(self, forward: Op, where: Where) -> list[ValueRecord]:
        """Return what a composite operator saves for its backward: the inputs and outputs of its last run."""
        again = None if where.call is None else self._recomputed.get(where.call.path)
        if again is None:
            saved: Op | None = forward
        else:  # backwards run in the opposite order; a recomputation may stop before the end of its last operator
            at = next((at for at in reversed(range(len(again))) if again[at][0] == forward.name), None)
            saved = None if at is None else self._ops[again.pop(at)[1]]
        return [] if saved is None else [self._values[value] for value in (*saved.inputs, *saved.outputs)]

    # -- result --------------------------------------------------------------------------------------------------------

    def trace(self, how: How) -> Trace:
        """The trace of the run."""
        if not self._calls:
            raise untraced_root_error(self._model)
        if self._group is not None:
            self._append_group()
        records = self._calls.values()
        addresses = number_calls(record.call.address for record in records)
        calls = [
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
            for record, address in zip(records, addresses, strict=True)
        ]
        return Trace(how, tuple(calls), tuple(self._ops), *self._values.to_data(), tuple(self._reads))


def _unread_bytes(read: list[ValueRecord]) -> int:
    """The bytes of matrices that a grouped product does not read: there are at most as many groups as rows.

    Which rows are in which group are values, so of several rows it may read even less.
    """
    if len(read) < 2 or len(read[0].shape) != 2 or len(read[1].shape) != 3:
        return 0
    rows, matrices = read[0].shape[0], read[1].shape[0]
    return read[1].nbytes // matrices * (matrices - rows) if rows < matrices else 0


def _indices(values: list[ValueRecord]) -> tuple[int, ...]:
    return tuple([value.index for value in values])


def _check_dtypes(schema: OpSchema, read: list[ValueRecord]) -> None:
    """Raise if the operands of a product differ in dtype, which meta kernels do not check."""
    dtypes = dict.fromkeys(value.dtype for value in read)
    if len(dtypes) > 1:
        raise CannotSubstitute(f"{schema.name} expects one dtype, got {' and '.join(map(str, dtypes))}")
