"""The schema of a boundary's facts: what the tail needs beside tensors, as typed records.

A stage stores a `BoundaryRecord` as JSON in `Boundary.facts`, and the next stage parses it with `from_facts`, which
checks all of it at once, since it may come from another machine. The sizes of tensors that it states are bounded later,
by `size_bounds`. A program in another runtime sends the shapes of the model's inputs instead, from which the next stage
derives the record: `graph/derived_facts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from microtome.errors import BadBoundary
from microtome.files.types import find_mismatch, from_plain, to_plain
from microtome.split.analysis.signature import CallSignature
from microtome.split.analysis.structure_spec import Plain
from microtome.split.boundary.tensor_bytes import are_sizes

#: Increases with every change that older versions cannot read.
SCHEMA = 1
#: The only key of facts that are to be derived: `{"input_shapes": {"x": [1, 3, 224, 224]}}`.
INPUT_SHAPES = "input_shapes"

_Record = TypeVar("_Record")


# -- tensors -----------------------------------------------------------------------------------------------------------


class SentTensor(NamedTuple):
    """A tensor of the boundary, by name."""

    name: str
    kind: Literal["sent"] = "sent"


class StorageView(NamedTuple):
    """A view of a tensor of the boundary that holds a whole storage: views that share memory share it again."""

    name: str
    shape: list[int]
    strides: list[int]
    offset: int
    kind: Literal["storage_view"] = "storage_view"


#: The dtypes of placeholders, by name: all of torch's, quantized ones too, since placeholders have no values.
PLACEHOLDER_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_PLACEHOLDER_DTYPE_NAMES = {dtype: name for name, dtype in PLACEHOLDER_DTYPES.items()}


class PlaceholderSpec(NamedTuple):
    """A tensor that does not cross; without strides it is contiguous, or quantized."""

    shape: list[int]
    dtype: str
    requires_grad: bool
    strides: list[int] | None = None
    kind: Literal["placeholder"] = "placeholder"

    @classmethod
    def of(cls, tensor: Tensor, *, requires_grad: bool) -> Self:
        # Torch has no meta tensors of a quantized dtype with strides.
        strides = None if tensor.is_contiguous() or tensor.is_quantized else list(tensor.stride())
        return cls(list(tensor.shape), _PLACEHOLDER_DTYPE_NAMES[tensor.dtype], requires_grad, strides)


class RepeatedTensor(NamedTuple):
    """The tensor at an earlier position of the same list."""

    position: int
    kind: Literal["repeat"] = "repeat"


class ArgumentAlias(NamedTuple):
    """The tensor at a position of the call's arguments."""

    position: int
    kind: Literal["argument"] = "argument"


class ArgumentView(NamedTuple):
    """A view of an argument with these strides; the offset is relative to the argument's own."""

    argument_strides: list[int]
    shape: list[int]
    strides: list[int]
    offset: int
    kind: Literal["argument_view"] = "argument_view"


class OutputAlias(NamedTuple):
    """The tensor at a position of the call's outputs."""

    position: int
    kind: Literal["output"] = "output"


class PlainItem(NamedTuple):
    """A bool, number, string or None."""

    value: Plain
    kind: Literal["value"] = "value"


SentItem = SentTensor | StorageView
TensorItem = SentTensor | StorageView | PlaceholderSpec
InputItem = SentTensor | StorageView | PlaceholderSpec | RepeatedTensor
OutputItem = SentTensor | StorageView | PlaceholderSpec | RepeatedTensor | ArgumentAlias | ArgumentView
ContainerItem = PlainItem | OutputAlias | ArgumentAlias | PlaceholderSpec


# -- state objects -----------------------------------------------------------------------------------------------------


class StateValues(NamedTuple):
    """A tensor of a few integers, by value."""

    shape: list[int]
    dtype: str
    values: list[int | bool]
    kind: Literal["values"] = "values"


class StateDtype(NamedTuple):
    """A dtype of torch."""

    name: str
    kind: Literal["dtype"] = "dtype"


class StateDevice(NamedTuple):
    """The device of the stage."""

    kind: Literal["device"] = "device"


