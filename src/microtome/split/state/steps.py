"""Run the steps of a sequence over stages, each of which keeps its own part of the state."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import is_
from typing import Any

from microtome.engine.pytree import map_tensors
from microtome.engine.session import keep_patched
from microtome.errors import SessionError
from microtome.inputs import Inputs
from microtome.split.analysis.call_arguments import state_objects_in
from microtome.split.boundary.boundary import Boundary
from microtome.split.stage import Stage
from microtome.split.state.snapshot import StateSnapshot
from microtome.split.state.stage_state import Changes, Edits, StageState, copy_state

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
        self._states: list[StageState] = []  # for each stage
        self._failed = False
        self._snapshots: list[StateSnapshot] | None = None  # of the caller's objects, if they were read for this step

    @property
    def states(self) -> list[list[Any]]:
        """The state objects of each stage."""
        return [state.objects for state in self._states]

    def read(self, states: Sequence[Any]) -> list[StateSnapshot]:
        """Take snapshots of the caller's state objects."""
        first = self._states[0] if self._states else None
        if first is not None and len(states) == len(first.objects) and all(map(is_, states, first.objects)):
            self._snapshots = first.read()
            return self._snapshots
        return list(map(StateSnapshot.of, states))

    def run(self, stages: Sequence[Stage], inputs: Inputs) -> Any:
        """Run one step on inputs that have all states; the output has the caller's state objects."""
        with keep_patched():
            return self._run_stages(stages, inputs)

    def _run_stages(self, stages: Sequence[Stage], inputs: Inputs) -> Any:
        if self._failed:
            raise SessionError(
                "expected an open session whose steps all succeeded, got one that was closed, failed, or runs in "
                "another thread: begin a new one"
            )
        stages[0].check_modes()  # of the whole model
        states = state_objects_in((inputs.args, inputs.kwargs))
        self._failed = True  # until the step is complete: state that is written in part is of no use
        edits: Edits = ()
        if self._states:
            edits = self._find_edits(states)
        else:
            self._begin(stages, states)
        self.running = 0
        self._states[0].begin_step(stages[0])
        value = stages[0].run(inputs.args, inputs.kwargs, state=self._states[0])
        self._states[0].check_step(stages[0])  # boundaries let the others know of its changes
        for stage, state in zip(stages[1:], self._states[1:], strict=True):
            self.running = stage.index
            value, changes = self.run_step(stage, value, state, edits)
            for earlier in stages[: stage.index]:
                self._states[earlier.index].apply(earlier, changes)
        self._states[0].forget_edits()
        self._failed = False
        return replace_states(value, self._states[-1].objects, states)

    def run_step(self, stage: Stage, boundary: Boundary, state: StageState, edits: Edits) -> tuple[Any, Changes]:
        """Run a stage other than the first; return its output and its changes of the state."""
        state.begin_step(stage, edits)
        output = self.run_stage(stage, boundary, state)
        return output, state.end_step(stage)

    def run_stage(self, stage: Stage, boundary: Boundary, state: StageState) -> Any:
        return stage.run((boundary,), {}, state=state, release=True)

    def make_state(self, stage: Stage, states: Sequence[Any]) -> StageState:
        """The state of a stage other than the first, before the first step."""
        return StageState([copy_state(state, stage.device) for state in states])

    def _begin(self, stages: Sequence[Stage], states: list[Any]) -> None:
        for state in states:
            if id(state) in _claimed:
                raise SessionError(
                    f"expected a new {type(state).__name__}, got one of another sequence: a state belongs to one "
                    "session, at one cut"
                )
        for state in states:
            _claim(state)
        self._states = [StageState(states), *(self.make_state(stage, states) for stage in stages[1:])]

    def _find_edits(self, states: list[Any]) -> Edits:
        """The caller's edits since the last step."""
        expected = self._states[0].objects
        if len(states) != len(expected) or not all(map(is_, states, expected)):
            raise SessionError("expected the state that the last step returned, got another one: begin a new session")
        snapshots, self._snapshots = self._snapshots, None
        return self._states[0].find_edits(snapshots)


def _claim(state: Any) -> None:
    key = id(state)
    _claimed[key] = weakref.ref(state, lambda _: _claimed.pop(key, None))


def replace_states(value: Any, states: Sequence[Any], replacements: Sequence[Any]) -> Any:
    """Replace state objects in a value by others."""
    mapping = {id(state): replacement for state, replacement in zip(states, replacements, strict=True)}
    return map_tensors(lambda tensor: tensor, value, lambda leaf: mapping.get(id(leaf), leaf)) if mapping else value
