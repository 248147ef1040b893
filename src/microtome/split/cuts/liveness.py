"""Liveness analysis: the values that cross a cut.

The tail runs the model's code from the start, but skips the calls that return before the cut. The values that the head
must send follow from the trace in four steps:

1. *Alias analysis.* Values that share storage lie in one memory. A write to one of them changes all, so that needs are
   tracked by memory.
2. *Liveness* (this file). Walk the operators backwards from the output of the model: an operator that computes a live
   value makes its inputs live, and the operator that allocates a memory ends its life. One walk serves all cuts.
3. *Backward slicing* (`BackwardSlice`). From the values live at the cut, walk back over the code that the tail runs
   before it. Glue, the operators in the enclosing calls, is replayed: the need moves on to their inputs. A skipped call
   ends the walk: the head sends what that call returned, or wrote to its arguments. So do inputs of the model.
4. *Conflicts.* Glue that nobody needs is replayed on placeholders. Where that would overwrite a needed memory, the
   operator is forced to be needed as well, and the slice is computed again, until there is no conflict.

A cut is refused where a needed value is neither returned nor an argument of the skipped call that computed it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from functools import cached_property

from microtome.results.trace import Op, Read, TracedCall
from microtome.split.analysis.analysis import Analysis
from microtome.split.cuts.backward_slice import BackwardSlice, Needs
from microtome.split.cuts.crossing import Crossing, Level, ValueLocation
from microtome.split.execution.placeholder import MASKS, SHAPE_ONLY, operator_named, reads_values

_INDEX = "aten.index.Tensor"


class Liveness:
    """The values that are live at each cut of one run.

    Args:
        joins: Send values that share memory as that memory where it is smaller: gradients cannot cross this way.

    Attributes:
        memory_of: The memory of each value.
    """

    def __init__(self, analysis: Analysis, *, joins: bool = True) -> None:
        self.analysis = analysis
        self._joins = joins
        self._trace = analysis.trace
        self.memory_of = analysis.memory_of
        # Both sides have the weights, but a tail that skips a call does not have what that call returned of them.
        self._weights = {value.memory for value in analysis.trace.values if value.origin in ("parameter", "buffer")}
        self._weights -= analysis.memories(value for call in analysis.trace.calls for value in call.outputs)
        self._reads: dict[int, list[Read]] = defaultdict(list)
        for read in analysis.trace.reads:
            self._reads[read.op].append(read)
        self._live: dict[frozenset[int], list[Needs]] = {}
        self._children: dict[int, tuple[TracedCall, ...]] = {}
        self._effects: dict[int, list[int]] = {}

    @property
    def has_reads(self) -> bool:
        """Whether Python code reads values of tensors."""
        return bool(self._reads)

    def crossing(self, cut: TracedCall, extra: Iterable[ValueLocation] = ()) -> Crossing:
        """Compute what crosses at the exit of this call.

        Args:
            extra: Values that cross as well, since a run was found to read them.
        """
        crossing = Crossing(cut, self._levels(cut))
        carried = self.analysis.state.left_by_tail(crossing, self._trace.calls)
        if carried not in self._live:
            self._live[carried] = self._compute_live(carried)
        forced: set[int] = set()
        while True:
            backward = BackwardSlice(self, crossing, forced)
            backward.run(dict(self._live[carried][cut.ends]))
            if not backward.conflicts:
                break
            forced |= backward.conflicts
        crossing.refused = backward.refused
        crossing.values = backward.sources
        crossing.views = backward.views
        for location in extra:
            crossing.values.setdefault(location, self._values_at(location)[location.position])
        for location, value in crossing.values.items():
            memory = self.memory_of[value]
            located = 0 if location.call is None else self._trace.calls[location.call].ends
            located = located if location.draw is None else location.draw + 1
            if self.analysis.writes(memory, located, cut.ends):
                crossing.copied.add(location)  # the tail replays the writes of the head
            if self.analysis.writes(memory, located) or memory in backward.glue_writes:
                crossing.written.add(location)
        self._join_memories(crossing)
        return crossing

    def _levels(self, cut: TracedCall) -> tuple[Level, ...]:
        calls = self._trace.calls
        levels: list[Level] = []
        inner, onward = cut, None
        while inner.parent is not None:
            parent = calls[inner.parent]
            end = bisect_left(parent.children, inner.index) + (not levels)  # the cut itself is skipped
            levels.append(Level(parent, self._children_of(parent)[:end], onward))
            onward, inner = parent, parent
        return tuple(reversed(levels))

    def _children_of(self, call: TracedCall) -> tuple[TracedCall, ...]:
        if call.index not in self._children:
            self._children[call.index] = tuple(self._trace.calls[child] for child in call.children)
        return self._children[call.index]

    def effects_of(self, call: TracedCall) -> list[int]:
        """The operators in the code of a call that matter also where nobody needs what they compute."""
        if call.index not in self._effects:
            ops = [self._trace.ops[index] for index in call.ops]
            self._effects[call.index] = [op.index for op in ops if self._has_effect(op)]
        return self._effects[call.index]

    def _has_effect(self, op: Op) -> bool:
        """Whether an operator writes, draws, reads values, or has no outputs, as an assertion."""
        return bool(op.mutates or not op.outputs or op.index in self.analysis.draws or self.value_reads(op))

    def _values_at(self, location: ValueLocation) -> tuple[int, ...]:
        """The values that a position of this location indexes."""
        if location.draw is not None:
            return self._trace.ops[location.draw].outputs
        call = self._trace.calls[location.call or 0]
        return call.inputs if location.call is None or location.is_argument else call.outputs

    def _join_memories(self, crossing: Crossing) -> None:
        """Send memories as a whole where the tail writes to them, or where that is smaller than their values."""
        memories = {self.memory_of[value] for value in crossing.values.values()}
        if len(memories) == len(crossing.values) and not crossing.views:  # no two share one, as nearly always
            return
        values, sharing = self._trace.values, defaultdict[int, set[int]](set)
        for location, value in crossing.values.items():
            if location not in crossing.copied:
                sharing[self.memory_of[value]].add(value)
        written = {self.memory_of[crossing.values[location]] for location in crossing.written}
        viewed = {self.memory_of[self._values_at(location)[location.position]] for location in crossing.views}
        for memory, members in sharing.items():
            if len(members) == 1 and memory not in viewed:  # a view needs the layout of its base
                continue
            has_one_dtype = len({values[value].dtype for value in members}) == 1
            if memory in written and not has_one_dtype:
                crossing.refused = "the tail writes to a value that crosses, and that it also reads as another dtype"
            is_smaller = self._joins and self._trace.memories[memory].nbytes <= sum(
                values[value].nbytes for value in members
            )
            if has_one_dtype and (is_smaller or memory in written or memory in viewed):
                crossing.joined.add(memory)

    # -- liveness ------------------------------------------------------------------------------------------------------

    def _compute_live(self, carried: frozenset[int]) -> list[Needs]:
        """Compute what is live before each operator, and at the end.

        Args:
            carried: The values that the tail leaves to the next run.
        """
        needs: Needs = {}
        for value in (*self._trace.calls[0].outputs, *self.analysis.opaque_output_values, *carried):
            self.add_need(needs, value)
        live = [dict(needs)]
        for op in reversed(self._trace.ops):
            for read in self._reads.get(op.index + 1, ()):
                self.add_need(needs, read.value)
            # Operators after the cut that write without need are rare, and simply run.
            self.step_back(op, needs, forced=bool(op.mutates))
            live.append(dict(needs))
        return live[::-1]

    def step_back(self, op: Op, needs: Needs, *, forced: bool) -> bool:
        """Change needs after an operator to those before it; return whether it has to compute something."""
        memory_of, allocated_by = self.memory_of, self.analysis.allocated_by
        certainties = [any(needs[memory_of[value]].values()) for value in op.mutates if memory_of[value] in needs]
        for value in op.outputs:
            members = needs.get(memory_of[value], {})
            if value in members or (members and allocated_by.get(memory_of[value]) == op.index):
                certainties.append(members.get(value, any(members.values())))
        forced = forced or (not op.outputs and not op.mutates)  # such as an assertion
        if not forced and not certainties:
            reads = self.value_reads(op)
            for value in reads:
                self.add_need(needs, value)
            return bool(reads)
        for value in op.outputs:
            memory = memory_of[value]
            if allocated_by.get(memory) == op.index:
                needs.pop(memory, None)
            elif memory in needs:  # a view: its base is needed
                members = {other: is_certain for other, is_certain in needs[memory].items() if other != value}
                if self.existed_before(value, op.index) and value not in op.mutates:
                    members[value] = False
                needs[memory] = members
                if not members:
                    del needs[memory]
        if op.name not in SHAPE_ONLY:
            for value in op.inputs:
                self.add_need(needs, value, is_certain=forced or any(certainties))
        return True

    def add_need(self, needs: Needs, value: int, *, is_certain: bool = True) -> None:
        """Add a value to the needs, unless both sides have it."""
        memory = self.memory_of[value]
        if memory not in self._weights:
            members = needs.get(memory, {})
            if value not in members or (is_certain and not members[value]):
                needs[memory] = {**members, value: is_certain}

    def existed_before(self, value: int, op: int) -> bool:
        """Whether a value existed before this operator, so that others than its caller may refer to it."""
        producer = self._trace.values[value].producer
        return producer is None or producer < op

    def value_reads(self, op: Op) -> Sequence[int]:
        """The inputs whose values an operator reads even where nobody needs its outputs, such as a mask."""
        if op.name == _INDEX:
            indices = op.inputs[1:] or op.inputs  # or a mask that is indexed by itself
            return [value for value in indices if self._trace.values[value].dtype in MASKS]
        func = operator_named(op.name)
        return op.inputs if func is not None and reads_values(func) else ()

    # -- what the backward slice asks ----------------------------------------------------------------------------------

    def reads_until(self, cut: TracedCall, skipped: Container[int]) -> list[Read]:
        """The reads of Python code before a cut, or right after it, outside skipped calls."""
        reads = (read for op, reads in self._reads.items() if op <= cut.ends for read in reads)
        return [read for read in reads if not self._is_inside(read.call, skipped)]

    def _is_inside(self, call: int | None, calls: Container[int]) -> bool:
        while call is not None:
            if call in calls:
                return True
            call = self._trace.calls[call].parent
        return False

    @cached_property
    def alias_sources(self) -> dict[int, tuple[list[int], list[int]]]:
        """For each memory, the operators and the calls that create one more tensor in it; -1: among the inputs."""
        memory_of, allocated_by = self.memory_of, self.analysis.allocated_by
        sources: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for memory, count in Counter(memory_of[value] for value in self._trace.calls[0].inputs).items():
            if count > 1:
                sources[memory][1].append(-1)
        for op in self._trace.ops:
            for value in op.outputs:
                if allocated_by.get(memory_of[value]) != op.index and value not in op.mutates:
                    sources[memory_of[value]][0].append(op.index)
        for call in self._trace.calls:
            aliases = self.analysis.call_structures[call.index].output_aliases
            new = (value for value, alias in zip(call.outputs, aliases, strict=True) if alias is None)
            for memory, count in Counter(memory_of[value] for value in new).items():
                if count > (call.begins <= allocated_by.get(memory, -1) < call.ends):
                    sources[memory][1].append(call.index)
        return sources
