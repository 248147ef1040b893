"""Replay the calls before a cut from a boundary: skip them, and restore their outputs and side effects."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from microtome.engine import Call
from microtome.engine.module_state import has_forward_hooks, run_forward_hooks
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import map_tensors, reachable_tensors
from microtome.errors import BadBoundary, Unsupported
from microtome.inputs import Inputs
from microtome.split.analysis.arrays import array_name, to_array
from microtome.split.analysis.call_arguments import containers_in
from microtome.split.analysis.signature import HASH_SEED, Arguments, check_same_call, find_call
from microtome.split.analysis.structure_spec import StructureSpec
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import (
    ArgumentAlias,
    ArgumentView,
    BoundaryRecord,
    ContainerItem,
    ContainerRecord,
    OutputAlias,
    OutputItem,
    PlaceholderSpec,
    PlainItem,
    RepeatedTensor,
    SkippedCallRecord,
)
from microtome.split.cuts.crossing import ValueLocation
from microtome.split.execution.placeholder import Placeholder, PlaceholderRead, unwrap
from microtome.split.execution.received_tensors import ReceivedTensors
from microtome.split.execution.schedule import Schedule, ScheduleFollower, SkippedCall
from microtome.split.state.contents import apply_changes
from microtome.split.state.placeholder import StatePlaceholder
from microtome.split.state.snapshot import Path, digest_of_snapshots
from microtome.split.state.stage_state import StageState
from microtome.trace.op_schema import op_schema


class Replayer:
    """Skips the calls and random operators before a cut in a run of the tail.

    Args:
        device: The device of the tail's weights, which tensors are moved to; None: unknown.
        state: The stage's own state.
        release: Drop each tensor from the boundary after its last use.
        grad: Let gradients flow to the tensors of the boundary.
    """

    def __init__(
        self,
        schedule: Schedule,
        boundary: Boundary,
        device: torch.device | None,
        state: StageState,
        *,
        release: bool,
        grad: bool = False,
    ) -> None:
        self._schedule = schedule
        self._grad = grad
        self._device = device
        self._state = state
        self._follower = ScheduleFollower(schedule)
        self._record = record = boundary.record or BoundaryRecord.from_facts(boundary.facts)
        _check_fit(schedule, record)
        if bool(record.states) is not bool(state.objects):
            raise _other_state()
        self._signatures = [call.signature for call in record.calls]
        self._by_key: dict[str, list[int]] = {}
        for index, signature in enumerate(self._signatures):
            self._by_key.setdefault(signature.key, []).append(index)
        self._enclosing = iter(record.enclosing)
        self._is_ordered = record.hash_seed == HASH_SEED
        self._matched: set[int] = set()
        self._tensors = ReceivedTensors(schedule, boundary, record, device, release=release, grad=grad)
        self._skipped: tuple[Call, SkippedCall] | None = None

    def make_inputs(self, spec: StructureSpec) -> Inputs:
        """The model's arguments: those that were sent, and placeholders for the others."""
        inputs = self._record.inputs
        if len(inputs.tensors) != spec.num_tensors or len(inputs.plain) != spec.num_plain:
            raise BadBoundary(
                f"expected inputs of {spec.num_tensors} tensors and {spec.num_plain} other values, as on the example, "
                f"got {len(inputs.tensors)} and {len(inputs.plain)}: split both sides on examples of one structure"
            )
        if inputs.structure != spec.digest:
            raise BadBoundary(
                f"expected inputs of the structure {spec.text}, as on the example, got another structure: split both "
                "sides on examples of one structure, with the same order of names"
            )
        tensors: list[Tensor] = []
        for item, rank in zip(inputs.tensors, self._schedule.input_ranks, strict=True):
            if isinstance(item, RepeatedTensor):
                tensors.append(tensors[item.position])
            else:
                tensors.append(self._tensors.restore(item, "an input", ValueLocation(None, rank)))
        arrays = [to_array(self._tensors.array(array_name(index))) for index in range(spec.num_arrays)]
        args, kwargs = spec.unflatten(tensors, inputs.plain, arrays=arrays, states=self._state.objects)
        return Inputs(*args, **kwargs)

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide whether a call is skipped, and check a call that encloses the cut."""
        self._skipped = None
        scheduled = self._follower.enter(call, args, kwargs)
        if isinstance(scheduled, SkippedCall):
            self._skipped = call, scheduled
        elif scheduled is not None:
            read = scheduled.reader.read(args, kwargs)
            key, arguments = read.describe(call.root if read.layout is None else None)
            check_same_call(next(self._enclosing, None), scheduled, key, arguments, is_ordered=self._is_ordered)

    def is_skipped(self, call: Call) -> bool:
        return self._skipped is not None and self._skipped[0] is call

    def output(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the side effects of a skipped call, and return its output."""
        assert self._skipped is not None
        scheduled = self._skipped[1]
        read = scheduled.reader.read(args, kwargs)
        record = self._find_record(scheduled, *read.describe(call.root if read.layout is None else None))
        arguments = read.tensors() if scheduled.uses_arguments else []
        for index, written in record.written:
            location = ValueLocation(scheduled.call, scheduled.argument_ranks[index], is_argument=True)
            self._write(arguments[index], self._tensors.restore(written, scheduled.address, location))
        outputs: list[Tensor] = []
        for item in record.outputs:
            outputs.append(self._restore_output(scheduled, item, outputs, arguments))
        if scheduled.mutated_containers:
            containers = containers_in((args, tuple(kwargs.values())))
            for index, contents in zip(scheduled.mutated_containers, record.containers, strict=True):
                self._refill(scheduled, containers[index], contents, outputs, arguments)
        if record.states:
            for state, changes in zip(read.state_objects(), record.states, strict=True):
                apply_changes(state, changes, self._device, partial(self._make_placeholder, scheduled.address))
        for index in scheduled.shared_arguments:
            self._tensors.expect_unmodified(scheduled.address, arguments[index])
        self._follower.exit()
        if self._follower.is_complete:
            self._check_states()
        output = scheduled.output.unflatten(outputs, record.plain, (args, kwargs))
        module = call.module
        if module is not None and has_forward_hooks(module):
            # What they return is part of the output that was sent; what they could not read was there in the head.
            run_forward_hooks(module, args, kwargs, output, ignore=PlaceholderRead)
        return output

    def _make_placeholder(self, owner: str, spec: PlaceholderSpec, path: Path) -> Tensor:
        if self._tensors.is_limited:
            self._tensors.charge(owner, spec)
        return StatePlaceholder.make(spec, path, self._device, owner)

    def _check_states(self) -> None:
        """Raise if the stage's own state differs from that of the stage before, apart from the values of tensors."""
        if self._record.states and self._record.states[0] != digest_of_snapshots(self._state.read()):
            raise _other_state()

    def draw(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the random numbers of the head; NotImplemented: the operator draws none, or follows the cut."""
        matched = self._follower.match_draw(where, func, args, kwargs)
        if matched is None:
            return NotImplemented
        number, scheduled = matched
        outputs = [
            self._tensors.restore(item, str(scheduled), ValueLocation(None, index, draw=scheduled.op))
            for index, item in enumerate(self._record.draws[number].outputs)
        ]
        if targets := op_schema(func).written(args, kwargs):
            for target, tensor in zip(targets, outputs, strict=True):
                self._write(target, tensor)
            outputs = targets
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def check_unmodified(self) -> None:
        """Raise if the run wrote to a tensor that the example does not write to."""
        self._tensors.check_unmodified()

    def check_output(self, output: Any) -> Any:
        """The model's output, in which no placeholder may be left."""
        self._follower.check_draws()
        self.check_unmodified()
        if not self._follower.is_complete:
            raise Unsupported(f"the model returned before the cut at {self._schedule.at!r}")
        returned = reachable_tensors(output, ignore=self._state.objects)
        placeholders = [tensor for tensor in returned if isinstance(tensor, Placeholder)]
        for one in placeholders:
            if one.materialized is None:
                raise PlaceholderRead(f"the model returns a value of {one.owner!r}, which did not cross the cut", one)
        return map_tensors(unwrap, output) if placeholders else output

    def _find_record(self, scheduled: SkippedCall, key: str, arguments: Arguments) -> SkippedCallRecord:
        """The record of a skipped call in the boundary."""
        candidates = self._by_key.get(key, ())
        index = find_call(
            self._signatures, candidates, self._matched, scheduled, arguments, is_ordered=self._is_ordered
        )
        if index != len(self._matched) and self._schedule.draws:
            raise Unsupported(
                f"{scheduled.address!r} runs in another order than in the head, and the model draws random numbers "
                "between calls before the cut: set PYTHONHASHSEED to the same value in both processes"
            )
        self._matched.add(index)
        record = self._record.calls[index]
        if len(record.states) != len(scheduled.state_paths):
            raise BadBoundary(
                f"expected changes of {len(scheduled.state_paths)} states by {scheduled.address!r}, got "
                f"{len(record.states)}: split both sides on the same example"
            )
        expected = scheduled.output.num_tensors, scheduled.output.num_plain, len(scheduled.mutated_containers)
        got = len(record.outputs), len(record.plain), len(record.containers)
        has_other_writes = record.written and not {at for at, _ in record.written} <= scheduled.sent_arguments.keys()
        if got != expected or has_other_writes:
            raise BadBoundary(
                f"expected {expected[0]} tensors, {expected[1]} other values and {expected[2]} lists and dicts of "
                f"{scheduled.address!r}, got {got[0]}, {got[1]} and {got[2]}: split both sides on the same example"
            )
        return record

    def _restore_output(
        self, call: SkippedCall, item: OutputItem, outputs: list[Tensor], arguments: list[Tensor]
    ) -> Tensor:
        """The next output of a skipped call, after those that are restored."""
        index = len(outputs)
        if isinstance(item, PlaceholderSpec) and not call.argument_views:  # by far the most frequent
            return self._tensors.restore(item, call.address, call.output_locations[index])
        if isinstance(item, RepeatedTensor):
            return outputs[item.position]
        if isinstance(item, ArgumentView) is not (index in call.argument_views):
            kind = "a view of an argument" if index in call.argument_views else "no view of an argument"
            raise BadBoundary(f"expected {kind} as output {index} of {call.address!r}, got {item!r:.80}")
        if isinstance(item, ArgumentView):
            return self._tensors.restore_view(item, arguments[call.argument_views[index]], call.address)
        if isinstance(item, ArgumentAlias):
            return _item_at(arguments, item, call)
        tensor = self._tensors.restore(item, call.address, call.output_locations[index])
        argument = call.aliased_arguments[index]
        if argument is None or isinstance(item, PlaceholderSpec):  # which is no argument, other than on the example
            return tensor
        return self._write(arguments[argument], tensor)

    def _write(self, target: Tensor, tensor: Tensor) -> Tensor:
        """Give a tensor the values that a skipped call wrote to it; a placeholder is materialized."""
        target = unwrap(target)
        if isinstance(target, Placeholder):
            target.materialized = tensor
            return tensor
        if target is not tensor:
            with torch.set_grad_enabled(self._grad and torch.is_grad_enabled()):
                target.copy_(tensor)
        return target

    def _refill(
        self, call: SkippedCall, container: Any, record: ContainerRecord, outputs: list[Tensor], arguments: list[Tensor]
    ) -> None:
        """Mutate a list or dict as a skipped call did."""

        def restore(item: ContainerItem) -> Any:
            if isinstance(item, PlainItem):
                return item.value
            if isinstance(item, PlaceholderSpec):
                return self._tensors.restore(item, call.address, None)
            return _item_at(outputs if isinstance(item, OutputAlias) else arguments, item, call)

        if isinstance(container, list) is not (record.keys is None):
            expected = type(container).__name__
            raise BadBoundary(f"expected the items of a {expected} that {call.address!r} mutates, got {record!r:.80}")
        items = [restore(item) for item in record.items]
        if record.keys is None:
            container[:] = items
        else:
            container.clear()
            container.update(zip(record.keys, items, strict=True))


def _other_state() -> BadBoundary:
    return BadBoundary(
        "expected the state that the head has at the cut, got another one: run every step of a sequence in one session "
        "of the stages (stages.session())"
    )


def _check_fit(schedule: Schedule, record: BoundaryRecord) -> None:
    """Raise if a boundary is of another schedule."""
    if len(record.calls) != (expected := schedule.num_skipped):
        raise BadBoundary(
            f"expected {expected} calls before the cut at {schedule.at!r}, got {len(record.calls)}: split both sides "
            "on the same example, with the same PYTHONHASHSEED"
        )
    draws = [(draw.name, draw.num_outputs) for draw in schedule.draws]
    if [(draw.operator, len(draw.outputs)) for draw in record.draws] != draws:
        names = ", ".join(draw.name for draw in schedule.draws) or "nothing"
        got = ", ".join(draw.operator for draw in record.draws) or "nothing"
        raise BadBoundary(
            f"expected the outputs of {names} before the cut at {schedule.at!r}, got those of {got}: split both sides "
            "on the same example"
        )


def _item_at(tensors: list[Tensor], item: ArgumentAlias | OutputAlias, call: SkippedCall) -> Tensor:
    if item.position >= len(tensors):
        raise BadBoundary(
            f"expected one of {len(tensors)} {item.kind}s of {call.address!r}, got position {item.position}"
        )
    return tensors[item.position]
