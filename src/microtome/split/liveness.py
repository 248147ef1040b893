"""What a tail needs of its head: walked back from what the tail reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from microtome.split.ghost import SHAPE_ONLY
from microtome.split.study import Study
from microtome.trace.data import Op, TracedCall

#: Values that are needed, by the memory that they lie in; False: only if somebody still holds an older tensor of it.
Needs = dict[int, dict[int, bool]]


class Place(NamedTuple):
    """Where a value is found in a run of the head.

    Attributes:
        call: The call that returned it, or that wrote into it, as an index; None: it is an input of the model.
        at: Which of the tensors that the call returned or, if `is_argument`, that it was given.
    """

    call: int | None
    at: int
    is_argument: bool = False


@dataclass(frozen=True)
class Level:
    """A call that contains the cut, with those right inside it that ended before the cut.

    Attributes:
        call: The call around, which the tail runs again.
        skipped: Calls inside it that the tail leaves out.
        onward: The call after them, which contains the cut; None: the last of the skipped ones is the cut.
    """

    call: TracedCall
    skipped: tuple[TracedCall, ...]
    onward: TracedCall | None


@dataclass
class Crossing:
    """All that is to be known of one cut.

    Attributes:
        levels: From the model itself to the call that holds the cut.
        values: Where the values are found that cross, and which they are.
        copied: Those that the head writes into afterwards: they are copied when they are found.
        written: Those that the tail writes into: it works on copies.
        joined: The memories that cross as a whole, since several values of them do.
        views: What calls return that is a view of an argument which is written into later: the tail makes it again, of
            the argument at the position given.
        refused: Why there is no exact cut here; None: there is one.
    """

    cut: TracedCall
    levels: tuple[Level, ...]
    values: dict[Place, int] = field(default_factory=dict)
    copied: set[Place] = field(default_factory=set)
    written: set[Place] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    views: dict[Place, int] = field(default_factory=dict)
    refused: str | None = None


class Liveness:
    """What is needed at each cut of one run."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._trace = study.trace
        self.memory = [value.memory for value in study.trace.values]
        # Weights are there on both sides; what a call returned of them is not, where that call is left out.
        self._kept = {value.memory for value in study.trace.values if value.origin in ("parameter", "buffer")}
        self._kept -= {self.memory[value] for call in study.trace.calls for value in call.outputs}
        self._live = self._walk_back()

    def crossing(self, cut: TracedCall, more: Iterable[Place] = ()) -> Crossing:
        """What crosses a cut at the exit of this call, and what was found to be wanted beside that."""
        crossing = Crossing(cut, self._levels(cut))
        forced: set[int] = set()
        while True:
            walk = _Walk(self, crossing, forced)
            walk.run(_copy(self._live[cut.ends]))
            if not walk.conflicts:
                break
            forced |= walk.conflicts
        crossing.refused = walk.refused
        crossing.values = walk.found
        crossing.views = walk.views
        for place in more:
            holder = self._trace.calls[place.call or 0]
            of = holder.inputs if place.call is None or place.is_argument else holder.outputs
            crossing.values.setdefault(place, of[place.at])
        for place, value in walk.found.items():
            memory = self.memory[value]
            begins = 0 if place.call is None else self._trace.calls[place.call].ends
            if self.study.writes(memory, begins, cut.ends):
                crossing.copied.add(place)  # what a call of the head wrote, the tail writes again
            if self.study.writes_after(memory, begins) or memory in walk.glue_writes:
                crossing.written.add(place)
        self._join(crossing)
        return crossing

    @cached_property
    def aliases(self) -> dict[int, tuple[list[int], list[int]]]:
        """For each memory, the operators and the calls that have one more tensor lie in it."""
        memory_of, made_by, shapes = self.memory, self.study.made_by, self.study.shapes
        found: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for memory, count in Counter(memory_of[value] for value in self._trace.calls[0].inputs).items():
            if count > 1:
                found[memory][1].append(-1)
        for op in self._trace.ops:
            for at in op.outputs:
                if made_by.get(memory_of[at]) != op.index and at not in op.mutates:
                    found[memory_of[at]][0].append(op.index)
        for call in self._trace.calls:
            own = Counter(memory_of[v] for at, v in enumerate(call.outputs) if shapes[call.index].same[at] is None)
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
        viewed = {self.memory[self._trace.calls[place.call or 0].outputs[place.at]] for place in crossing.views}
        for memory, several in shared.items():
            if len(several) == 1 and memory not in viewed:  # a view is made again of what lies as it lay
                continue
            same = len({values[value].dtype for value in several}) == 1
            if memory in written and not same:
                crossing.refused = "the tail writes into a value that crosses, and that it also reads as another dtype"
            less = self._trace.memories[memory].nbytes <= sum(values[value].nbytes for value in several)
            if same and (less or memory in written or memory in viewed):
                crossing.joined.add(memory)

    def _walk_back(self) -> list[Needs]:
        """What the operators from each on, and the output, need."""
        needs: Needs = {}
        for at in self._trace.calls[0].outputs:
            self.need(needs, at)
        live = [_copy(needs)]
        for op in reversed(self._trace.ops):
            # What nobody reads but writes somewhere is rare so late, and runs as it is.
            self.step(op, needs, forced=bool(op.mutates))
            live.append(_copy(needs))
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

    def need(self, needs: Needs, value: int, surely: bool = True) -> None:
        memory = self.memory[value]
        if memory not in self._kept:
            values = needs.setdefault(memory, {})
            values[value] = values.get(value, False) or surely

    def was_there(self, value: int, when: int) -> bool:
        """Whether a value was seen before this operator: then others may hold it than whom the operator gave it to."""
        producer = self._trace.values[value].producer
        return producer is None or producer < when

    def step(self, op: Op, needs: Needs, *, forced: bool) -> bool:
        """Go back over an operator that the tail runs; return whether anybody needs it."""
        memory, made_by = self.memory, self.study.made_by
        reasons = [forced or (not op.outputs and not op.mutates)]
        reasons += [any(needs[memory[at]].values()) for at in op.mutates if memory[at] in needs]
        wanted = reasons[0] or len(reasons) > 1
        for at in op.outputs:
            held = needs.get(memory[at])
            if held is not None and (at in held or made_by.get(memory[at]) == op.index):
                reasons.append(held.get(at, any(held.values())))
                wanted = True
        if not wanted:
            return False
        surely = any(reasons)
        for at in op.outputs:
            here = memory[at]
            if made_by.get(here) == op.index:
                needs.pop(here, None)
            elif here in needs:  # a view: what it is of is needed
                needs[here].pop(at, None)
                if self.was_there(at, op.index) and at not in op.mutates:
                    needs[here][at] = False
                if not needs[here]:
                    del needs[here]
        if op.name not in SHAPE_ONLY:
            for at in op.inputs:
                self.need(needs, at, surely)
        return True


