"""The model on the side of the client: its head for any cut and, if all weights are here, its tail."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from microtome.addresses import INPUT
from microtome.errors import BadQuery, Unsupported
from microtome.inputs import no_inputs_error
from microtome.remote.payloads import INPUTS
from microtome.results.cuts import Cut
from microtome.results.plan import Plan
from microtome.split.graph.exported_stage import ExportedStage
from microtome.split.modes import ModuleModes
from microtome.split.splitter import Splitter
from microtome.split.stage import Stage
from microtome.split.variants import StageVariants

_EXPORTED_HINT = (
    ": an exported stage has neither the model nor the facts of its inputs, which a client needs. Connect the stage of "
    "mt.load_stage; or serve the exported one and connect the model through it, at=['(input)', …]; or send its output "
    "to the server without microtome, as examples/edge-onnx does"
)


class LocalModel:
    """A model, or its first stage, or its first and its last one.

    Attributes:
        splitter: Cuts the model anywhere; None for stages.
        is_whole: Whether all weights are here, so that this device can compute the output alone.
    """

    def __init__(self, model: nn.Module | Stage | Sequence[Stage], inputs: Any) -> None:
        self._lock = threading.Lock()
        self._stages: dict[tuple[str, ...], Sequence[Stage | None]] = {}  # by their cuts
        self._variants: dict[str, StageVariants] = {}
        self.splitter: Splitter | None = None
        self._first: Stage | None = None
        self._last: Stage | None = None
        source: Stage | Splitter
        if isinstance(model, nn.Module):
            if inputs is None:
                raise no_inputs_error(model)
            with torch.no_grad():
                source = self.splitter = Splitter(model, inputs)
            _check_stateless(source.state)
        else:
            self._first, self._last = _first_and_last([*model] if isinstance(model, Sequence) else [model])
            source = self._first
            _check_stateless(source.state)
            if source.variants is not None and source.ends_at is not None:
                self._variants[source.ends_at] = source.variants
        self.model, self.fingerprint, self.spec = source.model, source.fingerprint, source.spec
        self._modes = ModuleModes(self.model)
        tensors = (*self.model.parameters(), *self.model.buffers())
        self.is_whole = self.splitter is not None and not any(tensor.is_meta for tensor in tensors)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def device(self) -> torch.device | None:
        return next((parameter.device for parameter in self.model.parameters() if not parameter.is_meta), None)

    @property
    def params(self) -> int:
        """The number of parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def check_modes(self) -> None:
        """Raise if a module is not in the mode that it was in when the model was connected."""
        self._modes.check()

    def stages_at(self, cuts: tuple[str, ...]) -> Sequence[Stage | None]:
        """Return the stages between cuts; None for those whose weights are not here."""
        with self._lock, torch.no_grad():
            if cuts not in self._stages:
                self._stages[cuts] = self._make_stages(cuts)
            return self._stages[cuts]

    def _make_stages(self, cuts: tuple[str, ...]) -> Sequence[Stage | None]:
        if self.splitter is not None:
            stages = self.splitter.at(cuts)
            if len(cuts) == 1:
                self._variants[cuts[0]] = stages.variants
            return stages if self.is_whole else (stages[0], *[None] * len(cuts))
        assert self._first is not None
        begin, end = self._first.ends_at, None if self._last is None else self._last.begins_at
        if cuts[0] != begin or (end is not None and (len(cuts) == 1 or cuts[-1] != end)):
            own = f"up to {begin!r}" if end is None else f"up to {begin!r} and from {end!r} on"
            raise BadQuery(f"this client has the stage {own} alone: the model cannot be cut at {', '.join(cuts)!r}")
        return (self._first, *[None] * (len(cuts) - 1), self._last)

    def variants_at(self, at: str) -> StageVariants:
        """Return the stages of a cut for the steps of sessions."""
        self.stages_at((at,))
        return self._variants[at]

    def boundary_bytes(self, at: str) -> int:
        """Return the bytes that cross a cut on the example; 0: not known."""
        return 0 if self.splitter is None else self.splitter.cuts[at].nbytes

    def resolve_cuts(self, at: Any) -> tuple[str, ...]:
        """Return the addresses of the cuts that a user named, in order; of stages, their own ones for `"auto"`."""
        names = [at] if isinstance(at, str | Cut) or not isinstance(at, Iterable) else list(at)
        if any(map(_is_input, names)):
            _check_inputs_first(names)
            return (INPUTS, *(self._resolve_layers(names[1:]) if names[1:] else ()))
        return self._resolve_layers(names)

    def _resolve_layers(self, names: Sequence[Any]) -> tuple[str, ...]:
        """Return the addresses of cuts at layers."""
        if self.splitter is not None:
            cuts = tuple(cut.at for cut in self.splitter.choose(names))
            named = tuple(cut.at for name in names for cut in self.splitter.choose(name))
            if named != cuts:
                raise BadQuery(
                    f"expected cuts in the order of a run, {', '.join(map(repr, cuts))}, as the servers are, "
                    f"got {', '.join(map(repr, named))}"
                )
            return cuts
        assert self._first is not None
        own = [stage_at for stage_at in (self._first.ends_at, self._last and self._last.begins_at) if stage_at]
        cuts = tuple(own) if names == ["auto"] else tuple(map(str, names))
        self.stages_at(cuts)
        return cuts


