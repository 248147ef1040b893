"""One run of a stage: replaying the calls before it, and recording what crosses after it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from microtome.engine import Call, Probe
from microtome.engine.probes import AnyOp, Where
from microtome.inputs import Inputs
from microtome.split.analysis.structure_spec import StructureSpec
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import SkippedCallRecord
from microtome.split.execution.argument_reader import FlatInputs
from microtome.split.execution.recording import BoundaryRecorder
from microtome.split.execution.replay import Replayer
from microtome.split.execution.schedule import Schedule
from microtome.split.state.stage_state import StageState


class StageRun(Probe):
    """The probe of a stage's session; it is reused, since a session takes longer to make than to open."""

    def __init__(self, begins: Schedule | None, ends: Schedule | None, *, grad: bool = False) -> None:
        self._begins = begins
        self._ends = ends
        self._grad = grad
        self.reset()

    def reset(self) -> None:
        """Drop all references to the last run."""
        self._replayer: Replayer | None = None
        self._recorder: BoundaryRecorder | None = None
        self._state: StageState | None = None

    def begin(self, state: StageState) -> None:
        """Begin a run in this thread."""
        self._thread = get_ident()
        self._state = state
        if self._ends is not None:
            self._recorder = BoundaryRecorder(self._ends, state, grad=self._grad)

    def receive(self, boundary: Boundary, device: torch.device | None, spec: StructureSpec, *, release: bool) -> Inputs:
        """Take the output of the stage before, and return the model's arguments.

        Args:
            device: The device to move its tensors to.
            spec: The structure of the arguments.
            release: Drop each tensor from the boundary after its last use.
        """
        assert self._begins is not None
        assert self._state is not None
        self._replayer = Replayer(self._begins, boundary, device, self._state, release=release, grad=self._grad)
        return self._replayer.make_inputs(spec)

    def record_inputs(self, inputs: FlatInputs) -> None:
        """Record the model's arguments, in a stage other than the last."""
        assert self._recorder is not None
        self._recorder.record_inputs(inputs)

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.phase != "forward" or get_ident() != self._thread:
            return
        if self._replayer is not None:
            self._replayer.enter(call, args, kwargs)
        if self._recorder is not None:
            self._recorder.enter(call, args, kwargs)

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._recorder is not None:
            self._recorder.exit(call, args, kwargs, output, is_replayed=self.is_skipped(call))

    def is_skipped(self, call: Call) -> bool:
        """Whether a call returns before the stage."""
        return self._replayer is not None and get_ident() == self._thread and self._replayer.is_skipped(call)

    def output(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a skipped call."""
        assert self._replayer is not None
        return self._replayer.output(call, args, kwargs)

    @property
    def skipped_calls(self) -> Sequence[SkippedCallRecord]:
        """The records of the calls that the next stage skips, so far."""
        return () if self._recorder is None else self._recorder.skipped_calls

    def is_complete(self, call: Call) -> bool:
        """Whether the cut at the end of the stage has been reached."""
        return self._recorder is not None and self._recorder.is_complete and get_ident() == self._thread

    def boundary(self, fingerprint: str) -> Boundary:
        """The boundary at the end of the stage."""
        assert self._recorder is not None
        if self._replayer is not None:
            self._replayer.check_unmodified()
        return self._recorder.boundary(fingerprint)

    def check_output(self, output: Any) -> Any:
        """The model's output, at the end of the last stage."""
        return output if self._replayer is None else self._replayer.check_output(output)


class DrawingStageRun(StageRun):
    """A run of a model that draws random numbers between calls before a cut: operators are observed, too."""

    def draw(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The random numbers of the head, in place of those that an operator would draw."""
        if self._replayer is None or get_ident() != self._thread:
            return NotImplemented
        return self._replayer.draw(where, func, args, kwargs)

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._recorder is not None and get_ident() == self._thread:
            self._recorder.record_draw(where, func, args, kwargs, output)
