"""The way through a model to a cut, and how a run is held to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from microtome.engine import Call
from microtome.errors import Unsupported
from microtome.results.trace import TracedCall
from microtome.split.analysis import Analysis
from microtome.split.crossing import Crossing, ValueLocation
from microtome.split.cuts import location_name
from microtome.split.signature import Arguments, Flow, describe
from microtome.split.size_bounds import Volume, volume_of
from microtome.split.structure_spec import StructureSpec


@dataclass(frozen=True, eq=False)
class SentValue:
    """A value that crosses.

    Attributes:
        name: Under which it is sent.
        copied: Whether the head writes into it after it was found.
        joined: Whether the memory that it lies in crosses as a whole.
    """

    name: str
    copied: bool
    joined: bool


@dataclass(frozen=True, eq=False)
class SkippedCall:
    """A call that ends before the cut and is left out in the tail, with all inside it.

    Attributes:
        call: Which call it was on the example.
        depth: How many calls contain it.
        called: Its arguments on the example.
        flow: How these were computed, if its module runs several times in the call around it.
        taken: Of each place of a tensor in its arguments, which of the different tensors it had there on the example.
        given: The same of what it returns. All other attributes speak of places, too, not of different tensors: whether
            two are one tensor may differ from run to run.
        output: The structure of what it returns.
        same: Of each tensor that it returns, which of its arguments it is.
        outputs: Those that cross, by their place in what it returns.
        views: Those that are made again as views of an argument.
        arguments: Arguments that it writes into and that cross.
        changes: Which lists and dicts among its arguments it changes.
        writes: Which tensors among its arguments it writes into.
        apart: What it returns that lies in no memory of an argument, where one of the two is written into later.
        shares: The arguments in whose memory something lies that it returns and that crosses by itself, since nobody
            writes there.
        returns: How its outputs were computed.
    """

    call: int
    path: str
    address: str
    depth: int
    called: Arguments | None
    flow: Flow | None
    taken: tuple[int, ...]
    given: tuple[int, ...]
    output: StructureSpec
    same: tuple[int | None, ...]
    outputs: dict[int, SentValue]
    views: dict[int, int]
    arguments: dict[int, SentValue]
    changes: tuple[int, ...]
    writes: frozenset[int]
    apart: frozenset[int]
    shares: frozenset[int]
    returns: Flow

    @cached_property
    def key(self) -> str:
        """The module that it runs, and the structure of what that returns."""
        return f"{self.depth}|{self.path}|{self.output.text}"

    @cached_property
    def uses_arguments(self) -> bool:
        """Whether what it returns depends on the very tensors it is given."""
        used = self.arguments or self.views or self.changes or self.shares
        return bool(used) or any(at is not None for at in self.same)


@dataclass(frozen=True, eq=False)
class EnclosingCall:
    """A call that contains the cut, and that both sides run; the attributes are those of a `SkippedCall`."""

    path: str
    address: str
    depth: int
    flow: Flow | None

    @cached_property
    def key(self) -> str:
        return f"{self.depth}|{self.path}"


@dataclass(frozen=True, eq=False)
class SkippedDraw:
    """An operator that draws random numbers before the cut, in code that both sides run: the tail does not draw again.

    Attributes:
        op: Which operator it was on the example.
        path: Of the module whose code ran it.
        count: How many tensors it returns.
        outputs: Those that cross, by their place in what it returns.
    """

    op: int
    name: str
    path: str
    count: int
    outputs: dict[int, SentValue]


@dataclass(frozen=True, eq=False)
class Schedule:
    """All steps to a cut.

    Attributes:
        at: The address of the cut.
        levels: For each call around the cut, outermost first: the steps inside it, and the next around.
        inputs: What crosses of the model's arguments, by its place among them.
        taken: Of each place of a tensor in these, which of the different tensors it had there on the example.
        written: Where those values are found that the tail writes into.
        draws: What draws random numbers before the cut, between the steps, in order.
        example: The bytes of the example.
    """

    at: str
    levels: tuple[tuple[tuple[SkippedCall, ...], EnclosingCall | None], ...]
    inputs: dict[int, SentValue]
    taken: tuple[int, ...]
    written: frozenset[ValueLocation]
    draws: tuple[SkippedDraw, ...] = ()
    example: Volume | None = None

    @property
    def paths(self) -> list[str]:
        """The modules of all steps and of the calls around them."""
        return list(dict.fromkeys([*self.around, *(step.path for step in self.steps)]))

    @property
    def around(self) -> list[str]:
        """The modules of the calls that contain the cut."""
        return ["", *(onward.path for _, onward in self.levels if onward is not None)]

    @property
    def steps(self) -> Iterable[SkippedCall]:
        return (step for steps, _ in self.levels for step in steps)


def trail_to(analysis: Analysis, crossing: Crossing) -> Schedule:
    """The trail of a cut."""
    names: dict[Any, str] = {}
    values = analysis.trace.values

    def sent(place: ValueLocation) -> SentValue:
        value = crossing.values[place]
        copied = place in crossing.copied
        name = names.setdefault(place if copied else value, location_name(analysis, place))
        return SentValue(name, copied, not copied and values[value].memory in crossing.joined)

    places: dict[int | None, list[ValueLocation]] = {}
    for place in crossing.values:
        places.setdefault(place.call, []).append(place)

    def step(call: TracedCall) -> SkippedCall:
        structure = analysis.call_structures[call.index]
        here = places.get(call.index, [])
        first = {rank: structure.argument_ranks.index(rank) for rank in structure.argument_ranks}
        outputs = {place.position: place for place in here if not place.is_argument}
        arguments = {place.position: place for place in here if place.is_argument}
        views = {place.position: of for place, of in crossing.views.items() if place.call == call.index}
        given, returned = ([values[at].memory for at in listed] for listed in (call.inputs, call.outputs))
        own = {at: memory for at, memory in enumerate(returned) if structure.output_aliases[at] is None}
        later = {memory for memory in (*given, *returned) if analysis.writes(memory, call.ends)}
        sent_apart = {own[place.position] for place in here if not place.is_argument and place.position in own}
        writes = {at for at, memory in enumerate(given) if analysis.writes(memory, call.begins, call.ends)}
        apart = {at for at, memory in own.items() if memory not in given and later & {memory, *given}}
        shares = {at for at, memory in enumerate(given) if memory in sent_apart - later}
        same = (structure.output_aliases[rank] for rank in structure.output_ranks)
        return SkippedCall(
            call.index,
            call.path,
            call.address,
            call.depth,
            structure.arguments,
            analysis.dataflow.arguments(call.index),
            structure.argument_ranks,
            structure.output_ranks,
            structure.output,
            tuple(None if of is None else first[of] for of in same),
            {at: sent(outputs[rank]) for at, rank in enumerate(structure.output_ranks) if rank in outputs},
            {at: first[views[rank]] for at, rank in enumerate(structure.output_ranks) if rank in views},
            {at: sent(arguments[rank]) for at, rank in enumerate(structure.argument_ranks) if rank in arguments},
            structure.mutated_containers,
            _places(structure.argument_ranks, writes),
            _places(structure.output_ranks, apart),
            _places(structure.argument_ranks, shares),
            analysis.dataflow.outputs(call.index),
        )

    def around(call: TracedCall) -> EnclosingCall:
        return EnclosingCall(call.path, call.address, call.depth, analysis.dataflow.arguments(call.index))

    def draw(op: int) -> SkippedDraw:
        traced = analysis.trace.ops[op]
        outputs = {place.position: sent(place) for place in places.get(None, []) if place.draw == op}
        path = analysis.trace.calls[traced.call or 0].path
        return SkippedDraw(op, analysis.draws[op].name, path, len(traced.outputs), outputs)

    crossed = {place.position: sent(place) for place in places.get(None, []) if place.is_input}
    inputs = {at: crossed[rank] for at, rank in enumerate(analysis.input_ranks) if rank in crossed}
    levels = tuple(
        (tuple(map(step, level.skipped)), None if level.onward is None else around(level.onward))
        for level in crossing.levels
    )
    names_written = {sent(place).name for place in crossing.written}
    written = frozenset(place for place in crossing.values if sent(place).name in names_written)
    glue = {op for level in crossing.levels for op in level.call.ops if op < crossing.cut.ends}
    draws = tuple(draw(op) for op in sorted(glue & analysis.draws.keys()))
    example = volume_of(analysis.trace, crossing)
    return Schedule(crossing.cut.address, levels, inputs, analysis.input_ranks, written, draws, example)


def _places(ranks: tuple[int, ...], among: set[int]) -> frozenset[int]:
    return frozenset(at for at, rank in enumerate(ranks) if rank in among)


class ScheduleFollower:
    """Knows, while a model runs, which calls are the steps of a trail: by their place under the call around them.

    Attributes:
        is_there: Whether the cut has been reached.
    """

    def __init__(self, trail: Schedule) -> None:
        self._trail = trail
        self._around: list[Call] = []
        self._left: list[list[SkippedCall]] = []
        self.is_there = False

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SkippedCall | EnclosingCall | None:
        """The step that a call is, or the call around the cut; None: it is the model, inside a step, or later."""
        if self.is_there:
            return None
        if call.parent is None:
            self._go_into(call)
            return None
        if call.parent is not self._around[-1]:
            return None
        onward = self._trail.levels[len(self._around) - 1][1]
        left = self._left[-1]
        expected = left[0] if left else onward
        if expected is None or call.path != expected.path:
            raise Unsupported(
                f"the model takes another way than on the example: {call.path!r} runs where "
                f"{None if expected is None else expected.path!r} did, before the cut at {self._trail.at!r}. Split it "
                "on an example that takes this way"
            )
        if isinstance(expected, EnclosingCall):
            self._go_into(call)
            return expected
        alike = [step for step in left if step.path == call.path]
        if len(alike) > 1:  # as many plain arguments as possible are those of the example
            plain = describe(args, kwargs).plain
            expected = max(alike, key=lambda step: _count_same(step, plain))
        left.remove(expected)
        return expected

    def is_between(self, call: Call | None) -> bool:
        """Whether the code that runs now in a call is between steps, before the cut."""
        return not self.is_there and bool(self._around) and call is self._around[-1]

    def _go_into(self, call: Call) -> None:
        self._left.append(list(self._trail.levels[len(self._around)][0]))
        self._around.append(call)

    def exit(self) -> None:
        """A step ended."""
        if len(self._around) == len(self._trail.levels) and not self._left[-1]:
            self.is_there = True


def _count_same(step: SkippedCall, plain: list[Any]) -> int:
    known = [] if step.called is None else step.called.plain
    return sum(repr(one) == repr(other) for one, other in zip(known, plain, strict=False))
