"""Cutting a model into stages that give together what it gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

from torch import Tensor, nn

from microtome.engine.meta_run import SUBSTITUTION_LOCK, copy_inputs
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.selectors import check_model
from microtome.engine.snapshot import Snapshot, restore_afterwards
from microtome.errors import BadQuery, Unsupported
from microtome.files.reading import File
from microtome.inputs import Inputs, device_of
from microtome.results.cuts import Cut, Cuts
from microtome.split.analysis import Analysis, analyze
from microtome.split.boundary import Boundary
from microtome.split.checkpoint import save_stages
from microtome.split.codecs import is_lossless
from microtome.split.comparison import Difference, differences
from microtome.split.crossing import Crossing, ValueLocation
from microtome.split.cut_selection import choose_cuts, stage_index
from microtome.split.cuts import list_cuts
from microtome.split.liveness import Liveness
from microtome.split.placeholder import PlaceholderRead
from microtome.split.random_ops import save_random_state
from microtome.split.schedule import trail_to
from microtome.split.stage import Stage
from microtome.split.structure_spec import Example, ModelSpec, TensorSpec, flatten
from microtome.split.verification import hide_attributes, refuse_errors
from microtome.split.weights import digest_of, stripped, structure_of, weights_of

BIT_EQUAL = "bit-equal"

#: How often a model that keeps state is run to be verified.
_REQUESTS = 3

_NO_LIMIT = 1 << 62  # the example is the user's own


class CodecTrial(NamedTuple):
    """The effect of a codec on the example: bytes that cross, and the change of the model's output.

    Attributes:
        nbytes: What was sent, over all cuts.
        raw_nbytes: What it is without a codec.
        largest: The largest absolute difference in the output.
        relative: The same over the largest absolute number in the output.
    """

    codec: str
    nbytes: int
    raw_nbytes: int
    largest: float
    relative: float


class Stages(Sequence[Stage]):
    """The stages of a split model, in order.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> head, tail = mt.split(model, x, at="layer1.0.conv1")
    >>> boundary = head(x)
    >>> list(boundary.tensors)
    ['stem', 'layer1.0.conv1']
    >>> tail(boundary).equal(model(x))
    True

    Attributes:
        cuts: All cuts of the model.
        at: The addresses of those where it is cut.
        fingerprint: Of the model's structure and weights.
        verified: `"bit-equal"`: the stages gave on the example what the model gave, to the last bit. Else the largest
            difference, or why that is not known.
    """

    def __init__(
        self, splitter: Splitter, chosen: Sequence[Cut], more: Sequence[set[ValueLocation]], verified: str
    ) -> None:
        self._splitter = splitter
        self._more = more
        self._stages = tuple(splitter.stages(chosen, more))
        self.cuts = splitter.cuts
        self.at = tuple(cut.at for cut in chosen)
        self.fingerprint = splitter.fingerprint
        self.verified = verified

    def __len__(self) -> int:
        return len(self._stages)

    @overload
    def __getitem__(self, at: int) -> Stage: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Stage, ...]: ...
    def __getitem__(self, at: int | slice) -> Stage | tuple[Stage, ...]:
        return self._stages[at]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages, one after the other."""
        value = self._stages[0](*args, **kwargs)
        for stage in self._stages[1:]:
            value = stage.run((value,), {}, release=True)
        return value

    def try_codec(self, codec: str) -> CodecTrial:
        """Send what crosses on the example through a codec, and see what becomes of the model's output."""
        example = self._splitter.example
        sent = raw = 0
        value = self._stages[0](*example.args, **example.kwargs)
        for stage in self._stages[1:]:
            data = value.to_bytes(codec)
            sent, raw = sent + len(data), raw + value.nbytes
            value = stage(Boundary.from_bytes(data))
        whole = example.run(self._splitter.model)
        found = list(differences(value, whole))
        if any(one.largest is None for one in found):
            raise Unsupported(f"with {codec} the output is another one: {found[0].place} has {found[0].what}")
        largest = max((one.largest or 0.0 for one in found), default=0.0)
        if largest and is_lossless(codec) and self.verified == BIT_EQUAL:
            raise Unsupported(
                f"the output changed by {largest:.3g} with {codec}, which loses nothing: please report it"
            )
        return CodecTrial(codec, sent, raw, largest, largest / (_greatest(whole) or 1.0))

    def keeping(self, index: int) -> Stages:
        """The same stages of a copy of the model that has the weights of one of them alone; the others are on meta."""
        model = stripped(self._splitter.model, self._stages[index].parameters_needed())
        other = copy.copy(self)
        chosen = [self._splitter.cuts[at] for at in self.at]
        other._stages = tuple(self._splitter.stages(chosen, self._more, model))
        return other

    def save(self, folder: File) -> None:
        """Write `stage0.safetensors`, `stage1.safetensors`, … and `plan.json`, which `mt.load_stage` reads."""
        ranks = self._splitter.ranks
        draws: dict[int | None, int] = {op: number for number, op in enumerate(self._splitter.draws)}
        # All that crosses: who loads a stage looks at a model without values, and does not see what its code reads.
        every = self._splitter.places([self._splitter.cuts[at] for at in self.at], self._more)
        more = [
            [
                [ranks.get(place.call), place.position, place.is_argument, draws.get(place.draw)]
                for place in sorted(places, key=str)
            ]
            for places in every
        ]
        save_stages(folder, self._stages, self._splitter.example, self.at, self.fingerprint, more)

    def __repr__(self) -> str:
        name = type(self._stages[0].model).__name__
        return f"<Stages of {name}, cut at {', '.join(map(repr, self.at))}: {self.verified}>"


