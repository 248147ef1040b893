"""A part of a model that runs by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from microtome.engine import Probe, ReplaceOp, Session, Skip, Stop, Stopped
from microtome.engine.module_state import copy_attributes, restore_attributes
from microtome.engine.pytree import tensors_in
from microtome.engine.selectors import named_modules
from microtome.engine.signals import signal_safe
from microtome.errors import BadBoundary, BadInputs, MicrotomeError, Unsupported
from microtome.inputs import Inputs
from microtome.split.boundary import Boundary
from microtome.split.placeholder import Placeholder
from microtome.split.random_replay import DrawingRun
from microtome.split.replay import StageRun
from microtome.split.schedule import Schedule
from microtome.split.structure_spec import ModelSpec, check_structure, flatten
from microtome.split.weights import tensor_at


class Stage:
    """A part of a split model: from a cut, or the beginning, to the next cut, or the end.

    The first stage is called as the model is and gives a `Boundary`; the others take one. The last gives what the model
    gives. Nothing of the other parts runs.

    Attributes:
        index: Which of the stages it is.
        model: The model that it is a part of.
        fingerprint: Of the model; stages of another one refuse its boundaries.
        spec: The structure of what the model takes and returns.
        state: What the model reads that earlier runs of it wrote, in words; None: nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        begins: Schedule | None,
        ends: Schedule | None,
        spec: ModelSpec,
        needed: Iterable[str],
        fingerprint: str,
        state: str | None = None,
    ) -> None:
        self.model = model
        self.index = index
        self.fingerprint = fingerprint
        self._begins = begins
        self._ends = ends
        self.spec = spec
        self.state = state
        self._needed = tuple(needed)
        self._free: list[tuple[Session, StageRun]] = []
        modules = dict(named_modules(model))
        self._seen = [modules[path] for trail in (begins, ends) if trail is not None for path in trail.paths]
        self._skipped = (
            [] if begins is None else list({step.path: modules[step.path] for step in begins.steps}.values())
        )
        self._around = [] if begins is None else [modules[path] for path in begins.around]
        self._cut = None if ends is None else modules[ends.levels[-1][0][-1].path]

    @property
    def begins_at(self) -> str | None:
        """The address of the cut that it goes on from; None: it is the first."""
        return None if self._begins is None else self._begins.at

    @property
    def ends_at(self) -> str | None:
        """The address of the cut where it ends; None: it is the last."""
        return None if self._ends is None else self._ends.at

    def parameters_needed(self) -> list[str]:
        """The names of the parameters and buffers that it reads."""
        return list(self._needed)

    @property
    def device(self) -> torch.device | None:
        """The device of its first weight, or of the model's if it has none; None: unknown."""
        own = (tensor_at(self.model, name) for name in self._needed)
        for tensor in chain(own, self.model.parameters(), self.model.buffers()):
            if tensor is not None and not tensor.is_meta:
                return tensor.device
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs)

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], probes: Iterable[Probe] = (), *, release: bool = False
    ) -> Any:
        """Run the part on what it is called with; the probes look on.

        Args:
            release: Whether the boundary lets go of each tensor when it has been used: memory is free for the rest of
                the run as early as in a run of the whole model, and the boundary is empty afterwards.
        """
        boundary = None
        if self._begins is not None:
            boundary = self._boundary(args, kwargs)
        # A session takes longer to make than to open, so it is kept; several threads may run the stage at once.
        probes = tuple(probes)
        session, run = (None if probes else self._kept()) or self._session(probes)
        with self._as_found(session, run, kept=not probes):
            run.begin(boundary, None if boundary is None else self.device, release=release)
            given = Inputs(*args, **kwargs) if boundary is None else run.inputs(boundary)
            if boundary is None:
                got = flatten((given.args, given.kwargs), arrays=[])[0]
                check_structure("what the head is given, positional and by name,", self.spec.inputs, got)
            run.take_inputs(given)
            with session:
                return self._run(run, given)

    @signal_safe
    def _as_found(self, session: Session, run: StageRun, *, kept: bool) -> Iterator[None]:
        """Afterwards, have the run hold nothing and the modules around the cut no ghosts, and keep the session."""
        had = [(module, copy_attributes(module)) for module in self._around]
        try:
            yield
        finally:
            run.begin()
            for module, attributes in had:
                restore_attributes(module, attributes, where=_holds_ghosts)
            if kept:
                self._free.append((session, run))

    def _run(self, run: StageRun, given: Inputs) -> Any:
        try:
            output = given.run(self.model)
        except Stopped as stopped:
            if self._ends is None or not run.is_over(stopped.call):
                raise
            return run.boundary(self.fingerprint)
        except (RuntimeError, NotImplementedError) as error:
            missing = self._missing()
            if missing and not isinstance(error, MicrotomeError):
                raise Unsupported(
                    f"stage {self.index} cannot run here: {len(missing)} of its weights are not loaded, such as "
                    f"{missing[0]!r}. Load them with mt.load_stage(…, {self.index}), or split without `load`"
                ) from error
            raise
        if self._ends is not None:
            raise Unsupported(
                f"the model ended before the cut at {self._ends.at!r}: its way depends on what it is given"
            )
        return run.finished(output)

    def _kept(self) -> tuple[Session, StageRun] | None:
        try:
            return self._free.pop()
        except IndexError:
            return None

    def _session(self, probes: tuple[Probe, ...] = ()) -> tuple[Session, StageRun]:
        interventions: list[Any] = []
        run = StageRun(self._begins, self._ends, self.spec.inputs)
        if any(trail is not None and trail.draws for trail in (self._begins, self._ends)):
            run = drawing = DrawingRun(self._begins, self._ends, self.spec.inputs)
            interventions.append(ReplaceOp(drawing.draw))
        if self._skipped:
            interventions.append(Skip(self._skipped, run.output, when=run.is_skipped))
        if self._cut is not None:
            interventions.append(Stop(self._cut, when=run.is_over))
        # In one session with the run, or the probes would not see the exit of the call at which it stops.
        at = None if probes else self._seen
        session = Session(self.model, [run, *probes], interventions, at=at, fast_paths=True, other_threads="ignore")
        return session, run

    def _missing(self) -> list[str]:
        held = {name: tensor_at(self.model, name) for name in self._needed}
        return [name for name, tensor in held.items() if tensor is None or tensor.is_meta]

    def _boundary(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Boundary:
        assert self._begins is not None
        if len(args) != 1 or kwargs or not isinstance(args[0], Boundary):
            raise BadInputs(f"stage {self.index} takes what the stage before it gives: one Boundary")
        boundary = args[0]
        if boundary.at != self._begins.at:
            raise BadBoundary(
                f"the boundary is of a cut at {boundary.at!r}, and this stage goes on at {self._begins.at!r}"
            )
        if boundary.fingerprint != self.fingerprint:
            raise BadBoundary(
                f"the boundary is of another model: its fingerprint is {boundary.fingerprint}, and this stage's is "
                f"{self.fingerprint}. Split the same model, with the same weights, on both sides"
            )
        return boundary

    def __repr__(self) -> str:
        start = "the inputs" if self._begins is None else repr(self._begins.at)
        end = "the output" if self._ends is None else repr(self._ends.at)
        return f"<Stage {self.index} of {type(self.model).__name__}, from {start} to {end}>"


def _holds_ghosts(value: Any) -> bool:
    return any(isinstance(tensor, Placeholder) for tensor in tensors_in(value))