class StateClass(NamedTuple):
    """A class, by name."""

    name: str
    kind: Literal["class"] = "class"


class StateNode(NamedTuple):
    """A new list, dict, or object of a class, without its parts."""

    name: str
    kind: Literal["node"] = "node"


class StateRemoved(NamedTuple):
    """A part that is gone."""

    kind: Literal["removed"] = "removed"


StateItem = PlaceholderSpec | PlainItem | StateValues | StateDtype | StateDevice | StateClass | StateNode | StateRemoved
#: The name of an attribute, the index of a list, or the key of a dict in a list.
StateStep = str | int | list[Plain]


class StateChange(NamedTuple):
    """A part of a state object that changed, and what it is now."""

    path: list[StateStep]
    item: StateItem


class _StateChanges(NamedTuple):
    changes: tuple[StateChange, ...]


def parse_changes(data: Any) -> tuple[StateChange, ...]:
    """Parse and check changes of a state object, in the JSON of `to_plain(changes, compact=True)`.

    Raises:
        BadBoundary: If something is missing or invalid, with its path and value.
    """
    changes = parse_record({"changes": data}, _StateChanges).changes
    return tuple(map(check_change, changes))


def parse_record(data: Any, cls: type[_Record]) -> _Record:
    """Parse and check a record that holds changes of state objects.

    Raises:
        BadBoundary: If something is missing or invalid, with its path and value.
    """
    try:
        record: _Record = from_plain(data, cls)
    except (ValueError, TypeError) as error:
        raise BadBoundary(f"invalid changes of a state: {error}") from error
    if (mismatch := find_mismatch(record, cls, finite=False)) is not None:
        raise BadBoundary(f"invalid changes of a state: changes{mismatch}")
    return record


def check_change(change: StateChange) -> StateChange:
    """Raise if a change of a state has the right types and impossible values."""
    if not _is_possible_change(change):
        raise BadBoundary(f"no part of a state is {change!r:.200}")
    return change


# -- records -----------------------------------------------------------------------------------------------------------


class InputsRecord(NamedTuple):
    """The arguments of the model: tensors, plain values, and a digest of their structure."""

    tensors: tuple[InputItem, ...]
    plain: list[Plain]
    structure: str


class WrittenArgument(NamedTuple):
    """A tensor after a call wrote to it, and its position among the arguments."""

    position: int
    tensor: SentItem


class ContainerRecord(NamedTuple):
    """The items of a list, or of a dict with these keys, after a call mutated it."""

    keys: list[Plain] | None
    items: tuple[ContainerItem, ...]


class SkippedCallRecord(NamedTuple):
    """The results of a call before the cut.

    Attributes:
        outputs: The tensors in its output.
        plain: The plain values in its output.
        written: The arguments that it wrote to and that cross.
        containers: The lists and dicts among its arguments that it mutated.
        states: The changes of each state object among its arguments.
    """

    signature: CallSignature
    outputs: tuple[OutputItem, ...]
    plain: list[Plain]
    written: tuple[WrittenArgument, ...] = ()
    containers: tuple[ContainerRecord, ...] = ()
    states: tuple[tuple[StateChange, ...], ...] = ()


class DrawRecord(NamedTuple):
    """The outputs of a random operator before the cut."""

    operator: str
    outputs: tuple[TensorItem, ...]