class Splitter:
    """A model that was looked at once, to be cut anywhere.

    Attributes:
        given: The example.
        cuts: All cuts of the model.
        fingerprint: Of its structure and weights.
    """

    def __init__(self, model: nn.Module, inputs: Any, fingerprint: str | None = None) -> None:
        self.model = check_model(model)
        with SUBSTITUTION_LOCK:
            given = Inputs.of(inputs, device=device_of(model))
            self.example = copy_inputs(given, model)  # whoever gave them may write into them
            self._analysis: Analysis = analyze(model, self.example)
            self._analysis.input_spec = flatten((given.args, given.kwargs), arrays=[])[
                0
            ]  # copies of arrays do not overlap
            digest = digest_of(model) if fingerprint is None else None
        self.cuts: Cuts = list_cuts(model, self._analysis)
        self._liveness = Liveness(self._analysis)
        self.fingerprint = fingerprint or f"{structure_of(self._analysis, model)}-{digest or 'unknown'}"

    @property
    def state(self) -> str | None:
        """A description of the state that the model carries between runs; None: it has none."""
        return self._analysis.carried_state

    @property
    def ranks(self) -> dict[int | None, int]:
        """For the index of each call, its rank in an order that other processes know too."""
        return {call.index: rank for rank, call in enumerate(self._analysis.canonical_order)}

    @property
    def draws(self) -> list[int]:
        """The operators that draw random numbers, as indices."""
        return list(self._analysis.draws)

    @cached_property
    def spec(self) -> ModelSpec:
        analysis, trace = self._analysis, self._analysis.trace
        values, root = trace.values, trace.calls[0]
        taken, returned = (
            tuple(TensorSpec(values[listed[rank]].shape, values[listed[rank]].dtype) for rank in ranks)
            for listed, ranks in (
                (root.inputs, analysis.input_ranks),
                (root.outputs, analysis.call_structures[0].output_ranks),
            )
        )
        plain = flatten((self.example.args, self.example.kwargs))[2]
        is_static = not trace.reads and not any(self._liveness.read_by(op) for op in trace.ops)
        return ModelSpec(
            analysis.input_spec, analysis.call_structures[0].output, Example(taken, plain, returned, is_static)
        )

    def cut(self, where: Any) -> Cut:
        """The one cut that a user names."""
        chosen = choose_cuts(self.cuts, where)
        if len(chosen) > 1:
            raise BadQuery(f"one cut makes two halves, and these are {len(chosen)}: {where!r:.200}")
        return chosen[0]

    def at(self, where: Any, *, verify: bool = True, load: str | int | None = None) -> Stages:
        """See `microtome.split`."""
        chosen = choose_cuts(self.cuts, where)
        kept = None if load is None else stage_index(load, len(chosen) + 1)
        more: list[set[ValueLocation]] = [set() for _ in chosen]
        verified = "not verified: it was not asked for"
        with SUBSTITUTION_LOCK:  # or another thread may have put stand-ins into the model
            if verify and _is_whole(self.model):
                with restore_afterwards(self.model, self._analysis.written_parameters) as before:
                    verified = self._verify(chosen, more, before)
            elif verify:
                verified = "not verified: some of the weights are not here"
        stages = Stages(self, chosen, more, verified)
        return stages if kept is None else stages.keeping(kept)

    def stages(
        self, chosen: Sequence[Cut], more: Sequence[set[ValueLocation]], model: nn.Module | None = None
    ) -> list[Stage]:
        """The stages between these cuts.

        Args:
            more: For each cut, what is to cross beside what the trace tells.
            model: Whose parts they are, if not of the model that was looked at.
        """
        analysis = self._analysis
        crossings: list[Crossing | None] = [None]
        for cut, places in zip(chosen, more, strict=True):
            crossings.append(self._liveness.crossing(analysis.exit_order[cut.index], places))
        crossings.append(None)
        trails = [None if crossing is None else trail_to(analysis, crossing) for crossing in crossings]
        return [
            Stage(
                self.model if model is None else model,
                index,
                trails[index],
                trails[index + 1],
                self.spec,
                weights_of(analysis, crossings[index], crossings[index + 1]),
                self.fingerprint,
                analysis.carried_state,
            )
            for index in range(len(crossings) - 1)
        ]

    def places(self, chosen: Sequence[Cut], more: Sequence[set[ValueLocation]]) -> list[set[ValueLocation]]:
        """Return the locations of all values that cross each of these cuts."""
        ending = self._analysis.exit_order
        pairs = zip(chosen, more, strict=True)
        return [set(self._liveness.crossing(ending[cut.index], places).values) for cut, places in pairs]

    def _verify(self, chosen: Sequence[Cut], more: list[set[ValueLocation]], before: Snapshot) -> str:
        """Compare with the whole model, through bytes; what the model's code turns out to read goes into `more`.

        The whole model and the head draw from the same random state, and the tail from that which the head leaves. A
        model that keeps state is compared over several requests, from the same state.
        """
        tensors = (
            *self.model.parameters(),
            *self.model.buffers(),
            *tensors_in((self.example.args, self.example.kwargs)),
        )
        draw_again = save_random_state(
            {tensor.device for tensor in tensors},
            self._analysis.generators,
            draws=bool(self._analysis.draws),
            packages={draw.package for draw in self._analysis.python_draws},
        )

        def reset() -> None:
            before.restore()
            draw_again()

        try:
            return self._compare(chosen, more, reset)
        finally:
            reset()

    def _compare(self, chosen: Sequence[Cut], more: list[set[ValueLocation]], reset: Callable[[], None]) -> str:
        requests = _REQUESTS if self._analysis.is_stateful else 1
        wholes = [_detached(copy_inputs(self.example, self.model).run(self.model), requests) for _ in range(requests)]
        while True:
            reset()
            stages = self.stages(chosen, more)
            try:
                values = []
                for _ in range(requests):
                    stage = stages[0]
                    value: Any = _run(stage, copy_inputs(self.example, self.model))
                    for stage, cut in zip(stages[1:], chosen, strict=True):
                        sent = Boundary.from_bytes(value.to_bytes(), limit=_NO_LIMIT)
                        with refuse_errors(self.model, cut), hide_attributes(self.model, self._kept_before(cut)):
                            value = stage(sent)
                    values.append(_detached(value, requests))
                break
            except PlaceholderRead as error:  # the model's code looks at values where it has some
                place = error.ghost.source
                if place is None or stage.index == 0 or place in more[stage.index - 1]:
                    raise
                more[stage.index - 1].add(place)
        found = [one for pair in zip(values, wholes, strict=True) for one in differences(*pair)]
        if not found:
            return BIT_EQUAL
        reset()
        again = list(differences(copy_inputs(self.example, self.model).run(self.model), wholes[0]))
        worst = max(found, key=_size)
        if not again or _size(worst) > 10 * max(map(_size, again)):
            where = f" at {worst.place}" if worst.place else ""
            raise Unsupported(
                f"the {type(self.model).__name__} cannot be cut at {', '.join(cut.at for cut in chosen)}: the stages "
                f"give{where} {worst.what}. Something crosses there that is no tensor"
            )
        return f"{worst.what}; two runs of the whole model differ so too"

    def _kept_before(self, cut: Cut) -> dict[str, set[str]]:
        """Return the attributes that calls before a cut set on their modules, by path."""
        analysis, kept = self._analysis, dict[str, set[str]]()
        levels = self._liveness.crossing(analysis.exit_order[cut.index]).levels if analysis.mutates_attributes else ()
        for skipped in (call for level in levels for call in level.skipped):
            for call in analysis.trace.below(skipped):
                kept.setdefault(call.path, set()).update(analysis.call_structures[call.index].mutated_attributes)
        return kept


