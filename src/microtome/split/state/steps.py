"""Run the steps of a sequence over stages, each of which keeps its own part of the state."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from microtome.engine.pytree import map_tensors
from microtome.errors import SessionError, Unsupported
from microtome.inputs import Inputs
from microtome.split.analysis.call_arguments import state_objects_in
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import PlaceholderSpec
from microtome.split.execution.effects import overlapping_names
from microtome.split.execution.placeholder import Placeholder
from microtome.split.stage import Stage
from microtome.split.state.contents import (
    Path,
    StatePart,
    apply_changes,
    describe_state,
    find_changes,
    format_path,
    part_at,
    parts_of,
)
from microtome.split.state.edits import apply_edits, check_not_edited, forget_history
from microtome.split.state.placeholder import StatePlaceholder

#: The state objects that belong to a sequence, by identity: they may define equality.
_claimed: dict[int, weakref.ref[Any]] = {}


class StepSequence:
    """The state of one sequence in every stage.

    The first stage works on the caller's objects. After each step they describe the whole state: what later stages
    wrote is there as placeholders.

    Attributes:
        running: The index of the stage that runs, or ran last.
    """

    def __init__(self) -> None:
        self.running = 0
        self._states: list[list[Any]] = []  # for each stage
        self._after: list[dict[Path, StatePart]] = []  # of the caller's objects, after the last step
        self._failed = False

    @property
    def states(self) -> list[list[Any]]:
        """The state objects of each stage."""
        return self._states

    def run(self, stages: Sequence[Stage], inputs: Inputs) -> Any:
        """Run one step on inputs that have all states; the output has the caller's state objects."""
        if self._failed:
            raise SessionError(
                "expected a session whose steps all succeeded, got one that an error ended: begin a new one"
            )
        states = state_objects_in((inputs.args, inputs.kwargs))
        self._failed = True  # until the step is complete: state that is written in part is of no use
        if self._states:
            self._edit(stages, states)
        else:
            self._begin(stages, states)
        before = [list(map(parts_of, own)) for own in self._states]
        for parts in (parts for own in before for parts in own):
            forget_history(parts)
        self.running = 0
        value = stages[0].run(inputs.args, inputs.kwargs)
        for stage, own in zip(stages[1:], self._states[1:], strict=True):
            self.running = stage.index
            value = self.run_stage(stage, value, own)
        self._propagate_changes(stages, before)
        self._failed = False
        return replace_states(value, self._states[-1], states)

    def run_stage(self, stage: Stage, boundary: Boundary, states: Sequence[Any]) -> Any:
        """Run a stage other than the first."""
        return stage.run((boundary,), {}, states=states, release=True)

    def _begin(self, stages: Sequence[Stage], states: list[Any]) -> None:
        for state in states:
            if id(state) in _claimed:
                raise SessionError(
                    f"expected a new {type(state).__name__}, got one of another sequence: a state belongs to one "
                    "session, at one cut"
                )
        for state in states:
            _claim(state)
        self._states = [states, *([_copy(state, stage.device) for state in states] for stage in stages[1:])]

    def _edit(self, stages: Sequence[Stage], states: list[Any]) -> None:
        """Make the caller's edits since the last step in all stages."""
        expected = self._states[0]
        if len(states) != len(expected) or any(one is not other for one, other in zip(states, expected, strict=True)):
            raise SessionError("expected the state that the last step returned, got another one: begin a new session")
        now = list(map(parts_of, states))
        for stage, others in zip(stages[1:], self._states[1:], strict=True):
            for state, before, after in zip(others, self._after, now, strict=True):
                apply_edits(state, before, after, _placeholder_of(stage), stage.device)

    def _propagate_changes(self, stages: Sequence[Stage], before: list[list[dict[Path, StatePart]]]) -> None:
        """Let each stage know what later ones wrote: shapes, numbers and flags; boundaries say so of earlier ones."""
        for number, own in enumerate(self._states):
            for index, state in enumerate(own):
                parts = parts_of(state)
                check_not_edited(before[number][index], parts, stages[number].glue_state_paths)
                changes = find_changes(before[number][index], parts, by_others=False) if number else []
                for stage, others in zip(stages[:number], self._states[:number], strict=True):
                    apply_changes(others[index], changes, stage.device, _placeholder_of(stage))
        self._after = list(map(parts_of, self._states[0]))
        for parts in self._after:
            forget_history(parts)


def _claim(state: Any) -> None:
    key = id(state)
    _claimed[key] = weakref.ref(state, lambda _: _claimed.pop(key, None))


def _copy(state: Any, device: torch.device | None) -> Any:
    """Copy a state object with its values to the device of a stage."""
    tensors = {format_path(path): part.value for path, part in parts_of(state).items() if type(part.value) is Tensor}
    if overlapping := overlapping_names({name: tensor for name, tensor in tensors.items() if tensor.numel()}):
        raise Unsupported(f"the state holds tensors that share memory, such as {overlapping[0]}: pass copies of them")

    def copy_tensor(spec: PlaceholderSpec, path: Path) -> Tensor:
        part = part_at(state, path)
        assert part is not None
        if isinstance(part.value, Placeholder):
            raise SessionError("expected a state with values, got one of stages: a state belongs to one session")
        return part.value.detach().to(device, copy=True)

    return apply_changes(None, describe_state(state), device, copy_tensor)


def _placeholder_of(stage: Stage) -> Any:
    return partial(_make_placeholder, stage.device)


def _make_placeholder(device: torch.device | None, spec: PlaceholderSpec, path: Path) -> Tensor:
    return StatePlaceholder.make(spec, path, device, "another stage")


def replace_states(value: Any, states: Sequence[Any], replacements: Sequence[Any]) -> Any:
    """Replace state objects in a value by others."""
    mapping = {id(state): replacement for state, replacement in zip(states, replacements, strict=True)}
    return map_tensors(lambda tensor: tensor, value, lambda leaf: mapping.get(id(leaf), leaf)) if mapping else value
