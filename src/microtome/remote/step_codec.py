"""The steps of a session on the wire: descriptions, states and edits as JSON, compressed relative to the last step.

JSON of the field `state` of a `Step`:

- first step: `[{"state": CLASS, "parts": [StateChange, …]}, …]`, one for each state object;
- other steps: `[[StateEditRecord, …], …]`, the edits of each since the last step.

Of a `Reply`: `[[StateChange, …], …]`, the changes of each object by the stages of the server.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine.pytree import is_plain_class
from microtome.engine.torch_internals import schema_of
from microtome.errors import BadBoundary, Unsupported, describe_error
from microtome.files.types import find_mismatch, from_plain, to_plain
from microtome.split.boundary.schema import (
    PLACEHOLDER_DTYPES,
    PlainItem,
    StateChange,
    StateValues,
    check_change,
    parse_changes,
    parse_record,
)
from microtome.split.boundary.serialization import header_length
from microtome.split.description import SplitDescription, class_name, find_model_class
from microtome.split.state.contents import describe_state, has_tensors
from microtome.split.state.edits import StateEdit
from microtome.split.state.placeholder import StateOp
from microtome.split.state.snapshot import StateSnapshot, format_path
from microtome.split.state.stage_state import Changes, Edits

#: The most bytes of a decompressed field.
_MAX_FIELD_BYTES = 4 << 20
#: The most bytes of a dictionary that zlib uses.
_WINDOW_BYTES = 32 << 10
#: The most elements of a tensor that an operator of an edit takes, such as the indices of beams.
_MAX_INDICES = 1 << 16
#: The operators of edits that a server runs: they select, repeat or clear parts of a tensor.
_OPERATORS = frozenset(
    {
        "aten::alias",
        "aten::clone",
        "aten::detach",
        "aten::expand",
        "aten::index",
        "aten::index_select",
        "aten::narrow",
        "aten::repeat",
        "aten::select",
        "aten::slice",
        "aten::squeeze",
        "aten::unsqueeze",
        "aten::view",
        "aten::_unsafe_view",
        "aten::zero_",
    }
)


class DeltaCodec:
    """Compress the fields of steps, each with the same field of the last step as the dictionary."""

    def __init__(self) -> None:
        self._last: dict[str, bytes] = {}

    def compress(self, field: str, data: bytes) -> bytes:
        encoder = zlib.compressobj(6, zdict=self._dictionary(field))
        self._last[field] = data
        return encoder.compress(data) + encoder.flush()

    def decompress(self, field: str, data: bytes) -> bytes:
        """Undo `compress`.

        Raises:
            BadBoundary: The data are damaged, or not compressed relative to the last step.
        """
        decoder = zlib.decompressobj(zdict=self._dictionary(field))
        try:
            whole = decoder.decompress(data, _MAX_FIELD_BYTES)
        except zlib.error as error:
            raise BadBoundary(f"cannot decompress the {field} of a step: {error}") from error
        if not decoder.eof:
            raise BadBoundary(f"expected at most {_MAX_FIELD_BYTES} bytes in the {field} of a step, got more")
        self._last[field] = whole
        return whole

    @property
    def nbytes(self) -> int:
        """The bytes that are kept for the next step."""
        return sum(map(len, self._last.values()))

    def _dictionary(self, field: str) -> bytes:
        return self._last.get(field, b"")[-_WINDOW_BYTES:]


def split_header(data: bytes) -> tuple[bytes, memoryview]:
    """Split an encoded boundary after its header."""
    length = header_length(data)
    return data[:length], memoryview(data)[length:]


def to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def parse_json(data: bytes, what: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadBoundary(f"expected {what} in JSON, got other bytes: {describe_error(error)}") from error


# -- the stages of a step ----------------------------------------------------------------------------------------------


def encode_split(description: SplitDescription) -> bytes:
    return to_json(to_plain(description))


def parse_split(data: bytes) -> SplitDescription:
    try:
        description: SplitDescription = from_plain(parse_json(data, "the description of a split"), SplitDescription)
    except (ValueError, TypeError) as error:
        raise BadBoundary(f"invalid description of a split: {error}") from error
    if (mismatch := find_mismatch(description, SplitDescription)) is not None:
        raise BadBoundary(f"invalid description of a split: {mismatch}")
    return description


# -- state objects -----------------------------------------------------------------------------------------------------


def encode_states(states: Iterable[Any]) -> bytes:
    """Describe the state objects before the first step.

    Raises:
        Unsupported: One has values, which would have to cross.
    """
    described = []
    for state in states:
        if has_tensors(StateSnapshot.of(state)):
            raise Unsupported(
                f"expected a new {type(state).__name__} for a session on a server, got one with values, which do not "
                "cross: run the steps that filled it in this session"
            )
        described.append({"state": class_name(state), "parts": to_plain(describe_state(state), compact=True)})
    return to_json(described)


def parse_states(data: bytes, model: nn.Module) -> list[tuple[type, tuple[StateChange, ...]]]:
    """The class and the contents of each state object."""
    described = parse_json(data, "state objects")
    try:
        return [
            (find_model_class(one["state"], model, is_plain_class), parse_changes(one["parts"])) for one in described
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise BadBoundary(f"invalid state objects: {describe_error(error)}") from error


def encode_changes(changes: Changes) -> bytes:
    return to_json([to_plain(list(own), compact=True) for own in changes])


def parse_all_changes(data: bytes, count: int) -> Changes:
    """The changes of each of several state objects."""
    described = parse_json(data, "changes of state objects")
    if not isinstance(described, list) or len(described) != count:
        raise BadBoundary(f"expected the changes of {count} state objects, got {described!r:.80}")
    return [parse_changes(own) for own in described]


# -- edits -------------------------------------------------------------------------------------------------------------


class OpList(NamedTuple):
    """A list among the arguments of an operator."""

    items: tuple[PlainItem | StateValues, ...]
    kind: str = "list"


class OpRecord(NamedTuple):
    """An operator that edits a tensor, without that tensor; such as `aten::index_select`, overload `default`."""

    operator: str
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StateEditRecord(NamedTuple):
    """A `StateEdit` on the wire."""

    change: StateChange
    ops: tuple[OpRecord, ...] | None = None


def encode_edits(edits: Edits) -> bytes:
    """Encode the edits of each state object since the last step.

    Raises:
        Unsupported: One cannot be repeated on a server.
    """
    return to_json([[to_plain(_to_record(edit), compact=True) for edit in own] for own in edits])


def _to_record(edit: StateEdit) -> StateEditRecord:
    path = format_path(edit.change.path)
    ops = None if edit.ops is None else tuple(_describe_op(op, path) for op in edit.ops)
    return StateEditRecord(edit.change, ops)


def _describe_op(op: StateOp, path: str) -> OpRecord:
    schema = schema_of(op.func)
    name, overload = schema.name, schema.overload_name or "default"
    if name not in _OPERATORS:
        raise Unsupported(
            f"the state at {path} was edited between two steps by {name}, and a server repeats only operators that "
            "select, repeat or clear parts of it, such as index_select"
        )
    args = tuple(_describe_argument(one, path) for one in op.args)
    return OpRecord(name, overload, args, {key: _describe_argument(one, path) for key, one in op.kwargs.items()})


def _describe_argument(value: Any, path: str) -> Any:
    if isinstance(value, list | tuple):
        return OpList(tuple(_describe_argument(item, path) for item in value))
    if isinstance(value, Tensor) and not value.is_floating_point() and value.numel() <= _MAX_INDICES:
        dtype = str(value.dtype).removeprefix("torch.")
        return StateValues(list(value.shape), dtype, value.reshape(-1).tolist())
    if isinstance(value, bool | int | float | str | None):
        return PlainItem(value)
    if isinstance(value, torch.memory_format | torch.layout | torch.device):
        return PlainItem(None)  # that of the tensor
    raise Unsupported(
        f"the state at {path} was edited between two steps with a {type(value).__name__}, which cannot be sent: "
        "select parts of it by integer indices"
    )


def parse_edits(data: bytes, count: int) -> Edits:
    """The edits of each of several state objects."""
    described = parse_json(data, "edits of state objects")
    if not isinstance(described, list) or [type(own) for own in described] != [list] * count:
        raise BadBoundary(f"expected the edits of {count} state objects, got {described!r:.80}")
    return [[_parse_edit(one) for one in own] for own in described]


def _parse_edit(data: Any) -> StateEdit:
    record = parse_record(data, StateEditRecord)
    ops = None if record.ops is None else tuple(map(_restore_op, record.ops))
    return StateEdit(check_change(record.change), ops)


def _restore_op(record: OpRecord) -> StateOp:
    name = record.operator.removeprefix("aten::")
    func = getattr(getattr(torch.ops.aten, name, None), record.overload, None)
    if record.operator not in _OPERATORS or func is None:
        raise BadBoundary(f"expected an operator that edits a state, got {record.operator!r:.80}")
    args = tuple(map(_restore_argument, record.args))
    return StateOp(func, args, {key: _restore_argument(one) for key, one in record.kwargs.items()})


def _restore_argument(data: Any) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "list": lambda: list(map(_restore_argument, data["items"])),
        "value": lambda: parse_record(data, PlainItem).value,
        "values": lambda: _restore_tensor(parse_record(data, StateValues)),
    }
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in kinds:
        raise BadBoundary(f"expected an argument of an operator, got {data!r:.80}")
    return kinds[kind]()


def _restore_tensor(item: StateValues) -> Tensor:
    check_change(StateChange(["argument"], item))
    return torch.tensor(item.values, dtype=PLACEHOLDER_DTYPES[item.dtype]).reshape(item.shape)
