"""What a tail needs of its head: walked back from what the tail reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from microtome.split.ghost import SHAPE_ONLY
from microtome.split.study import Study
from microtome.trace.data import Op, TracedCall

#: Values that are needed, by the memory that they lie in.
Needs = dict[int, set[int]]


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
        refused: Why there is no exact cut here; None: there is one.
    """

    cut: TracedCall
    levels: tuple[Level, ...]
    values: dict[Place, int] = field(default_factory=dict)
    copied: set[Place] = field(default_factory=set)
    written: set[Place] = field(default_factory=set)
    refused: str | None = None


class Liveness:
    """What is needed at each cut of one run."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._trace = study.trace
        self.memory = [value.memory for value in study.trace.values]
        self._kept = {value.memory for value in study.trace.values if value.origin in ("parameter", "buffer")}
        self._live = self._walk_back()

    def crossing(self, cut: TracedCall, more: Iterable[Place] = ()) -> Crossing:
        """What crosses a cut at the exit of this call, and what was found to be wanted beside that."""
        crossing = Crossing(cut, self._levels(cut))
        forced: set[int] = set()
        while True:
            walk = _Walk(self, crossing, forced)
            walk.run({memory: set(values) for memory, values in self._live[cut.ends].items()})
            if not walk.conflicts:
                break
            forced |= walk.conflicts
        crossing.refused = walk.refused
        crossing.values = walk.found
        for place in more:
            holder = self._trace.calls[place.call or 0]
            of = holder.inputs if place.call is None or place.is_argument else holder.outputs
            crossing.values.setdefault(place, of[place.at])
        for place, value in walk.found.items():
            memory = self.memory[value]
            begins = 0 if place.call is None else self._trace.calls[place.call].ends
            if self.study.writes(memory, begins, cut.ends):
                crossing.copied.add(place)
            if self.study.writes(memory, cut.ends, len(self._trace.ops)) or memory in walk.glue_writes:
                crossing.written.add(place)
        return crossing

    def _walk_back(self) -> list[Needs]:
        """What the operators from each on, and the output, need."""
        needs: Needs = defaultdict(set)
        for at in self._trace.calls[0].outputs:
            self.need(needs, at)
        live = [{memory: set(values) for memory, values in needs.items()}]
        for op in reversed(self._trace.ops):
            self.step(op, needs, forced=False)
            live.append({memory: set(values) for memory, values in needs.items() if values})
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

    def need(self, needs: Needs, value: int) -> None:
        memory = self.memory[value]
        if memory not in self._kept:
            needs.setdefault(memory, set()).add(value)

    def step(self, op: Op, needs: Needs, *, forced: bool) -> bool:
        """Go back over an operator that the tail runs; return whether anybody needs it."""
        memory, made_by = self.memory, self.study.made_by
        needed = forced or (not op.outputs and not op.mutates)
        needed = needed or any(memory[at] in needs for at in op.mutates)
        for at in op.outputs:
            if needed:
                break
            held = needs.get(memory[at])
            needed = held is not None and (at in held or made_by.get(memory[at]) == op.index)
        if not needed:
            return False
        for at in op.outputs:
            here = memory[at]
            if made_by.get(here) == op.index:
                needs.pop(here, None)
            elif here in needs:
                needs[here].discard(at)  # a view: what it is of is needed
                if not needs[here]:
                    del needs[here]
        if op.name not in SHAPE_ONLY:
            for at in op.inputs:
                self.need(needs, at)
        return True


class _Walk:
    """The way back from a cut to the beginning, over what the tail leaves out and what it runs again.

    Attributes:
        found: Where the values that are needed are found.
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
        # What a call gave in an object of its own: whoever else holds the same value may be asked for it too.
        self._wished: Needs = {}
        self._idle: dict[int, set[int]] = {}
        self.found: dict[Place, int] = {}
        self.conflicts: set[int] = set()
        self.glue_writes: set[int] = set()
        self.refused: str | None = None

    def run(self, needs: Needs) -> None:
        self._needs = needs
        for item in self._items():
            if isinstance(item, TracedCall):
                self._skip(item)
            else:
                self._glue(item)
            for memory in self._idle.keys() & self._needs.keys():
                self.conflicts |= self._idle.pop(memory)
        self._begin()

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
        for memory in memories:
            self._wished.pop(memory, None)
            if not needed:
                self._idle.setdefault(memory, set()).add(op.index)

    def _skip(self, call: TracedCall) -> None:
        study, memory_of = self._liveness.study, self._liveness.memory
        same = study.shapes[call.index].same
        for memory in list(self._needs.keys() | self._wished.keys()):
            needed, wished = self._needs.get(memory, set()), self._wished.get(memory, set())
            made = call.begins <= study.made_by.get(memory, -1) < call.ends
            changed = study.writes(memory, call.begins, call.ends)
            outputs = {value: at for at, value in enumerate(call.outputs) if memory_of[value] == memory}
            arguments = {value: at for at, value in enumerate(call.inputs) if memory_of[value] == memory}
            if made or changed:
                for value in needed:
                    if value in outputs:
                        self.found[Place(call.index, outputs[value])] = value
                    elif value in arguments and not made:
                        self.found[Place(call.index, arguments[value], is_argument=True)] = value
                    else:
                        self._refuse(call, value, made=made)
                for value in wished & outputs.keys() if made else ():
                    self.found[Place(call.index, outputs[value])] = value
                self._needs.pop(memory, None)
                self._wished.pop(memory, None)
                continue
            for value in (needed | wished) & outputs.keys():
                if same[outputs[value]] is None:
                    self.found[Place(call.index, outputs[value])] = value
                    self._wished.setdefault(memory, set()).add(value)
                    needed.discard(value)
            if not needed:
                self._needs.pop(memory, None)

    def _begin(self) -> None:
        """What is needed of the model's arguments."""
        for at, value in enumerate(self._trace.calls[0].inputs):
            memory = self._liveness.memory[value]
            if value in self._needs.get(memory, ()) or value in self._wished.get(memory, ()):
                self.found[Place(None, at)] = value

    def _refuse(self, call: TracedCall, value: int, *, made: bool) -> None:
        shape = "x".join(map(str, self._trace.values[value].shape))
        how = "is made inside" if made else "is changed in place inside"
        self.refused = f"the tail reads a value ({shape}) that {how} {call.address!r} and is not among what it returns"
