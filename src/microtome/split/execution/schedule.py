"""The calls that lead to a cut, in order, and checking a run against them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from microtome.engine import Call
from microtome.engine.probes import AnyOp, Where
from microtome.errors import Unsupported
from microtome.results.trace import TracedCall
from microtome.split.analysis.analysis import Analysis
from microtome.split.analysis.randomness import is_random, op_name
from microtome.split.analysis.signature import Arguments, Flow, describe
from microtome.split.analysis.structure_spec import StructureSpec
from microtome.split.boundary.size_bounds import ExampleBytes, example_bytes
from microtome.split.cuts.crossing import Crossing, ValueLocation
from microtome.split.cuts.cuts import location_name
from microtome.split.execution.argument_reader import ArgumentReader
from microtome.split.state.contents import PathGroups, group_paths
from microtome.split.state.snapshot import Path

_T = TypeVar("_T")


class SentValue(NamedTuple):
    """A value that crosses.

    Attributes:
        name: The name of the tensor in the boundary.
        is_copied: Whether it is copied when it is located, since the head writes to it later.
        is_storage: Whether its whole storage crosses, since other values that cross share it.
    """

    name: str
    is_copied: bool
    is_storage: bool


@dataclass(frozen=True, eq=False)
class SkippedCall:
    """A call that returns before the cut: the tail skips it, with all calls inside it.

    Tensors are identified by their occurrence among the arguments or outputs, not by which distinct tensor they are:
    whether two occurrences are one tensor may differ from run to run.

    Attributes:
        call: The index of the call in the trace.
        depth: The number of calls that enclose it.
        example_arguments: Its arguments on the example.
        flow: How its arguments were computed, if its module runs several times in the enclosing call.
        argument_ranks: For each tensor among its arguments, its rank among the distinct ones of the example.
        output_ranks: The same for its outputs.
        output: The structure of its output.
        aliased_arguments: For each output, the argument that it is; None: it is none of them.
        sent_outputs: The outputs that cross.
        argument_views: The outputs that the tail makes again as views of an argument, and that argument.
        sent_arguments: The arguments that it writes to and that cross.
        mutated_containers: The lists and dicts among its arguments that it mutates.
        mutated_arguments: The arguments that it writes to.
        unaliased_outputs: The outputs that share no memory with an argument, if one of the two is written to later.
        shared_arguments: The arguments that share memory with an output which crosses by itself, since neither is
            written to later.
        output_flow: How its outputs were computed.
        state_paths: The parts that it changes of each state object among its arguments.
    """

    call: int
    path: str
    address: str
    depth: int
    example_arguments: Arguments | None
    flow: Flow | None
    argument_ranks: tuple[int, ...]
    output_ranks: tuple[int, ...]
    output: StructureSpec
    aliased_arguments: tuple[int | None, ...]
    sent_outputs: dict[int, SentValue]
    argument_views: dict[int, int]
    sent_arguments: dict[int, SentValue]
    mutated_containers: tuple[int, ...]
    mutated_arguments: frozenset[int]
    unaliased_outputs: frozenset[int]
    shared_arguments: frozenset[int]
    output_flow: Flow
    state_paths: tuple[tuple[Path, ...], ...]

    @cached_property
    def key(self) -> str:
        """The module, and the structure of its output."""
        return f"{self.depth}|{self.path}|{self.output.text}"

    @cached_property
    def state_path_groups(self) -> tuple[PathGroups, ...]:
        """The parts that it changes of each state object, by their holders."""
        return tuple(map(group_paths, self.state_paths))

    @cached_property
    def has_new_outputs(self) -> bool:
        """Whether no output crosses, and none is an argument or a view of one."""
        is_aliased = any(index is not None for index in self.aliased_arguments) or bool(self.argument_views)
        return not (is_aliased or self.sent_outputs or self.unaliased_outputs)

    @cached_property
    def output_locations(self) -> tuple[ValueLocation, ...]:
        """Where each output is located in a run."""
        return tuple(ValueLocation(self.call, rank) for rank in self.output_ranks)

    @cached_property
    def reader(self) -> ArgumentReader:
        """Reads its arguments."""
        return ArgumentReader(self.key, in_order=self.uses_arguments)

    @cached_property
    def uses_arguments(self) -> bool:
        """Whether replaying it needs the tensors that it is called with."""
        used = self.sent_arguments or self.argument_views or self.mutated_containers or self.shared_arguments
        return bool(used) or any(index is not None for index in self.aliased_arguments)


@dataclass(frozen=True, eq=False)
class EnclosingCall:
    """A call that contains the cut, and that both sides run; its attributes are those of a `SkippedCall`."""

    path: str
    address: str
    depth: int
    flow: Flow | None

    @cached_property
    def key(self) -> str:
        return f"{self.depth}|{self.path}"

    @cached_property
    def reader(self) -> ArgumentReader:
        return ArgumentReader(self.key, in_order=False)


@dataclass(frozen=True, eq=False)
class SkippedDraw:
    """A random operator before the cut, in code that both sides run: the tail does not draw again.

    Attributes:
        op: The index of the operator in the trace.
        path: The module whose code calls it.
        num_outputs: The number of tensors that it returns.
        sent_outputs: The outputs that cross.
    """

    op: int
    name: str
    path: str
    num_outputs: int
    sent_outputs: dict[int, SentValue]

    def __str__(self) -> str:
        return f"{self.name} in {self.path or 'the model'!r}"


class ScheduleLevel(NamedTuple):
    """The calls skipped right inside an enclosing call, and the next enclosing call; None: this is the innermost."""

    skipped: tuple[SkippedCall, ...]
    onward: EnclosingCall | None


@dataclass(frozen=True, eq=False)
class Schedule:
    """All that happens before a cut.

    Attributes:
        at: The address of the cut.
        levels: A level for each call that encloses the cut, from the outermost inwards.
        sent_inputs: The inputs of the model that cross.
        input_ranks: For each tensor among the inputs, its rank among the distinct ones of the example.
        written: The locations of the values that the tail writes to.
        draws: The random operators between the calls, in order.
        example: The bytes of the example.
        glue_state_paths: The parts of state objects that code between calls changes: both sides run it.
    """

    at: str
    levels: tuple[ScheduleLevel, ...]
    sent_inputs: dict[int, SentValue]
    input_ranks: tuple[int, ...]
    written: frozenset[ValueLocation]
    draws: tuple[SkippedDraw, ...]
    example: ExampleBytes
    glue_state_paths: frozenset[Path]

    @property
    def skipped(self) -> Iterator[SkippedCall]:
        return (call for level in self.levels for call in level.skipped)

    @cached_property
    def num_skipped(self) -> int:
        return len(list(self.skipped))

    @cached_property
    def repeated_paths(self) -> frozenset[str]:
        """The modules that are called several times in one of the calls that enclose the cut."""
        counts = (Counter(call.path for call in level.skipped) for level in self.levels)
        return frozenset(path for count in counts for path, number in count.items() if number > 1)

    @property
    def enclosing_paths(self) -> list[str]:
        """The modules of the calls that enclose the cut."""
        return ["", *(level.onward.path for level in self.levels if level.onward is not None)]

    @property
    def paths(self) -> list[str]:
        """The modules of all calls, skipped and enclosing."""
        return list(dict.fromkeys([*self.enclosing_paths, *(call.path for call in self.skipped)]))


def build_schedule(analysis: Analysis, crossing: Crossing) -> Schedule:
    """List the calls that lead to a cut, and what crosses of each."""
    return _Builder(analysis, crossing).schedule()


class _Builder:
    def __init__(self, analysis: Analysis, crossing: Crossing) -> None:
        self._analysis = analysis
        self._crossing = crossing
        self._names: dict[Any, str] = {}
        self._locations: dict[int | None, list[ValueLocation]] = {}
        for location in crossing.values:
            self._locations.setdefault(location.call, []).append(location)

    def schedule(self) -> Schedule:
        analysis, crossing = self._analysis, self._crossing
        levels = tuple(
            ScheduleLevel(tuple(map(self._skipped, level.skipped)), self._enclosing(level.onward))
            for level in crossing.levels
        )
        inputs = {where.position: self._sent(where) for where in self._locations.get(None, []) if where.is_input}
        written_names = {self._sent(location).name for location in crossing.written}
        replayed = {op for level in crossing.levels for op in level.call.ops if op < crossing.cut.ends}
        return Schedule(
            at=crossing.cut.address,
            levels=levels,
            sent_inputs=_by_occurrence(analysis.input_ranks, inputs),
            input_ranks=analysis.input_ranks,
            written=frozenset(where for where in crossing.values if self._sent(where).name in written_names),
            draws=tuple(map(self._draw, sorted(replayed & analysis.draws.keys()))),
            example=example_bytes(analysis.trace, crossing),
            glue_state_paths=self._glue_state_paths(),
        )

    def _glue_state_paths(self) -> frozenset[Path]:
        enclosing = {level.call.index for level in self._crossing.levels}
        structures = self._analysis.call_structures
        others = (one for index, one in enumerate(structures) if index not in enclosing)
        called = {path for one in others for paths in one.state_paths for path in paths}
        return frozenset(path for paths in structures[0].state_paths for path in paths) - called

    def _sent(self, location: ValueLocation) -> SentValue:
        value = self._crossing.values[location]
        is_copied = location in self._crossing.copied
        name = self._names.setdefault(location if is_copied else value, location_name(self._analysis, location))
        is_storage = not is_copied and self._analysis.trace.values[value].memory in self._crossing.joined
        return SentValue(name, is_copied, is_storage)

    def _skipped(self, call: TracedCall) -> SkippedCall:
        analysis, values = self._analysis, self._analysis.trace.values
        structure = analysis.call_structures[call.index]
        argument_ranks, output_ranks = structure.argument_ranks, structure.output_ranks
        first = {rank: argument_ranks.index(rank) for rank in argument_ranks}
        locations = self._locations.get(call.index, [])
        outputs = {where.position: self._sent(where) for where in locations if not where.is_argument}
        arguments = {where.position: self._sent(where) for where in locations if where.is_argument}
        crossing_views = self._crossing.views.items()
        views = {where.position: first[argument] for where, argument in crossing_views if where.call == call.index}
        # By rank: the memory of arguments, of outputs, and of outputs that are no arguments.
        inputs, returned = ([values[index].memory for index in indices] for indices in (call.inputs, call.outputs))
        own = {rank: memory for rank, memory in enumerate(returned) if structure.output_aliases[rank] is None}
        later = {memory for memory in (*inputs, *returned) if analysis.writes(memory, call.ends)}
        sent_memories = {memory for rank, memory in own.items() if rank in outputs}
        aliases = (structure.output_aliases[rank] for rank in output_ranks)
        return SkippedCall(
            call=call.index,
            path=call.path,
            address=call.address,
            depth=call.depth,
            example_arguments=structure.arguments,
            flow=analysis.dataflow.arguments(call.index),
            argument_ranks=argument_ranks,
            output_ranks=output_ranks,
            output=structure.output,
            aliased_arguments=tuple(None if rank is None else first[rank] for rank in aliases),
            sent_outputs=_by_occurrence(output_ranks, outputs),
            argument_views=_by_occurrence(output_ranks, views),
            sent_arguments=_by_occurrence(argument_ranks, arguments),
            mutated_containers=structure.mutated_containers,
            mutated_arguments=_occurrences(
                argument_ranks,
                [rank for rank, memory in enumerate(inputs) if analysis.writes(memory, call.begins, call.ends)],
            ),
            unaliased_outputs=_occurrences(
                output_ranks,
                [rank for rank, memory in own.items() if memory not in inputs and later & {memory, *inputs}],
            ),
            shared_arguments=_occurrences(
                argument_ranks, [rank for rank, memory in enumerate(inputs) if memory in sent_memories - later]
            ),
            output_flow=analysis.dataflow.outputs(call.index),
            state_paths=structure.state_paths,
        )

    def _enclosing(self, call: TracedCall | None) -> EnclosingCall | None:
        if call is None:
            return None
        return EnclosingCall(call.path, call.address, call.depth, self._analysis.dataflow.arguments(call.index))

    def _draw(self, op: int) -> SkippedDraw:
        trace = self._analysis.trace
        outputs = {where.position: self._sent(where) for where in self._locations.get(None, []) if where.draw == op}
        path = trace.calls[trace.ops[op].call or 0].path
        return SkippedDraw(op, self._analysis.draws[op].name, path, len(trace.ops[op].outputs), outputs)


def _by_occurrence(ranks: tuple[int, ...], by_rank: dict[int, _T]) -> dict[int, _T]:
    return {index: by_rank[rank] for index, rank in enumerate(ranks) if rank in by_rank}


def _occurrences(ranks: tuple[int, ...], chosen: Iterable[int]) -> frozenset[int]:
    return frozenset(index for index, rank in enumerate(ranks) if rank in chosen)


class ScheduleFollower:
    """Matches the calls and random operators of a run with those of a schedule, by the call that encloses them.

    Attributes:
        is_complete: Whether the cut has been reached.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._enclosing: list[Call] = []
        self._remaining: list[list[SkippedCall]] = []
        self._num_draws = 0
        self.is_complete = False

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SkippedCall | EnclosingCall | None:
        """The call of the schedule that begins; None: the model itself, inside a skipped call, or after the cut."""
        if self.is_complete:
            return None
        if call.parent is None:
            self._descend(call)
            return None
        if call.parent is not self._enclosing[-1]:
            return None
        path, remaining = call.path, self._remaining[-1]
        expected = remaining[0] if remaining else self._schedule.levels[len(self._enclosing) - 1].onward
        if expected is None or path != expected.path:
            raise self._differs("no further call" if expected is None else repr(expected.path), repr(path))
        if isinstance(expected, EnclosingCall):
            self._descend(call)
            return expected
        if path in self._schedule.repeated_paths:
            candidates = [skipped for skipped in remaining if skipped.path == path]
            if len(candidates) > 1:  # by their plain arguments: the order may differ from the example
                plain = describe(args, kwargs).plain
                expected = max(candidates, key=lambda candidate: _count_equal(candidate, plain))
        remaining.remove(expected)
        return expected

    def exit(self) -> None:
        """Note that a skipped call ended."""
        if len(self._enclosing) == len(self._schedule.levels) and not self._remaining[-1]:
            self.is_complete = True

    def match_draw(
        self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, SkippedDraw] | None:
        """The number and the draw of the schedule that an operator is; None: it is none, or not before the cut."""
        is_between_calls = bool(self._enclosing) and where.call is self._enclosing[-1] and not self.is_complete
        if where.phase != "forward" or not is_between_calls or not is_random(func, args, kwargs):
            return None
        number, draws = self._num_draws, self._schedule.draws
        path = "" if where.call is None else where.call.path
        expected = draws[number] if number < len(draws) else None
        if expected is None or (expected.name, expected.path) != (op_name(func), path):
            raise self._differs(str(expected or "no further draw"), f"{op_name(func)} in {path or 'the model'!r}")
        self._num_draws += 1
        return number, expected

    def check_draws(self) -> None:
        """Raise if the run drew less often before the cut than the example."""
        if self._num_draws != len(self._schedule.draws):
            raise self._differs(f"{len(self._schedule.draws)} draws of random numbers", str(self._num_draws))

    def _descend(self, call: Call) -> None:
        self._remaining.append(list(self._schedule.levels[len(self._enclosing)].skipped))
        self._enclosing.append(call)

    def _differs(self, expected: str, got: str) -> Unsupported:
        return differs_from_example(f"expected {expected} before the cut at {self._schedule.at!r}, got {got}")


def differs_from_example(difference: str) -> Unsupported:
    """The error of a run that the schedule does not describe."""
    return Unsupported(
        f"the run differs from the example: {difference}. Split the model on an example that does the same"
    )


def _count_equal(call: SkippedCall, plain: list[Any]) -> int:
    expected = [] if call.example_arguments is None else call.example_arguments.plain
    return sum(repr(one) == repr(other) for one, other in zip(expected, plain, strict=False))
