"""Liveness: the values that a tail needs of its head, found backwards from what the tail reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from functools import cached_property

from microtome.results.trace import Op, Read, TracedCall
from microtome.split.analysis import Analysis
from microtome.split.backward_slice import BackwardSlice, Needs
from microtome.split.crossing import Crossing, Level, ValueLocation
from microtome.split.placeholder import MASKS, SHAPE_ONLY, operator_named, reads_values

_INDEX = "aten.index.Tensor"


class Liveness:
    """The values that are live at each cut of one run."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self._trace = analysis.trace
        self.memory = [value.memory for value in analysis.trace.values]
        # Weights are there on both sides; what a call returned of them is not, where that call is left out.
        self._kept = {value.memory for value in analysis.trace.values if value.origin in ("parameter", "buffer")}
        self._kept -= {self.memory[value] for call in analysis.trace.calls for value in call.outputs}
        self._reads: dict[int, list[Read]] = defaultdict(list)
        for read in analysis.trace.reads:
            self._reads[read.op].append(read)
        self._live: dict[frozenset[int], list[Needs]] = {}

    def crossing(self, cut: TracedCall, more: Iterable[ValueLocation] = ()) -> Crossing:
        """Compute the values that cross at the exit of this call, and those that were found to be needed, too."""
        crossing = Crossing(cut, self._levels(cut))
        left = self.analysis.state.left_by_tail(crossing, self._trace.calls)
        forced: set[int] = set()
        while True:
            walk = BackwardSlice(self, crossing, forced)
            walk.run(dict(self._live_from(left)[cut.ends]))
            if not walk.conflicts:
                break
            forced |= walk.conflicts
        crossing.refused = walk.refused
        crossing.values = walk.found
        crossing.views = walk.views
        for place in more:
            crossing.values.setdefault(place, self._listed(place)[place.position])
        for place, value in crossing.values.items():
            memory = self.memory[value]
            begins = 0 if place.call is None else self._trace.calls[place.call].ends
            begins = begins if place.draw is None else place.draw + 1
            if self.analysis.writes(memory, begins, cut.ends):
                crossing.copied.add(place)  # what a call of the head wrote, the tail writes again
            if self.analysis.writes(memory, begins) or memory in walk.glue_writes:
                crossing.written.add(place)
        self._join(crossing)
        return crossing

    def _listed(self, place: ValueLocation) -> tuple[int, ...]:
        """The values among which one is found at a place."""
        if place.draw is not None:
            return self._trace.ops[place.draw].outputs
        holder = self._trace.calls[place.call or 0]
        return holder.inputs if place.call is None or place.is_argument else holder.outputs

    @cached_property
    def aliases(self) -> dict[int, tuple[list[int], list[int]]]:
        """For each memory, the operators and the calls that have one more tensor lie in it."""
        memory_of, made_by = self.memory, self.analysis.allocated_by
        call_structures = self.analysis.call_structures
        found: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for memory, count in Counter(memory_of[value] for value in self._trace.calls[0].inputs).items():
            if count > 1:
                found[memory][1].append(-1)
        for op in self._trace.ops:
            for at in op.outputs:
                if made_by.get(memory_of[at]) != op.index and at not in op.mutates:
                    found[memory_of[at]][0].append(op.index)
        for call in self._trace.calls:
            own = Counter(
                memory_of[v]
                for at, v in enumerate(call.outputs)
                if call_structures[call.index].output_aliases[at] is None
            )
            for memory, count in own.items():
                if count > (call.begins <= made_by.get(memory, -1) < call.ends):
                    found[memory][1].append(call.index)
        return found

    def _join(self, crossing: Crossing) -> None:
        """Have memories cross as a whole where the tail writes into them, or where that is less than their values."""
        values, shared = self._trace.values, defaultdict[int, set[int]](set)
        for place, value in crossing.values.items():
            if place not in crossing.copied:
                shared[self.memory[value]].add(value)
        written = {self.memory[crossing.values[place]] for place in crossing.written}
        viewed = {self.memory[self._trace.calls[place.call or 0].outputs[place.position]] for place in crossing.views}
        for memory, several in shared.items():
            if len(several) == 1 and memory not in viewed:  # a view is made again of what lies as it lay
                continue
            same = len({values[value].dtype for value in several}) == 1
            if memory in written and not same:
                crossing.refused = "the tail writes into a value that crosses, and that it also reads as another dtype"
            less = self._trace.memories[memory].nbytes <= sum(values[value].nbytes for value in several)
            if same and (less or memory in written or memory in viewed):
                crossing.joined.add(memory)

    def _live_from(self, left: frozenset[int]) -> list[Needs]:
        if left not in self._live:
            self._live[left] = self._walk_back(left)
        return self._live[left]

    def _walk_back(self, left: frozenset[int]) -> list[Needs]:
        """Compute the needs of the operators from each on, of the output, and of the next run."""
        needs: Needs = {}
        for at in (*self._trace.calls[0].outputs, *self.analysis.opaque_output_values, *left):
            self.need(needs, at)
        live = [dict(needs)]
        for op in reversed(self._trace.ops):
            for read in self._reads.get(op.index + 1, ()):
                self.need(needs, read.value)
            # What nobody reads but writes somewhere is rare so late, and runs as it is.
            self.step(op, needs, forced=bool(op.mutates))
            live.append(dict(needs))
        return live[::-1]

    def _levels(self, cut: TracedCall) -> tuple[Level, ...]:
        calls = self._trace.calls
        levels: list[Level] = []
        inner, onward = cut, None
        while inner.parent is not None:
            parent = calls[inner.parent]
            before = [calls[at] for at in parent.children if at < inner.index]
            skipped = tuple(before) if levels else (*before, inner)
            levels.append(Level(parent, skipped, onward))
            onward, inner = parent, parent
        return tuple(reversed(levels))

    def reads_until(self, cut: TracedCall, skipped: Container[int]) -> list[Read]:
        """Return the reads of Python code until a cut, or right after it, in calls that are not skipped."""
        found = (read for at, reads in self._reads.items() if at <= cut.ends for read in reads)
        return [read for read in found if not self._is_inside(read.call, skipped)]

    def _is_inside(self, call: int | None, of: Container[int]) -> bool:
        while call is not None:
            if call in of:
                return True
            call = self._trace.calls[call].parent
        return False

    def value_reads(self, op: Op) -> Sequence[int]:
        """The values that an operator reads even where nobody needs what it makes."""
        values = self._trace.values
        if op.name == _INDEX:
            among = op.inputs[1:] or op.inputs  # or a mask that is indexed by itself
            return [at for at in among if values[at].dtype in MASKS]
        func = operator_named(op.name)
        return op.inputs if func is not None and reads_values(func) else ()

    def need(self, needs: Needs, value: int, surely: bool = True) -> None:
        memory = self.memory[value]
        if memory not in self._kept:
            held = needs.get(memory, {})
            if value not in held or (surely and not held[value]):
                needs[memory] = {**held, value: surely}

    def was_there(self, value: int, when: int) -> bool:
        """Whether a value was seen before this operator: then others may hold it than whom the operator gave it to."""
        producer = self._trace.values[value].producer
        return producer is None or producer < when

    def step(self, op: Op, needs: Needs, *, forced: bool) -> bool:
        """Go back over an operator that the tail runs; return whether anybody needs it."""
        memory, made_by = self.memory, self.analysis.allocated_by
        reasons = [forced or (not op.outputs and not op.mutates)]
        reasons += [any(needs[memory[at]].values()) for at in op.mutates if memory[at] in needs]
        wanted = reasons[0] or len(reasons) > 1
        for at in op.outputs:
            held = needs.get(memory[at])
            if held is not None and (at in held or made_by.get(memory[at]) == op.index):
                reasons.append(held.get(at, any(held.values())))
                wanted = True
        if not wanted:
            for at in (read := self.value_reads(op)):
                self.need(needs, at)
            return bool(read)
        surely = any(reasons)
        for at in op.outputs:
            here = memory[at]
            if made_by.get(here) == op.index:
                needs.pop(here, None)
            elif here in needs:  # a view: what it is of is needed
                left = {other: is_sure for other, is_sure in needs[here].items() if other != at}
                if self.was_there(at, op.index) and at not in op.mutates:
                    left[at] = False
                needs[here] = left
                if not left:
                    del needs[here]
        if op.name not in SHAPE_ONLY:
            for at in op.inputs:
                self.need(needs, at, surely)
        return True
