"""Split a model at chosen cuts, and verify that the stages compute what the model computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import nn

from microtome.engine.fingerprint import model_fingerprint
from microtome.engine.meta_run import SUBSTITUTION_LOCK, copy_inputs
from microtome.engine.pytree import map_tensors
from microtome.engine.selectors import check_model
from microtome.engine.snapshot import restore_afterwards
from microtome.errors import BadQuery, Unsupported
from microtome.inputs import Inputs
from microtome.results.cuts import Cut, Cuts
from microtome.split.analysis.analysis import Analysis, analyze
from microtome.split.analysis.randomness import devices_of, save_random_state
from microtome.split.analysis.structure_spec import Example, SplitSpec, TensorSpec, flatten
from microtome.split.boundary.boundary import Boundary
from microtome.split.comparison import Difference, differences
from microtome.split.cuts.crossing import Crossing, ValueLocation
from microtome.split.cuts.cuts import list_cuts
from microtome.split.cuts.liveness import Liveness
from microtome.split.execution.placeholder import PlaceholderRead
from microtome.split.execution.schedule import build_schedule
from microtome.split.stage import Stage
from microtome.split.stages import BIT_EQUAL, Stages
from microtome.split.verification import hide_attributes, refuse_errors
from microtome.split.weights import weights_of

#: How many requests a stateful model is verified on.
_REQUESTS = 3

_NO_LIMIT = 1 << 62  # the example is the user's own


class Splitter:
    """The analysis of a model on an example, from which it can be split at any cut.

    Attributes:
        example: The inputs that it was analyzed on.
        cuts: All cuts of the model.
        fingerprint: A digest of its structure and weights.
    """

    def __init__(self, model: nn.Module, inputs: Any, fingerprint: str | None = None) -> None:
        self.model = check_model(model)
        with SUBSTITUTION_LOCK:
            original = Inputs.of(inputs, model)
            self.example = copy_inputs(original, model)  # the caller may write to the original
            self._analysis: Analysis = analyze(model, self.example)
            # Of the original, since copies of arrays do not overlap in memory.
            self._analysis.input_spec = flatten((original.args, original.kwargs), arrays=[])[0]
            self.fingerprint = fingerprint or model_fingerprint(model, self._analysis.describe_calls())
        self._liveness = Liveness(self._analysis)
        self.cuts: Cuts = list_cuts(model, self._liveness)

    @property
    def state(self) -> str | None:
        """A description of the state that the model carries between runs; None: it has none."""
        return self._analysis.carried_state

    @property
    def num_calls(self) -> int:
        """The number of module calls in a run."""
        return len(self._analysis.trace.calls)

    @cached_property
    def spec(self) -> SplitSpec:
        """The structure of the model's inputs and output."""
        trace, root = self._analysis.trace, self._analysis.trace.calls[0]
        output = self._analysis.call_structures[0]

        def specs_of(values: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[TensorSpec, ...]:
            tensors = (trace.values[values[rank]] for rank in ranks)
            return tuple(TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors)

        example = Example(
            inputs=specs_of(root.inputs, self._analysis.input_ranks),
            plain=flatten((self.example.args, self.example.kwargs))[2],
            outputs=specs_of(root.outputs, output.output_ranks),
            is_static=not trace.reads and not any(map(self._liveness.value_reads, trace.ops)),
        )
        return SplitSpec(self._analysis.input_spec, output.output, example)

    def cut(self, where: Any) -> Cut:
        """The one cut that a user names."""
        chosen = _choose_cuts(self.cuts, where)
        if len(chosen) > 1:
            raise BadQuery(f"expected one cut, got {len(chosen)}: {where!r:.200}")
        return chosen[0]

    def at(self, where: Any, *, verify: bool = True, load: str | int | None = None) -> Stages:
        """See `microtome.split`."""
        chosen = _choose_cuts(self.cuts, where)
        stage = None if load is None else _stage_index(load, len(chosen) + 1)
        extra: list[set[ValueLocation]] = [set() for _ in chosen]
        verified = "not verified: it was not asked for"
        with SUBSTITUTION_LOCK:  # another thread may have substituted the weights
            if verify and any(tensor.is_meta for tensor in (*self.model.parameters(), *self.model.buffers())):
                verified = "not verified: some of the weights are not here"
            elif verify:
                verified = self._verify(chosen, extra)
        stages = Stages(self, chosen, extra, verified)
        return stages if stage is None else stages.keeping(stage)

    def stages(
        self, chosen: Sequence[Cut], extra: Sequence[Iterable[ValueLocation]], model: nn.Module | None = None
    ) -> list[Stage]:
        """The stages between these cuts.

        Args:
            extra: The values that cross each cut beside those that the analysis found.
            model: The model to run; None: the one that was analyzed.
        """
        crossings = [None, *self._crossings(chosen, extra), None]
        schedules = [None if crossing is None else build_schedule(self._analysis, crossing) for crossing in crossings]
        return [
            Stage(
                self.model if model is None else model,
                index,
                schedules[index],
                schedules[index + 1],
                self.spec,
                weights_of(self._analysis, begin, end),
                self.fingerprint,
                self.state,
            )
            for index, (begin, end) in enumerate(pairwise(crossings))
        ]

    def _crossings(self, chosen: Sequence[Cut], extra: Sequence[Iterable[ValueLocation]]) -> list[Crossing]:
        pairs = zip(chosen, extra, strict=True)
        return [self._liveness.crossing(self._analysis.exit_order[cut.index], locations) for cut, locations in pairs]

    def export_locations(self, chosen: Sequence[Cut], extra: Sequence[set[ValueLocation]]) -> list[list[list[Any]]]:
        """Describe all values that cross each cut, in numbers that are the same in every process.

        Whoever loads a stage analyzes a model without weights, and cannot find out which values its code reads.
        """
        ranks: dict[int | None, int] = {call.index: rank for rank, call in enumerate(self._analysis.canonical_order)}
        draws: dict[int | None, int] = {op: number for number, op in enumerate(self._analysis.draws)}
        return [
            [
                [ranks.get(location.call), location.position, location.is_argument, draws.get(location.draw)]
                for location in sorted(crossing.values, key=str)
            ]
            for crossing in self._crossings(chosen, extra)
        ]

    def import_locations(self, exported: list[list[list[Any]]]) -> list[list[ValueLocation]]:
        """Read what `export_locations` returned in another process."""
        order, draws = self._analysis.canonical_order, list(self._analysis.draws)
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

    def _verify(self, chosen: Sequence[Cut], extra: list[set[ValueLocation]]) -> str:
        """Compare with the whole model, through bytes; add values that the model's code turns out to read to `extra`.

        The whole model and the head draw from the same random state, and the tail from the state that the head leaves.
        A stateful model is compared over several requests, from the same state.
        """
        reset_random = save_random_state(
            devices_of(self.model, self.example),
            self._analysis.generators,
            draws=bool(self._analysis.draws),
            packages={draw.package for draw in self._analysis.python_draws},
        )
        with restore_afterwards(self.model, self._analysis.written_parameters) as snapshot:

            def reset() -> None:
                snapshot.restore()
                reset_random()

            try:
                return self._compare(chosen, extra, reset)
            finally:
                reset()

    def _compare(self, chosen: Sequence[Cut], extra: list[set[ValueLocation]], reset: Callable[[], None]) -> str:
        requests = _REQUESTS if self._analysis.is_stateful else 1
        expected = [_detach(self._run_whole(), requests) for _ in range(requests)]
        while True:
            reset()
            stages = self.stages(chosen, extra)
            try:
                outputs = []
                for _ in range(requests):
                    example = copy_inputs(self.example, self.model)
                    stage = stages[0]
                    value: Any = stage(*example.args, **example.kwargs)
                    for stage, cut in zip(stages[1:], chosen, strict=True):
                        received = Boundary.from_bytes(value.to_bytes(), limit=_NO_LIMIT)
                        with refuse_errors(self.model, cut), hide_attributes(self.model, self._attributes_before(cut)):
                            value = stage(received)
                    outputs.append(_detach(value, requests))
                break
            except PlaceholderRead as error:  # the model's code reads values that the trace had none of
                location = error.placeholder.location
                if location is None or stage.index == 0 or location in extra[stage.index - 1]:
                    raise
                extra[stage.index - 1].add(location)
        mismatches = [difference for pair in zip(outputs, expected, strict=True) for difference in differences(*pair)]
        if not mismatches:
            return BIT_EQUAL
        reset()
        nondeterminism = [_magnitude(difference) for difference in differences(self._run_whole(), expected[0])]
        worst = max(mismatches, key=_magnitude)
        if not nondeterminism or _magnitude(worst) > 10 * max(nondeterminism):
            where = f" at {worst.path}" if worst.path else ""
            raise Unsupported(
                f"the {type(self.model).__name__} cannot be cut at {', '.join(cut.at for cut in chosen)}: the stages "
                f"give{where} {worst.description}. State other than tensors crosses the cut"
            )
        return f"{worst.description}; two runs of the whole model differ as much"

    def _run_whole(self) -> Any:
        return copy_inputs(self.example, self.model).run(self.model)

    def _attributes_before(self, cut: Cut) -> dict[str, set[str]]:
        """The attributes that calls before a cut set on their modules, by path."""
        attributes: dict[str, set[str]] = {}
        if self._analysis.mutates_attributes:
            for level in self._crossings([cut], [()])[0].levels:
                for call in (inner for skipped in level.skipped for inner in self._analysis.trace.below(skipped)):
                    names = self._analysis.call_structures[call.index].mutated_attributes
                    attributes.setdefault(call.path, set()).update(names)
        return attributes


def _detach(output: Any, requests: int) -> Any:
    """Copy an output where later requests may write to it."""
    return output if requests == 1 else map_tensors(lambda tensor: tensor.detach().clone(), output)


def _magnitude(difference: Difference) -> float:
    return float("inf") if difference.largest is None else difference.largest


def _choose_cuts(cuts: Cuts, at: Any) -> list[Cut]:
    """The cuts that a user names, in the order in which they are run."""
    planned = getattr(at, "at", at) if not isinstance(at, Cut | nn.Module) else at
    if planned is None and at is not None:
        raise BadQuery("the plan does not cut the model: it runs best in one place")
    names = [planned] if isinstance(planned, str | Cut) or not isinstance(planned, Iterable) else list(planned)
    if not names or not all(isinstance(name, str | Cut) for name in names):
        raise BadQuery(
            f"expected where to cut: an address such as 'layer2.0.conv1', several, or a plan of mt.plan; got {at!r:.80}"
        )
    if "auto" in names:
        raise BadQuery("at='auto' needs to know the devices and the link: give a plan, plan=mt.plan(mt.cuts(…), …)")
    if "" in names:
        raise BadQuery("the exit of the model itself is no cut: nothing would be left for the tail")
    addresses = (name.at if isinstance(name, Cut) else str(name) for name in names)
    chosen = sorted((cuts[address] for address in addresses), key=lambda cut: cut.index)
    for cut, other in pairwise(chosen):
        if cut is other:
            raise BadQuery(f"the cut at {cut.at!r} is named twice")
    return chosen


def _stage_index(load: str | int, count: int) -> int:
    """The index of the stage that a user names."""
    index = {"head": 0, "tail": count - 1}.get(load, load) if isinstance(load, str) else load
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise BadQuery(f"expected load='head', 'tail' or the index of one of {count} stages, got {load!r}")
    return index


def load_stages(model: nn.Module, inputs: Any, at: Sequence[str], fingerprint: str, locations: Any) -> list[Stage]:
    """The stages of a model that was split and saved in another process, and whose weights may not be here."""
    splitter = Splitter(model, inputs, fingerprint)
    # Older files leave out the `#0` of the first of several calls.
    chosen = [splitter.cuts[address if "#" in address else f"{address}#0"] for address in at]
    return splitter.stages(chosen, splitter.import_locations(locations))
