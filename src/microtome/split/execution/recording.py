"""Record what crosses a cut while a stage runs up to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microtome.engine import Call
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import tensors_in
from microtome.engine.torch_internals import storage_id, version_of
from microtome.errors import Unsupported
from microtome.split.analysis.arrays import array_name, to_tensor
from microtome.split.analysis.call_arguments import CallArguments
from microtome.split.analysis.signature import HASH_SEED, CallSignature
from microtome.split.analysis.structure_spec import check_structure, flatten
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.gradients import differentiable_copy, have_same_gradient
from microtome.split.boundary.schema import (
    ArgumentAlias,
    ArgumentView,
    BoundaryRecord,
    ContainerItem,
    ContainerRecord,
    DrawRecord,
    InputItem,
    InputsRecord,
    OutputAlias,
    OutputItem,
    PlaceholderSpec,
    PlainItem,
    RepeatedTensor,
    SentItem,
    SentTensor,
    SkippedCallRecord,
    StorageView,
    WrittenArgument,
)
from microtome.split.boundary.tensor_bytes import duplicate
from microtome.split.execution.argument_reader import FlatInputs
from microtome.split.execution.effects import (
    check_effects,
    find_alias,
    first_occurrences,
    is_same_view,
    overlapping_names,
)
from microtome.split.execution.placeholder import Placeholder, PlaceholderRead, unwrap
from microtome.split.execution.schedule import (
    Schedule,
    ScheduleFollower,
    SentValue,
    SkippedCall,
    differs_from_example,
)
from microtome.split.state.contents import StateParts, changed_paths, has_same_value, parts_at
from microtome.split.state.snapshot import Path, StateSnapshot, digest_of_snapshots, format_path
from microtome.split.state.stage_state import StageState


class _OpenCall(NamedTuple):
    """A call before the cut that has not returned yet.

    Attributes:
        parts: The parts that it changes of each state object among its arguments, as they are when it begins.
    """

    scheduled: SkippedCall
    arguments: CallArguments
    signature: CallSignature
    parts: list[StateParts]


class BoundaryRecorder:
    """Records the inputs, calls and random operators before a cut, and the tensors that cross it.

    Args:
        grad: Keep the tensors that cross in the graph of autograd.
    """

    def __init__(self, schedule: Schedule, state: StageState, *, grad: bool = False) -> None:
        self._schedule = schedule
        self._grad = grad
        self._state = state
        self._follower = ScheduleFollower(schedule)
        self._open: dict[Call, _OpenCall] = {}
        self._inputs: InputsRecord | None = None
        self._calls: list[SkippedCallRecord] = []
        self._state_changes: set[Path] = set()  # that the records of calls describe
        self._enclosing: list[CallSignature] = []
        self._draws: list[DrawRecord] = []
        self._tensors: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._requires_grad: dict[str, None] = {}
        self._overlapping_inputs: list[str] = []  # their copies do not overlap
        self._before = state.before or state.read()

    @property
    def is_complete(self) -> bool:
        """Whether the cut has been reached."""
        return self._follower.is_complete

    @property
    def skipped_calls(self) -> Sequence[SkippedCallRecord]:
        """The calls before the cut that have returned."""
        return self._calls

    def record_inputs(self, inputs: FlatInputs) -> None:
        """Record the model's arguments."""
        spec, tensors, plain, arrays = inputs
        if spec.unsupported is not None:
            raise Unsupported(
                f"cannot send an input of the model: expected plain data, got a {spec.unsupported}. Pass a copy"
            )
        items: list[InputItem] = []
        distinct: dict[str, Tensor] = {}
        firsts = first_occurrences(tensors)
        for index, tensor in enumerate(tensors):
            if firsts[index] != index:
                items.append(RepeatedTensor(firsts[index]))
                continue
            sent = _choose_sent(self._schedule.sent_inputs, firsts, index, "an input")
            items.append(_placeholder_spec(tensor) if sent is None else self._send(sent, tensor))
            tensor = unwrap(tensor)
            if not isinstance(tensor, Placeholder) and tensor.layout is torch.strided and not tensor.is_nested:
                distinct[str(index)] = tensor
        overlapping = [items[int(index)] for index in overlapping_names(distinct)]
        self._overlapping_inputs = [item.name for item in overlapping if isinstance(item, SentTensor)]
        self._inputs = InputsRecord(tuple(items), plain, spec.digest)
        self._tensors.update((array_name(index), to_tensor(array)) for index, array in enumerate(arrays))

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the arguments of a call before the cut."""
        scheduled = self._follower.enter(call, args, kwargs)
        if scheduled is None:
            return
        read = scheduled.reader.read(args, kwargs)
        key, described = read.describe(call.root if read.layout is None else None)
        if isinstance(scheduled, SkippedCall):
            recorded = read.record()
            signature = CallSignature(key, described.plain, described.tensors, scheduled.flow, scheduled.output_flow)
            self._open[call] = _OpenCall(scheduled, recorded, signature, _scheduled_parts(scheduled, recorded))
        else:
            self._enclosing.append(CallSignature(key, described.plain, described.tensors, scheduled.flow))

    def exit(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, is_replayed: bool
    ) -> None:
        """Record the results of a call before the cut.

        Args:
            is_replayed: Whether it was skipped in this run, too, since it lies before the stage.
        """
        opened = self._open.pop(call, None)
        if opened is None:
            return
        scheduled, arguments, signature, parts = opened
        spec, outputs, plain = flatten(output, (args, kwargs))
        if spec is not scheduled.output:
            check_structure(f"output of {scheduled.address!r}", scheduled.output, spec)
        if not is_replayed:
            check_effects(scheduled, arguments, outputs)
        tensors = arguments.tensors  # as they were passed, whatever the containers among the arguments hold now
        described = self._describe_outputs(scheduled, outputs, tensors)
        written, containers, states = [], [], []
        for at, sent in scheduled.sent_arguments.items():
            written.append(WrittenArgument(at, self._send(sent, tensors[at])))
        for index in scheduled.mutated_containers:
            containers.append(_describe_container(scheduled, arguments.containers[index], outputs, tensors))
        if parts:
            after = _scheduled_parts(scheduled, arguments)
            for paths, old, new in zip(scheduled.state_paths, parts, after, strict=True):
                changes = new.describe_changes(paths, old)
                self._state_changes.update(changes)
                states.append(tuple(changes.values()))
        self._calls.append(
            SkippedCallRecord(signature, described, plain, tuple(written), tuple(containers), tuple(states))
        )
        self._follower.exit()

    def record_draw(
        self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Record the output of an operator, if it draws random numbers between calls before the cut."""
        matched = self._follower.match_draw(where, func, args, kwargs)
        if matched is None:
            return
        sent = matched[1].sent_outputs
        outputs = [
            self._send(sent[index], tensor) if index in sent else _placeholder_spec(tensor)
            for index, tensor in enumerate(tensors_in(output))
        ]
        self._draws.append(DrawRecord(matched[1].name, tuple(outputs)))

    def boundary(self, fingerprint: str) -> Boundary:
        """The boundary at the cut, once it has been reached."""
        assert self._inputs is not None
        self._follower.check_draws()
        self._state.after = after = self._state.read()
        self._check_states(after)
        for name, version in self._versions.items():
            if version_of(self._tensors[name]) != version:
                raise Unsupported(
                    f"{name!r} was modified in place before the cut, and not on the example. Split the model on an "
                    "example where it is"
                )
        record = BoundaryRecord(
            self._inputs,
            tuple(self._calls),
            tuple(self._enclosing),
            HASH_SEED,
            tuple(self._draws),
            (*overlapping_names(self._tensors), *self._overlapping_inputs),
            tuple(self._requires_grad),
            (digest_of_snapshots(after),) if after else (),
        )
        return Boundary(self._schedule.at, fingerprint, self._tensors, record)

    def _check_states(self, states: list[StateSnapshot]) -> None:
        """Raise if a call changed a part of the state that it does not change on the example: the tail is not told."""
        described = self._state_changes | self._schedule.glue_state_paths
        for before, after in zip(self._before, states, strict=True):
            for path in changed_paths(before, after):
                if path in described or path not in after or not isinstance(value := after[path].value, Tensor):
                    continue
                if path in before and has_same_value(before[path].value, value):
                    continue  # such as the same number on another device
                raise differs_from_example(f"the state at {format_path(path)} is changed before the cut")

    def _describe_outputs(
        self, call: SkippedCall, outputs: list[Tensor], arguments: list[Tensor]
    ) -> tuple[OutputItem, ...]:
        if len(outputs) == 1 and call.has_new_outputs:
            return (_placeholder_spec(outputs[0]),)
        if len(outputs) == 1:
            return (self._describe_output(call, 0, outputs[0], arguments, [0]),)
        firsts = first_occurrences(outputs)
        return tuple(
            self._describe_output(call, index, tensor, arguments, firsts)
            if firsts[index] == index
            else RepeatedTensor(firsts[index])
            for index, tensor in enumerate(outputs)
        )

    def _describe_output(
        self, call: SkippedCall, index: int, tensor: Tensor, arguments: list[Tensor], firsts: list[int]
    ) -> OutputItem:
        sent = _choose_sent(call.sent_outputs, firsts, index, call.address)
        if index in call.argument_views:
            argument = arguments[call.argument_views[index]]
            offset = int(tensor.storage_offset() - argument.storage_offset())
            return ArgumentView(list(argument.stride()), list(tensor.shape), list(tensor.stride()), offset)
        if sent is not None:
            return self._send(sent, tensor)
        alias = find_alias(call, index, tensor, arguments)
        return _placeholder_spec(tensor) if alias is None else ArgumentAlias(alias)

    def _send(self, sent: SentValue, tensor: Tensor) -> SentItem:
        """Add a tensor to the boundary."""
        tensor = unwrap(tensor)
        if isinstance(tensor, Placeholder):
            raise PlaceholderRead(
                f"{sent.name!r} crosses this cut, and needs values of {tensor.owner}, which did not cross", tensor
            )
        requires_grad = tensor.requires_grad and torch.is_grad_enabled()
        keeps_graph = self._grad and requires_grad
        if not keeps_graph:
            tensor = tensor.detach()
        if sent.is_storage:
            if keeps_graph:
                raise _shared_storage(sent.name)
            return self._send_storage(sent.name, tensor)
        name = sent.name
        while (other := self._tensors.get(name)) is not None and (
            sent.is_copied or not is_same_view(other, tensor) or not have_same_gradient(other, tensor)
        ):
            name += "'"
        if other is None:
            if sent.is_copied:
                tensor = differentiable_copy(tensor) if keeps_graph else duplicate(tensor)
            self._tensors[name] = tensor
            self._versions[name] = version_of(tensor)
        if requires_grad:
            self._requires_grad[name] = None
        return SentTensor(name)

    def _send_storage(self, name: str, tensor: Tensor) -> StorageView:
        """Add the whole storage of a tensor to the boundary, once, so that views that share it share it again."""
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        for other_name, other in self._tensors.items():
            if storage_id(other) == storage_id(tensor) and other.dim() == 1 and is_same_view(other, whole):
                name = other_name
                break
        else:
            self._tensors[name] = whole
        return StorageView(name, list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset()))


