"""The state objects of one stage over the steps of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from microtome.engine.torch_internals import storage_id
from microtome.errors import SessionError, Unsupported
from microtome.split.boundary.schema import PlaceholderSpec, StateChange
from microtome.split.execution.effects import overlapping_names
from microtome.split.execution.placeholder import Placeholder
from microtome.split.state.contents import apply_changes, describe_state, find_changes, part_at
from microtome.split.state.edits import StateEdit, apply_edits, check_not_edited, find_edits, forget_history
from microtome.split.state.placeholder import StatePlaceholder
from microtome.split.state.snapshot import Path, StateSnapshot, format_path

if TYPE_CHECKING:
    from microtome.split.stage import Stage

#: The edits of each state object before a step, and the changes of each by a stage in it.
Edits = Sequence[Sequence[StateEdit]]
Changes = Sequence[Sequence[StateChange]]


class StageState:
    """The state objects of one stage: its own tensors have values, those of other stages are placeholders.

    Attributes:
        objects: The state objects, in the order of the model's arguments.
        before: Their snapshots when the step began; empty between two steps.
        after: Their snapshots after the last change; None: they may have changed since.
    """

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects
        self.before: list[StateSnapshot] = []
        self.after: list[StateSnapshot] | None = None
        self._last: Sequence[StateSnapshot | None] = [None] * len(objects)

    def read(self) -> list[StateSnapshot]:
        """Take snapshots of the objects as they are now."""
        self._last = snapshots = list(map(StateSnapshot.of, self.objects, self._last))
        return snapshots

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the stage's own tensors keep alive, each storage once."""
        parts = (part.value for snapshot in self.read() for part in snapshot.values())
        own = (part for part in parts if isinstance(part, Tensor) and not isinstance(part, Placeholder))
        storages = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in own}
        return sum(storages.values())

    def find_edits(self, snapshots: list[StateSnapshot] | None = None) -> Edits:
        """The edits of the caller, who has the objects, since the last step.

        Args:
            snapshots: Snapshots of the objects as they are now; None: they are taken.
        """
        before, self.after = self.after or [], snapshots or self.read()
        return list(map(find_edits, before, self.after))

    def begin_step(self, stage: Stage, edits: Edits = ()) -> None:
        """Make the caller's edits since the last step."""
        if any(edits):
            device = stage.device
            for state, own in zip(self.objects, edits, strict=True):
                apply_edits(state, own, partial(_make_placeholder, device), device)
            self.after = None
        self.before, self.after = self.after or self.read(), None
        for snapshot in self.before:
            forget_history(snapshot)

    def check_step(self, stage: Stage) -> list[StateSnapshot]:
        """Raise Unsupported if the stage changed tensors of another one; return snapshots of the objects."""
        self.after = after = self.after or self.read()
        for before, now in zip(self.before, after, strict=True):
            check_not_edited(before, now, stage.glue_state_paths)
        return after

    def end_step(self, stage: Stage) -> Changes:
        """The changes by this stage, for the others, after `check_step`."""
        before, after = self.before, self.check_step(stage)
        self.before = []  # its tensors are freed
        return [find_changes(old, new, by_others=False) for old, new in zip(before, after, strict=True)]

    def apply(self, stage: Stage, changes: Changes) -> None:
        """Change the objects as another stage changed its own."""
        device = stage.device
        self.after = None
        for state, own in zip(self.objects, changes, strict=True):
            apply_changes(state, own, device, partial(_make_placeholder, device))

    def forget_edits(self) -> None:
        """End the step: what the caller changes from now on is an edit."""
        self.before, self.after = [], self.read()
        for snapshot in self.after:
            forget_history(snapshot)


def copy_state(state: Any, device: torch.device | None) -> Any:
    """Copy a state object with its values to the device of a stage."""
    tensors = {
        format_path(path): part.value for path, part in StateSnapshot.of(state).items() if type(part.value) is Tensor
    }
    if overlapping := overlapping_names({name: tensor for name, tensor in tensors.items() if tensor.numel()}):
        raise Unsupported(f"the state holds tensors that share memory, such as {overlapping[0]}: pass copies of them")

    def copy_tensor(spec: PlaceholderSpec, path: Path) -> Tensor:
        part = part_at(state, path)
        assert part is not None
        if isinstance(part.value, Placeholder):
            raise SessionError("expected a state with values, got one of stages: a state belongs to one session")
        return part.value.detach().to(device, copy=True)

    return apply_changes(None, describe_state(state), device, copy_tensor)


def _make_placeholder(device: torch.device | None, spec: PlaceholderSpec, path: Path) -> Tensor:
    return StatePlaceholder.make(spec, path, device, "another stage")
