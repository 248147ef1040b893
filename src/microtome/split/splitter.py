"""Split a model at chosen cuts, and verify that the stages compute what the model computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from microtome.engine.fingerprint import model_fingerprint, structure_fingerprint
from microtome.engine.meta_run import SUBSTITUTION_LOCK, copy_inputs
from microtome.engine.pytree import as_state
from microtome.engine.selectors import check_model
from microtome.errors import BadQuery, describe_value
from microtome.inputs import Inputs
from microtome.results.cuts import Cut, Cuts
from microtome.results.metrics import advise
from microtome.split.analysis.analysis import Analysis, analyze
from microtome.split.analysis.call_arguments import state_objects_in
from microtome.split.analysis.structure_spec import Example, SplitSpec, TensorSpec, flatten
from microtome.split.cuts.crossing import Crossing, ValueLocation
from microtome.split.cuts.cuts import CutTable
from microtome.split.cuts.liveness import Liveness
from microtome.split.description import SplitDescription
from microtome.split.execution.schedule import build_schedule
from microtome.split.gradient_verification import GradientVerification, check_trainable
from microtome.split.stage import Stage
from microtome.split.stages import Stages
from microtome.split.variants import Variant
from microtome.split.verification import Verification, VerificationResult
from microtome.split.weights import weights_of


class Splitter:
    """The analysis of a model on an example, from which it can be split at any cut.

    Attributes:
        example: The inputs that it was analyzed on.
        analysis: One traced run of it.
        fingerprint: A digest of its structure and weights.
        state_arguments: The names of the arguments that the user says are state.
        grad: Whether what crosses keeps its gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        fingerprint: str | None = None,
        state: Sequence[str] = (),
        *,
        grad: bool = False,
    ) -> None:
        self.model = check_model(model)
        self.grad = grad
        self.state_arguments = tuple(state)
        with SUBSTITUTION_LOCK:
            original = Inputs.of(inputs, model)
            self.example = copy_inputs(original, model)  # the caller may write to the original
            with torch.set_grad_enabled(grad or torch.is_grad_enabled()):
                self.analysis: Analysis = analyze(model, self.example, state)
            created = self.analysis.created_states
            with as_state(self.analysis.state_classes):
                # Of the original, since copies of arrays do not overlap in memory.
                self.analysis.input_spec = flatten((original.args, {**original.kwargs, **created}), arrays=[])[0]
            self.fingerprint = fingerprint or model_fingerprint(model, self.analysis.describe_calls())
        self._liveness = Liveness(self.analysis, joins=not grad)
        self._table = CutTable(model, self._liveness)

    @property
    def cuts(self) -> Cuts:
        """All cuts of the model."""
        return self._table.cuts

    @property
    def state(self) -> str | None:
        """A description of the state that the model carries between runs; None: it has none."""
        return self.analysis.carried_state

    @property
    def structure(self) -> str:
        """The part of the model's fingerprint that its calls and the shapes of its weights determine."""
        return structure_fingerprint(self.model, self.analysis.describe_calls())

    @property
    def num_calls(self) -> int:
        """The number of module calls in a run."""
        return len(self.analysis.trace.calls)

    @cached_property
    def spec(self) -> SplitSpec:
        """The structure of the model's inputs and output."""
        with as_state(self.analysis.state_classes):
            return self._make_spec()

    def _make_spec(self) -> SplitSpec:
        trace, root = self.analysis.trace, self.analysis.trace.calls[0]
        output = self.analysis.call_structures[0]

        def specs_of(values: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[TensorSpec, ...]:
            tensors = (trace.values[values[rank]] for rank in ranks)
            return tuple(TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors)

        example = Example(
            inputs=specs_of(root.inputs, self.analysis.input_ranks),
            plain=flatten((self.example.args, {**self.example.kwargs, **self.analysis.created_states}))[2],
            outputs=specs_of(root.outputs, output.output_ranks),
            is_static=not trace.reads and not any(map(self._liveness.value_reads, trace.ops)),
        )
        created = self.analysis.created_states
        states = state_objects_in((self.example.args, {**self.example.kwargs, **created}))
        classes = self.analysis.state_classes
        return SplitSpec(self.analysis.input_spec, output.output, example, tuple(states), created, classes)

    def cut(self, where: Any) -> Cut:
        """The one cut that a user names."""
        chosen = self.choose(where)
        if len(chosen) > 1:
            raise BadQuery(f"expected one cut, got {len(chosen)}: {where!r:.200}")
        return chosen[0]

    def choose(self, where: Any) -> list[Cut]:
        """The cuts that a user names, in the order in which they are run."""
        return _choose_cuts(self._table, where)

    def at(self, where: Any, *, verify: bool = True, load: str | int | None = None) -> Stages:
        """See `microtome.split`."""
        chosen = _choose_cuts(self._table, where)
        stage = None if load is None else _stage_index(load, len(chosen) + 1)
        extra: list[set[ValueLocation]] = [set() for _ in chosen]
        result = VerificationResult("not verified: it was not asked for")
        if self.grad:
            check_trainable(self, chosen)
        with SUBSTITUTION_LOCK:  # another thread may have substituted the weights
            if verify and any(tensor.is_meta for tensor in (*self.model.parameters(), *self.model.buffers())):
                result = VerificationResult("not verified: some of the weights are not here")
            elif verify:
                result = Verification(self, self.analysis, chosen, extra).run()
                if self.grad:
                    result = result._replace(gradients=GradientVerification(self, chosen, extra).run())
        stages = Stages(self, chosen, extra, result)
        return stages if stage is None else stages.keeping(stage)

    def stages(
        self, chosen: Sequence[Cut], extra: Sequence[Iterable[ValueLocation]], model: nn.Module | None = None
    ) -> list[Stage]:
        """The stages between these cuts.

        Args:
            extra: The values that cross each cut beside those that the analysis found.
            model: The model to run; None: the one that was analyzed.
        """
        crossings = [None, *self.crossings(chosen, extra), None]
        schedules = [None if crossing is None else build_schedule(self.analysis, crossing) for crossing in crossings]
        return [
            Stage(
                self.model if model is None else model,
                index,
                schedules[index],
                schedules[index + 1],
                self.spec,
                weights_of(self.analysis, begin, end),
                self.fingerprint,
                self.state,
                self.example,
                grad=self.grad,
            )
            for index, (begin, end) in enumerate(pairwise(crossings))
        ]

    def crossings(self, chosen: Sequence[Cut], extra: Sequence[Iterable[ValueLocation]]) -> list[Crossing]:
        """The values that cross each cut; `extra` as in `stages`."""
        pairs = zip(chosen, extra, strict=True)
        return [self._liveness.crossing(self.analysis.exit_order[cut.index], locations) for cut, locations in pairs]

    def inputs_sent(self, chosen: Sequence[Cut], extra: Sequence[Iterable[ValueLocation]]) -> list[Tensor]:
        """The tensors of the example that cross a cut as they are."""
        locations = (location for crossing in self.crossings(chosen, extra) for location in crossing.values)
        ranks = {location.position for location in locations if location.is_input}
        with as_state(self.analysis.state_classes):
            tensors = flatten((self.example.args, self.example.kwargs), arrays=[])[1]
        return [tensor for rank, tensor in zip(self.analysis.input_ranks, tensors, strict=True) if rank in ranks]

    def export_locations(self, chosen: Sequence[Cut], extra: Sequence[set[ValueLocation]]) -> list[list[list[Any]]]:
        """Describe all values that cross each cut, in numbers that are the same in every process.

        Whoever loads a stage analyzes a model without weights, and cannot find out which values its code reads.
        """
        ranks: dict[int | None, int] = {call.index: rank for rank, call in enumerate(self.analysis.canonical_order)}
        draws: dict[int | None, int] = {op: number for number, op in enumerate(self.analysis.draws)}
        return [
            [
                [ranks.get(location.call), location.position, location.is_argument, draws.get(location.draw)]
                for location in sorted(crossing.values, key=str)
            ]
            for crossing in self.crossings(chosen, extra)
        ]

    def import_locations(self, exported: list[list[list[Any]]]) -> list[list[ValueLocation]]:
        """Read what `export_locations` returned in another process."""
        order, draws = self.analysis.canonical_order, list(self.analysis.draws)
        return [
            [
                ValueLocation(
                    None if rank is None else order[rank].index,
                    position,
                    bool(is_argument),
                    None if draw is None else draws[draw],
                )
                for rank, position, is_argument, draw in locations
            ]
            for locations in exported
        ]

    def load(self, description: SplitDescription, run: nn.Module | None = None) -> Variant:
        """The stages of a model that was split in another process, and whose weights may not be here.

        Args:
            run: The model that the stages run, if another copy of it is analyzed.
        """
        # Older files leave out the `#0` of the first of several calls.
        chosen = [self._table[address if "#" in address else f"{address}#0"] for address in description.at]
        stages = self.stages(chosen, self.import_locations(description.locations), run)
        return Variant(stages, description.first_kind, description.continues, lambda: description)


def _choose_cuts(cuts: CutTable, at: Any) -> list[Cut]:
    """The cuts that a user names, in the order in which they are run."""
    planned = getattr(at, "at", at) if not isinstance(at, Cut | nn.Module) else at
    if planned is None and at is not None:
        device = getattr(at, "sole_device", None) or "one device"
        raise BadQuery(
            f"expected a plan that cuts the model, got one that runs all of it on {device}: call the model there"
        )
    names = [planned] if isinstance(planned, str | Cut) or not isinstance(planned, Iterable) else list(planned)
    if not names or not all(isinstance(name, str | Cut) for name in names):
        raise BadQuery(
            "expected where to cut: an address such as 'layer2.0.conv1', several, or a plan of mt.plan; got "
            f"{describe_value(next((name for name in names if not isinstance(name, str | Cut)), at))}"
        )
    if "auto" in names:
        plan = advise("pass a plan, at=mt.plan(mt.cuts(…), …)", "pass the address of a cut that microtome plan finds")
        raise BadQuery(f"at='auto' needs to know the devices and the link: {plan}")
    if "" in names:
        raise BadQuery("the exit of the model itself is no cut: nothing would be left for the tail")
    addresses = (name.at if isinstance(name, Cut) else str(name) for name in names)
    chosen = sorted((cuts[address] for address in addresses), key=lambda cut: cut.index)
    for cut, other in pairwise(chosen):
        if cut.index == other.index:
            raise BadQuery(f"the cut at {cut.at!r} is named twice")
    return chosen


def _stage_index(load: str | int, count: int) -> int:
    """The index of the stage that a user names."""
    index = {"head": 0, "tail": count - 1}.get(load, load) if isinstance(load, str) else load
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise BadQuery(f"expected load='head', 'tail' or the index of one of {count} stages, got {load!r}")
    return index
