"""Edits of a state object between two steps, such as the reordering of beams, made in every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microtome.engine.pytree import map_tensors
from microtome.errors import Unsupported
from microtome.split.boundary.schema import PlaceholderSpec, StateChange, StateValues
from microtome.split.execution.placeholder import Placeholder
from microtome.split.state.contents import (
    apply_changes,
    describe_change,
    describe_value,
    find_changes,
    part_at,
    set_part,
    to_path,
)
from microtome.split.state.placeholder import StateOp, StatePlaceholder
from microtome.split.state.snapshot import Path, StateSnapshot, format_path
from microtome.trace.op_schema import op_schema


def forget_history(snapshot: StateSnapshot) -> None:
    """Let the history of placeholders begin anew: the other stages know of it."""
    for _, placeholder in _edited_placeholders(snapshot):
        if isinstance(placeholder, StatePlaceholder):
            placeholder.forget_history()


def _edited_placeholders(snapshot: StateSnapshot) -> list[tuple[Path, Placeholder]]:
    """The placeholders with a history, and those that were computed from others."""
    values, paths = snapshot.part_values, snapshot.layout.paths
    return [
        (paths[at], one)
        for at in snapshot.layout.placeholders
        if type(one := values[at]) is not StatePlaceholder or one.history != ()
    ]


def check_not_edited(before: StateSnapshot, after: StateSnapshot, glue: frozenset[Path]) -> None:
    """Raise if a stage changed a tensor of the state that another stage has.

    Args:
        glue: The parts that code between calls changes, which the other stage runs, too.
    """
    for path, placeholder in _edited_placeholders(after):
        if path in glue:
            continue
        # Those of another class are computed from a placeholder.
        is_known = path in before and before[path].value is placeholder
        if isinstance(placeholder, StatePlaceholder) or not is_known:
            raise Unsupported(
                f"a stage changes the state at {format_path(path)}, whose values another stage has: cut where one "
                "stage writes to it"
            )


class StateEdit(NamedTuple):
    """An edit of one part of the state, made by the caller between two steps.

    Attributes:
        change: The part, and what it is now.
        ops: The operators that made the tensor there from the one of the last step; None: other stages cannot repeat
            the edit.
    """

    change: StateChange
    ops: tuple[StateOp, ...] | None


def find_edits(before: StateSnapshot, after: StateSnapshot) -> list[StateEdit]:
    """The edits of a state object since the last step, in-place operators on placeholders included."""
    changes = find_changes(before, after)
    edited = _edited_placeholders(after)
    if not changes and not edited:  # as between most steps
        return []
    changed = {to_path(change.path) for change in changes}
    for path, placeholder in edited:
        if path not in changed and isinstance(placeholder, StatePlaceholder):
            changes.append(describe_change(path, after[path]))
    return [StateEdit(change, _find_ops(to_path(change.path), before, after)) for change in changes]


def _find_ops(path: Path, before: StateSnapshot, after: StateSnapshot) -> tuple[StateOp, ...] | None:
    value = after[path].value if path in after else None
    if isinstance(value, StatePlaceholder) and path in before and value.root is before[path].value:
        return value.history
    return None


def apply_edits(
    state: Any,
    edits: Iterable[StateEdit],
    make_tensor: Callable[[PlaceholderSpec, Path], Tensor],
    device: torch.device | None,
) -> None:
    """Make the edits of the caller's object in that of another stage, which has values of its own."""
    for change, ops in edits:
        path = to_path(change.path)
        local = part_at(state, path)
        if local is not None and isinstance(local.value, Tensor) and not isinstance(local.value, Placeholder):
            if isinstance(change.item, PlaceholderSpec):
                set_part(state, path, _repeat(ops, local.value, path))
                continue
            if isinstance(change.item, StateValues):
                if describe_value(local.value, path) != change.item:
                    raise _not_repeatable(path)
                continue
            set_part(state, path, None)  # replaced or removed below
        apply_changes(state, [change], device, make_tensor, keeps_tensors=True)


def _repeat(ops: tuple[StateOp, ...] | None, tensor: Tensor, path: Path) -> Tensor:
    """Run the operators that were applied to a placeholder on the tensor that it stands for."""
    if ops is None:
        raise _not_repeatable(path)
    device = tensor.device
    for func, args, kwargs in ops:
        args, kwargs = map_tensors(lambda other: other.to(device), (args, kwargs))
        result = func(tensor, *args, **kwargs)
        tensor = tensor if op_schema(func).written((tensor, *args), kwargs) else result
    return tensor


def _not_repeatable(path: Path) -> Unsupported:
    return Unsupported(
        f"the state at {format_path(path)} was edited between two steps by more than operators on itself, and its "
        "values are in another stage: reorder, crop or repeat it by operators such as index_select"
    )
