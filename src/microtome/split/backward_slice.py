"""The way back from a cut to the beginning of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microtome.results.trace import Op, Read, TracedCall
from microtome.split.crossing import Crossing, ValueLocation
from microtome.split.placeholder import SHAPE_ONLY

if TYPE_CHECKING:
    from microtome.split.liveness import Liveness

#: Needed values, by the memory that they lie in; False: only if somebody still refers to an older tensor of it.
Needs = dict[int, dict[int, bool]]


class BackwardSlice:
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
        self._trace = liveness.analysis.trace
        self._needs: Needs = {}
        self._idle: set[int] = set()
        self._around = {level.call.index for level in crossing.levels}
        # The arguments of the model are as if a call before it had returned them.
        self._skipped = {-1, *(call.index for level in crossing.levels for call in level.skipped)}
        self.found: dict[ValueLocation, int] = {}
        self.views: dict[ValueLocation, int] = {}
        self.conflicts: set[int] = set()
        self.glue_writes: set[int] = set()
        self.refused: str | None = None

    def run(self, needs: Needs) -> None:
        self._needs = needs
        items = self._items()
        for item in items:
            if isinstance(item, TracedCall):
                self._skip(item)
            elif isinstance(item, Read):
                self._liveness.need(self._needs, item.value)
            elif item.index in self._liveness.analysis.draws:
                self._draw(item)
            else:
                self._glue(item)
        self._begin()
        if self._idle:
            self._find_conflicts(items)

    def _items(self) -> list[TracedCall | Op | Read]:
        """Calls that are left out, and operators that run again and code that reads values again, the last first."""
        ends = self._crossing.cut.ends
        keyed: list[tuple[tuple[int, int, int], TracedCall | Op | Read]] = []
        after = len(self._trace.calls)  # a read comes after a call that begins at the same operator
        keyed += [((r.op, 0, after), r) for r in self._liveness.reads_until(self._crossing.cut, self._skipped)]
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

    def _draw(self, op: Op) -> None:
        """Take what an operator drew from the head: the tail does not draw it again."""
        analysis = self._liveness.analysis
        draw = analysis.draws[op.index]
        if not draw.can_be_sent(op, is_fused=analysis.fuses_dropout):
            around = self._trace.calls[op.call or 0]
            self.refused = (
                f"{draw.name} draws random numbers in the forward of {around.address or 'the model'!r} itself, which "
                "both sides run, and they cannot be sent"
            )
            if analysis.is_training:
                self.refused += "; if it is dropout, call model.eval()"
        for at, value in enumerate(op.outputs):
            memory, place = self._liveness.memory[value], ValueLocation(None, at, draw=op.index)
            if value in op.mutates:
                self.found[place] = value  # the tail has no other way to fill it
                self.glue_writes.add(memory)
                if memory in self._needs:
                    self._needs[memory] = {**self._needs[memory], value: True}
            elif self._needs.pop(memory, None):
                self.found[place] = value

    def _skip(self, call: TracedCall) -> None:
        analysis, memory_of = self._liveness.analysis, self._liveness.memory
        touched = analysis.touched_memories(call.index)
        if touched.isdisjoint(self._needs):
            return
        for memory in touched & self._needs.keys():
            outputs = {value: at for at, value in enumerate(call.outputs) if memory_of[value] == memory}
            arguments = {value: at for at, value in enumerate(call.inputs) if memory_of[value] == memory}
            if call.begins <= analysis.allocated_by.get(memory, -1) < call.ends:
                self._supply(call, memory, outputs, {})
            elif not analysis.writes(memory, call.begins, call.ends):
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
                self.found[ValueLocation(call.index, outputs[value])] = value
            elif value in arguments:
                self.found[ValueLocation(call.index, arguments[value], is_argument=True)] = value
            elif surely:
                self._refuse(call, value, "is changed in place" if arguments else "is made")

    def _rewrite(self, call: TracedCall, memory: int, outputs: dict[int, int], arguments: dict[int, int]) -> None:
        """Have the tail write what a call wrote into memory of several tensors, all of which have to be there."""
        needed = self._needs[memory] = dict(self._needs[memory])
        if not arguments and any(needed.values()):
            self._refuse(call, next(iter(needed)), "is changed in place")
        for value, at in arguments.items():
            self.found[ValueLocation(call.index, at, is_argument=True)] = value
        same = self._liveness.analysis.call_structures[call.index].output_aliases
        for value in needed.keys() & outputs.keys():
            if same[outputs[value]] is None:
                self.found[ValueLocation(call.index, outputs[value])] = value
        for value in arguments:
            needed[value] = True

    def _pass_on(self, call: TracedCall, memory: int, outputs: dict[int, int], arguments: dict[int, int]) -> None:
        """Take what a call returned in a tensor of its own, and look further for the rest."""
        analysis = self._liveness.analysis
        needed = self._needs[memory] = dict(self._needs[memory])
        same = analysis.call_structures[call.index].output_aliases
        values, written_later = self._trace.values, analysis.writes(memory, call.ends)
        for value in [value for value in needed if value in outputs and same[outputs[value]] is None]:
            surely, place = needed.pop(value), ValueLocation(call.index, outputs[value])
            if not written_later:
                self.found[place] = value
            elif alike := {of: at for of, at in arguments.items() if values[of].dtype == values[value].dtype}:
                of, self.views[place] = next(iter(alike.items()))
                needed[of] = needed.get(of, False) or surely
            elif surely:
                self._refuse(call, value, "is a view of something that is written into later, and")
            if self._liveness.was_there(value, call.begins):
                needed.setdefault(value, False)
        if not needed:
            del self._needs[memory]

    def _check_views(self, call: TracedCall, memory: int, outputs: dict[int, int]) -> None:
        """Refuse what a call changes in place and returns in another shape, if it is written into again."""
        analysis, needed = self._liveness.analysis, self._needs[memory]
        views = any(analysis.call_structures[call.index].output_aliases[at] is None for at in outputs.values())
        if views and any(needed.values()) and analysis.writes(memory, call.ends):
            self._refuse(call, next(iter(needed)), "is changed in place and returned as a view")

    def _is_alone(self, memory: int, call: TracedCall) -> bool:
        """Whether one tensor lay in the memory, and no views of it, when a call began."""
        ops, calls = self._liveness.aliases.get(memory, ((), ()))
        return not any(op < call.begins and self._trace.ops[op].call in self._around for op in ops) and not any(
            other < call.index and other in self._skipped for other in calls
        )

    def _begin(self) -> None:
        """Return the arguments of the model that are needed."""
        for at, value in enumerate(self._trace.calls[0].inputs):
            memory = self._liveness.memory[value]
            if value in self._needs.get(memory, ()):
                self.found[ValueLocation(None, at)] = value

    def _find_conflicts(self, items: list[TracedCall | Op | Read]) -> None:
        """Go forth, as the tail does, and see which memories have values."""
        memory_of, made_by = self._liveness.memory, self._liveness.analysis.allocated_by
        empty = {memory_of[value] for value in self._trace.calls[0].inputs}
        empty -= {memory_of[value] for place, value in self.found.items() if place.is_input}
        for item in reversed(items):
            if isinstance(item, TracedCall):
                sent = {memory_of[value] for place, value in self.found.items() if place.call == item.index}
                made = {memory_of[value] for value in item.outputs}
                empty |= {memory for memory in made if item.begins <= made_by.get(memory, -1) < item.ends}
                empty -= sent
                continue
            if isinstance(item, Read):
                continue
            if item.index in self._liveness.analysis.draws:
                empty |= {memory_of[value] for value in item.outputs}
                empty -= {memory_of[value] for place, value in self.found.items() if place.draw == item.index}
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