def _shared_storage(name: str) -> Unsupported:
    return Unsupported(
        f"{name!r} shares memory with another value that crosses the cut, and is modified in place after it: no "
        "gradient can cross. Replace the in-place operator, or cut elsewhere"
    )


def _scheduled_parts(call: SkippedCall, arguments: CallArguments) -> list[StateParts]:
    """The parts of state objects that a call changes on the example, as they are now."""
    if not call.state_paths and not arguments.state_objects:
        return []
    if len(call.state_paths) != len(arguments.state_objects):
        raise differs_from_example(f"{call.address!r} has {len(arguments.state_objects)} states among its arguments")
    return list(map(parts_at, arguments.state_objects, call.state_path_groups))


def _choose_sent(sent: dict[int, SentValue], firsts: list[int], index: int, owner: str) -> SentValue | None:
    """Choose how a tensor crosses that occurs several times, perhaps not so on the example; None: it does not cross."""
    if not sent:
        return None
    chosen = [sent[other] for other, first in enumerate(firsts) if first == firsts[index] and other in sent]
    if len({(value.is_copied, value.is_storage) for value in chosen}) > 1:
        names = " and ".join(dict.fromkeys(repr(value.name) for value in chosen))
        raise Unsupported(
            f"expected {names} to be different tensors, as on the example, got one tensor ({owner}), which the model "
            "modifies in place. Split it on an example where they are one"
        )
    return chosen[0] if chosen else None


def _placeholder_spec(tensor: Tensor) -> PlaceholderSpec:
    return PlaceholderSpec.of(tensor, requires_grad=tensor.requires_grad and torch.is_grad_enabled())


def _describe_container(
    call: SkippedCall, container: Any, outputs: list[Tensor], arguments: list[Tensor]
) -> ContainerRecord:
    """The contents of a list or dict after a call: plain values, outputs or arguments of the call, placeholders."""

    def describe_item(item: Any) -> ContainerItem:
        if isinstance(item, Tensor):
            for index, tensor in enumerate(outputs):
                if tensor is item:
                    return OutputAlias(index)
            for index, tensor in enumerate(arguments):
                if tensor is item:
                    return ArgumentAlias(index)
            return _placeholder_spec(item)
        if not isinstance(item, bool | int | float | str | None):
            raise Unsupported(
                f"expected tensors and plain values in a list or dict that {call.address!r} mutates, as on the "
                f"example, got a {type(item).__name__}"
            )
        return PlainItem(item)

    is_dict = isinstance(container, dict)
    items = tuple(map(describe_item, container.values() if is_dict else container))
    return ContainerRecord(list(container) if is_dict else None, items)
