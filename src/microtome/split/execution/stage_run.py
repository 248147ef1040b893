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
from microtome.split.execution.recording import BoundaryRecorder
from microtome.split.execution.replay import Replayer
from microtome.split.execution.schedule import Schedule


class StageRun(Probe):
    """The probe of a stage's session; it is reused, since a session takes longer to make than to open."""

    def __init__(self, begins: Schedule | None, ends: Schedule | None) -> None:
        self._begins = begins
        self._ends = ends
        self.reset()

    def reset(self) -> None:
        """Drop all references to the last run."""
        self._replayer: Replayer | None = None
        self._recorder: BoundaryRecorder | None = None

    def begin(
        self, boundary: Boundary | None, device: torch.device | None, states: Sequence[Any] = (), *, release: bool
    ) -> None:
        """Begin a run in this thread.

        Args:
            boundary: The output of the stage before; None for the first stage.
            device: The device to move its tensors to.
            states: The stage's own state objects.
            release: Drop each tensor from the boundary after its last use.
        """
        self._thread = get_ident()
        if boundary is not None:
            assert self._begins is not None
            self._replayer = Replayer(self._begins, boundary, device, states, release=release)
        if self._ends is not None:
            self._recorder = BoundaryRecorder(self._ends)

    def make_inputs(self, spec: StructureSpec) -> Inputs:
        """The model's arguments, from the boundary."""
        assert self._replayer is not None
        return self._replayer.make_inputs(spec)

    def record_inputs(self, inputs: Inputs) -> None:
        if self._recorder is not None:
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