class BoundaryRecord(NamedTuple):
    """The facts of a boundary.

    Attributes:
        calls: The calls before the cut, in the order of the head.
        enclosing: The signatures of the calls that enclose the cut, from the outermost inwards.
        hash_seed: Equal in two processes if they iterate over sets of strings in the same order.
        draws: The random operators between the calls, in order.
        overlapping: The names of tensors that may share memory with another: a write to one may change the other.
        requires_grad: The names of tensors that required a gradient in the head.
        states: A digest of the state objects among the inputs, at the cut; empty: there are none.
    """

    inputs: InputsRecord
    calls: tuple[SkippedCallRecord, ...]
    enclosing: tuple[CallSignature, ...]
    hash_seed: str
    draws: tuple[DrawRecord, ...] = ()
    overlapping: tuple[str, ...] = ()
    requires_grad: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    schema: int = SCHEMA

    def to_facts(self) -> dict[str, Any]:
        """Convert the record to JSON for `Boundary.facts`."""
        facts: dict[str, Any] = to_plain(self, compact=True)
        return facts

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """Parse and check `Boundary.facts`; other keys are ignored.

        Raises:
            BadBoundary: If something is missing or invalid, with its path and value.
        """
        if facts.get("schema") != SCHEMA:
            raise BadBoundary(
                f"expected boundary facts of schema {SCHEMA}, got {facts.get('schema')!r:.80}: send the boundary of a "
                "stage, and install the same version of microtome on both sides"
            )
        try:
            record: Self = from_plain(facts, cls)
        except ValueError as error:  # a field is missing
            raise BadBoundary(f"invalid boundary facts: {error}") from error
        mismatch = find_mismatch(record, cls, finite=False)
        if mismatch is None:
            mismatch = next(_invalid_items(record), None)
        if mismatch is not None:
            raise BadBoundary(f"invalid boundary facts: facts{mismatch}")
        return record

    def sent_names(self) -> Iterator[str]:
        """The name of a tensor for each time that the tail takes it from the boundary."""
        for _, _, items in _item_lists(self):
            yield from (item.name for item in items if isinstance(item, SentTensor | StorageView))


def _item_lists(
    record: BoundaryRecord,
) -> Iterator[tuple[str, tuple[int, ...], Sequence[OutputItem | ContainerItem]]]:
    """All lists of items, with their paths: a format, and the numbers in it."""
    yield ".inputs.tensors", (), record.inputs.tensors
    for number, call in enumerate(record.calls):
        yield ".calls[%d].outputs", (number,), call.outputs
        if call.written:
            yield ".calls[%d].written", (number,), [written.tensor for written in call.written]
        for index, container in enumerate(call.containers):
            yield ".calls[%d].containers[%d].items", (number, index), container.items
    for number, draw in enumerate(record.draws):
        yield ".draws[%d].outputs", (number,), draw.outputs


def _invalid_items(record: BoundaryRecord) -> Iterator[str]:
    """Describe what has the right types and impossible values."""
    for path, numbers, items in _item_lists(record):
        for position, item in enumerate(items):
            if not _is_possible(item, position):
                yield f"{path % numbers}[{position}]: no tensor is {item!r:.200}"
    for number, call in enumerate(record.calls):
        for index, (keys, items) in enumerate(call.containers):
            if keys is not None and len(keys) != len(items):
                yield f".calls[{number}].containers[{index}]: expected {len(items)} keys, got {len(keys)}"
        for index, changes in enumerate(call.states):
            for position, change in enumerate(changes):
                if not _is_possible_change(change):
                    yield f".calls[{number}].states[{index}][{position}]: no part of a state is {change!r:.200}"


def _is_possible(item: OutputItem | ContainerItem, position: int) -> bool:
    if isinstance(item, SentTensor | PlainItem):
        return True
    if isinstance(item, PlaceholderSpec):
        return item.dtype in PLACEHOLDER_DTYPES and _is_layout(item.shape, item.strides)
    if isinstance(item, StorageView | ArgumentView):
        return abs(item.offset) < 2**62 and _is_layout(item.shape, item.strides)  # torch checks the rest
    return 0 <= item.position < (position if isinstance(item, RepeatedTensor) else 2**31)


def _is_possible_change(change: StateChange) -> bool:
    item = change.item
    if not change.path and not isinstance(item, StateNode):  # the object itself, when it is described as a whole
        return False
    if any(isinstance(step, list) and len(step) != 1 for step in change.path):
        return False
    if isinstance(item, StateValues):
        return item.dtype in PLACEHOLDER_DTYPES and are_sizes(item.shape) and math.prod(item.shape) == len(item.values)
    if isinstance(item, StateDtype):
        return item.name in PLACEHOLDER_DTYPES
    return not isinstance(item, PlaceholderSpec) or _is_possible(item, 0)


def _is_layout(shape: list[int], strides: list[int] | None) -> bool:
    return are_sizes(shape) and (strides is None or (are_sizes(strides) and len(strides) == len(shape)))