def _is_input(name: Any) -> bool:
    """Whether a user names the inputs of the model in place of a cut."""
    return isinstance(name, str) and name in (INPUTS, INPUT)


def _check_inputs_first(names: Sequence[Any]) -> None:
    """Raise unless the inputs are the first cut, and no other."""
    places = [place for place, name in enumerate(names) if _is_input(name)]
    if len(places) > 1:
        raise BadQuery(f"the cut at {INPUT!r} is named twice")
    if places[0] > 0:
        raise BadQuery(f"expected cuts in the order of a run, {INPUT!r} first, got {', '.join(map(repr, names)):.200}")


def _check_stateless(state: str | None) -> None:
    """Raise if a model carries state from run to run: servers do not run such a model."""
    if state is not None:
        raise Unsupported(
            f"a client cannot run this model with a server: it carries {state} from run to run, which the server would "
            "not have. Put the model in eval mode, have it take and return its state, or train it with train=True"
        )


def _first_and_last(stages: Sequence[Stage]) -> tuple[Stage, Stage | None]:
    """Return the first stage of a model and, if it is here, the last one."""
    first, others = stages[0] if stages else None, list(stages[1:])
    is_first = isinstance(first, Stage) and first.begins_at is None and first.ends_at is not None
    is_last = len(others) <= 1 and all(
        isinstance(stage, Stage) and stage.begins_at is not None and stage.ends_at is None for stage in others
    )
    if not is_first or not is_last:
        raise BadQuery(
            "expected the first stage of a model for a client, or the first and the last one, got "
            + ", ".join(f"{stage!r:.200}" for stage in stages)
            + _EXPORTED_HINT * any(isinstance(stage, ExportedStage) for stage in stages)
        )
    assert isinstance(first, Stage)
    if others and others[0].fingerprint != first.fingerprint:
        raise BadQuery(f"expected two stages of one model, got {first!r} and {others[0]!r} with other weights")
    return first, others[0] if others else None


class PlannedChain(NamedTuple):
    """The cuts of a plan with the codecs there, and the numbers of its devices that run something after them."""

    cuts: tuple[str, ...]
    codecs: tuple[str, ...]
    devices: tuple[int, ...]


def planned_chain(plan: Plan) -> PlannedChain:
    """Return the cuts of a plan and its devices after the first; raise if that runs the model alone."""
    crossed = [INPUTS if at is None else at for at in plan.winner.at]
    # A device runs something unless the next link is crossed at the same cut.
    running = [index for index, at in enumerate(crossed) if index + 1 == len(crossed) or crossed[index + 1] != at]
    if not running:
        here = next(iter(plan.devices))
        cuts = (candidate.at[0] for candidate in plan if candidate.refused is None and candidate.at)
        best = next((at for at in cuts if at is not None), None)
        other = "" if best is None else f", or connect with at={best!r}, the best of its cuts"
        raise BadQuery(f"the plan runs the whole model on {here}, without a server: call the model{other}")
    codecs = tuple(plan.winner.codecs[index] for index in running)
    return PlannedChain(tuple(crossed[index] for index in running), codecs, tuple(running))