def _copy(needs: Needs) -> Needs:
    return {memory: dict(values) for memory, values in needs.items()}


class _Walk:
    """The way back from a cut to the beginning, over what the tail leaves out and what it runs again.

    Attributes:
        found: Where the values that are needed are found.
        views: What is to be made again as a view of an argument.
        conflicts: Operators that nobody needs, but which would write what nobody knows into something that is needed.
        glue_writes: The memories that operators write into which the tail runs again.
        refused: Why something that is needed cannot be found.
    """

    def __init__(self, liveness: Liveness, crossing: Crossing, forced: set[int]) -> None:
        self._liveness = liveness
        self._crossing = crossing
        self._forced = forced
        self._trace = liveness.study.trace
        self._needs: Needs = {}
        self._idle: set[int] = set()
        self._around = {level.call.index for level in crossing.levels}
        # The arguments of the model are as if a call before it had returned them.
        self._skipped = {-1, *(call.index for level in crossing.levels for call in level.skipped)}
        self.found: dict[Place, int] = {}
        self.views: dict[Place, int] = {}
        self.conflicts: set[int] = set()
        self.glue_writes: set[int] = set()
        self.refused: str | None = None

    def run(self, needs: Needs) -> None:
        self._needs = needs
        items = self._items()
        for item in items:
            if isinstance(item, TracedCall):
                self._skip(item)
            else:
                self._glue(item)
        self._begin()
        if self._idle:
            self._find_conflicts(items)

    def _items(self) -> list[TracedCall | Op]:
        """Calls that are left out, and operators that run again, the last first."""
        ends = self._crossing.cut.ends
        keyed: list[tuple[tuple[int, int, int], TracedCall | Op]] = []
        for level in self._crossing.levels:
            keyed += [((call.begins, 0, call.index), call) for call in level.skipped]
            keyed += [((at, 1, 0), self._trace.ops[at]) for at in level.call.ops if at < ends]
        return [item for _, item in sorted(keyed, key=lambda pair: pair[0], reverse=True)]

    def _glue(self, op: Op) -> None:
        needed = self._liveness.step(op, self._needs, forced=op.index in self._forced)
        memories = {self._liveness.memory[at] for at in op.mutates}
        self.glue_writes |= memories
        if memories and not needed:
            self._idle.add(op.index)

    def _skip(self, call: TracedCall) -> None:
        study, memory_of = self._liveness.study, self._liveness.memory
        for memory in study.touched(call.index) & self._needs.keys():
            outputs = {value: at for at, value in enumerate(call.outputs) if memory_of[value] == memory}
            arguments = {value: at for at, value in enumerate(call.inputs) if memory_of[value] == memory}
            if call.begins <= study.made_by.get(memory, -1) < call.ends:
                self._supply(call, memory, outputs, {})
            elif not study.writes(memory, call.begins, call.ends):
                self._pass_on(call, memory, outputs, arguments)
            elif self._is_alone(memory, call):
                self._check_views(call, memory, outputs)
                self._supply(call, memory, outputs, arguments)
            else:
                self._check_views(call, memory, outputs)
                self._rewrite(call, memory, outputs, arguments)

    def _supply(self, call: TracedCall, memory: int, outputs: dict[int, int], arguments: dict[int, int]) -> None:
        """Take what is needed from what a call returned, or from the arguments that it wrote into."""
        for value, surely in self._needs.pop(memory).items():
            if value in outputs:
                self.found[Place(call.index, outputs[value])] = value
            elif value in arguments:
                self.found[Place(call.index, arguments[value], is_argument=True)] = value
            elif surely:
                self._refuse(call, value, "is changed in place" if arguments else "is made")

    def _rewrite(self, call: TracedCall, memory: int, outputs: dict[int, int], arguments: dict[int, int]) -> None:
        """Have the tail write what a call wrote into memory of several tensors, all of which have to be there."""
        needed = self._needs[memory]
        if not arguments and any(needed.values()):
            self._refuse(call, next(iter(needed)), "is changed in place")
        for value, at in arguments.items():
            self.found[Place(call.index, at, is_argument=True)] = value
        same = self._liveness.study.shapes[call.index].same
        for value in needed.keys() & outputs.keys():
            if same[outputs[value]] is None:
                self.found[Place(call.index, outputs[value])] = value
        for value in arguments:
            needed[value] = True

    def _pass_on(self, call: TracedCall, memory: int, outputs: dict[int, int], arguments: dict[int, int]) -> None:
        """Take what a call returned in a tensor of its own, and look further for the rest."""
        study, needed = self._liveness.study, self._needs[memory]
        same = study.shapes[call.index].same
        written_later = study.writes_after(memory, call.ends)
        for value in [value for value in needed if value in outputs and same[outputs[value]] is None]:
            surely, place = needed.pop(value), Place(call.index, outputs[value])
            if not written_later:
                self.found[place] = value
            elif arguments:
                of, self.views[place] = next(iter(arguments.items()))
                needed[of] = needed.get(of, False) or surely
            elif surely:
                self._refuse(call, value, "is a view of something that is written into later, and")
            if self._liveness.was_there(value, call.begins):
                needed.setdefault(value, False)
        if not needed:
            del self._needs[memory]

    def _check_views(self, call: TracedCall, memory: int, outputs: dict[int, int]) -> None:
        """Refuse what a call changes in place and returns in another shape, if it is written into again."""
        study, needed = self._liveness.study, self._needs[memory]
        views = any(study.shapes[call.index].same[at] is None for at in outputs.values())
        if views and any(needed.values()) and study.writes_after(memory, call.ends):
            self._refuse(call, next(iter(needed)), "is changed in place and returned as a view")

    def _is_alone(self, memory: int, call: TracedCall) -> bool:
        """Whether one tensor lay in the memory, and no views of it, when a call began."""
        ops, calls = self._liveness.aliases.get(memory, ((), ()))
        return not any(op < call.begins and self._trace.ops[op].call in self._around for op in ops) and not any(
            other < call.index and other in self._skipped for other in calls
        )

    def _begin(self) -> None:
        """What is needed of the model's arguments."""
        for at, value in enumerate(self._trace.calls[0].inputs):
            memory = self._liveness.memory[value]
            if value in self._needs.get(memory, ()):
                self.found[Place(None, at)] = value

    def _find_conflicts(self, items: list[TracedCall | Op]) -> None:
        """Go forth, as the tail does, and see which memories have values."""
        memory_of, made_by = self._liveness.memory, self._liveness.study.made_by
        empty = {memory_of[value] for value in self._trace.calls[0].inputs}
        empty -= {memory_of[value] for place, value in self.found.items() if place.call is None}
        for item in reversed(items):
            if isinstance(item, TracedCall):
                sent = {memory_of[value] for place, value in self.found.items() if place.call == item.index}
                made = {memory_of[value] for value in item.outputs}
                empty |= {memory for memory in made if item.begins <= made_by.get(memory, -1) < item.ends}
                empty -= sent
                continue
            read = {memory_of[at] for at in item.inputs}
            if item.name not in SHAPE_ONLY and read & empty:
                written = {memory_of[at] for at in item.mutates}
                if item.index in self._idle and written - empty:
                    self.conflicts.add(item.index)
                empty |= {memory_of[at] for at in item.outputs if made_by.get(memory_of[at]) == item.index}

    def _refuse(self, call: TracedCall, value: int, how: str) -> None:
        shape = "x".join(map(str, self._trace.values[value].shape))
        self.refused = f"the tail reads a value ({shape}) that {how} inside {call.address!r}, which does not return it"
