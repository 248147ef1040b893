"""Edits of a state object between two steps, such as the reordering of beams, made in every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from microtome.engine.pytree import map_tensors
from microtome.errors import Unsupported
from microtome.split.boundary.schema import PlaceholderSpec
from microtome.split.execution.placeholder import Placeholder
from microtome.split.state.contents import (
    Path,
    StatePart,
    apply_changes,
    changed_paths,
    find_changes,
    format_path,
    part_at,
    set_part,
    to_path,
)
from microtome.split.state.placeholder import StatePlaceholder
from microtome.trace.op_schema import op_schema


def forget_history(parts: dict[Path, StatePart]) -> None:
    """Let the history of placeholders begin anew: the other stages know of it."""
    for part in parts.values():
        if isinstance(part.value, StatePlaceholder):
            part.value.forget_history()


def check_not_edited(before: dict[Path, StatePart], after: dict[Path, StatePart], glue: frozenset[Path]) -> None:
    """Raise if a stage changed a tensor of the state that another stage has.

    Args:
        glue: The parts that code between calls changes, which the other stage runs, too.
    """
    for path, part in after.items():
        if not isinstance(part.value, Placeholder) or path in glue:
            continue
        if isinstance(part.value, StatePlaceholder):
            is_edited = part.value.history != ()
        else:  # computed from a placeholder
            is_edited = path not in before or before[path].value is not part.value
        if is_edited:
            raise Unsupported(
                f"a stage changes the state at {format_path(path)}, whose values another stage has: cut where one "
                "stage writes to it"
            )


def edited_paths(before: dict[Path, StatePart], after: dict[Path, StatePart]) -> list[Path]:
    """The parts that the caller changed since the last step, in-place operators on placeholders included."""
    placeholders = {path: part.value for path, part in after.items() if isinstance(part.value, StatePlaceholder)}
    in_place = (path for path, placeholder in placeholders.items() if placeholder.history != ())
    return list(dict.fromkeys([*changed_paths(before, after), *in_place]))


def apply_edits(
    state: Any,
    before: dict[Path, StatePart],
    after: dict[Path, StatePart],
    make_tensor: Callable[[PlaceholderSpec, Path], Tensor],
    device: torch.device | None,
) -> None:
    """Make the edits of the caller's object in that of another stage.

    Args:
        state: The object of the stage, with its own values.
        before: The parts of the caller's object at the end of the last step.
        after: The same now.
    """
    own: list[Path] = []
    for path in edited_paths(before, after):
        local = part_at(state, path)
        if local is not None and isinstance(local.value, Tensor) and not isinstance(local.value, Placeholder):
            own.append(path)
            if path in after and isinstance(after[path].value, Placeholder):
                set_part(state, path, _replay(local.value, after[path].value, path, before.get(path)))
            elif path not in after or not isinstance(after[path].value, Tensor):
                own.pop()  # removed, or replaced by what `apply_changes` sets
                set_part(state, path, None)
            elif not _is_same_content(local.value, after[path].value):
                raise Unsupported(
                    f"the state at {format_path(path)} was replaced between two steps, and its values are in another "
                    "stage: edit it by operators on itself, such as index_select"
                )
    skipped = set(own)
    changes = [change for change in find_changes(before, after) if to_path(change.path) not in skipped]
    apply_changes(state, changes, device, make_tensor, keeps_tensors=True)


def _is_same_content(tensor: Tensor, other: Tensor) -> bool:
    return not other.is_floating_point() and tensor.shape == other.shape and tensor.cpu().equal(other.cpu())


def _replay(tensor: Tensor, placeholder: Placeholder, path: Path, before: StatePart | None) -> Tensor:
    """Run the operators that were applied to a placeholder on the tensor that it stands for."""
    history = None
    if isinstance(placeholder, StatePlaceholder) and before is not None and placeholder.root is before.value:
        history = placeholder.history
    if history is None:
        raise Unsupported(
            f"the state at {format_path(path)} was edited between two steps by more than operators on itself, and its "
            "values are in another stage: reorder, crop or repeat it"
        )
    device = tensor.device
    for func, args, kwargs in history:
        args, kwargs = map_tensors(lambda other: other.to(device), (args, kwargs))
        result = func(tensor, *args, **kwargs)
        tensor = tensor if op_schema(func).written((tensor, *args), kwargs) else result
    return tensor