def _is_whole(model: nn.Module) -> bool:
    return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _run(stage: Stage, given: Inputs) -> Any:
    return stage(*given.args, **given.kwargs)


def _detached(output: Any, requests: int) -> Any:
    """An output that later runs do not write into."""
    return output if requests == 1 else map_tensors(lambda tensor: tensor.detach().clone(), output)


def _size(difference: Difference) -> float:
    return float("inf") if difference.largest is None else difference.largest


def _greatest(output: Any) -> float:
    found = [0.0]

    def look(tensor: Tensor) -> Tensor:
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            found.append(float(tensor.detach().abs().max()))
        return tensor

    map_tensors(look, output)
    return max(found)


def load_stages(model: nn.Module, inputs: Any, at: Sequence[str], fingerprint: str, more: Any) -> list[Stage]:
    """The stages of a model of which not all weights are here."""
    splitter = Splitter(model, inputs, fingerprint)
    calls = {rank: call for call, rank in splitter.ranks.items()}
    places = [
        {
            ValueLocation(
                None if rank is None else calls[rank],
                index,
                bool(is_argument),
                None if draw is None else splitter.draws[draw],
            )
            for rank, index, is_argument, draw in listed
        }
        for listed in more
    ]
    # Older files leave out the `#0` of the first of several calls.
    return splitter.stages([splitter.cuts[one if "#" in one else f"{one}#0"] for one in at], places)
