"""The backward slice from a cut to the start of the run; see `liveness` for the algorithm."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from microtome.results.trace import Op, Read, TracedCall
from microtome.split.cuts.crossing import Crossing, Level, ValueLocation
from microtome.split.execution.placeholder import SHAPE_ONLY

if TYPE_CHECKING:
    from microtome.split.cuts.liveness import Liveness

#: The needed values in each memory; False: needed only if somebody still refers to the value by an older tensor.
Needs = dict[int, dict[int, bool]]


_begins = attrgetter("begins")


class _Access(NamedTuple):
    """The outputs and arguments of a skipped call that lie in one needed memory, with their positions."""

    call: TracedCall
    memory: int
    outputs: dict[int, int]
    arguments: dict[int, int]


class BackwardSlice:
    """The values that the head sends, found by a walk back over skipped calls and glue operators.

    Attributes:
        sources: The needed values, by the location where the head finds them.
        views: The outputs that the tail makes again, each as a view of the argument at a position.
        conflicts: Operators without need that would write placeholders to a needed memory.
        glue_writes: The memories that glue operators write to.
        refused: Why a needed value has no source; None: all have one.
    """

    def __init__(self, liveness: Liveness, crossing: Crossing, forced: set[int]) -> None:
        self._liveness = liveness
        self._analysis = liveness.analysis
        self._trace = liveness.analysis.trace
        self._memory_of = liveness.memory_of
        self._crossing = crossing
        self._forced = forced
        self._needs: Needs = {}
        self._unneeded_writes: set[int] = set()
        self._enclosing = {level.call.index for level in crossing.levels}
        self.sources: dict[ValueLocation, int] = {}
        self.views: dict[ValueLocation, int] = {}
        self.conflicts: set[int] = set()
        self.glue_writes: set[int] = set()
        self.refused: str | None = None

    def run(self, needs: Needs) -> None:
        """Walk back from these needs at the cut."""
        self._needs = needs
        for event in reversed(self._events()) if self._liveness.has_reads else self._events_back():
            if isinstance(event, TracedCall):
                self._skip_call(event)
            elif isinstance(event, Read):
                self._liveness.add_need(self._needs, event.value)
            elif event.index in self._analysis.draws:
                self._receive_draw(event)
            else:
                self._replay_op(event)
        for position, value in enumerate(self._trace.calls[0].inputs):
            if value in self._needs.get(self._memory_of[value], ()):
                self.sources[ValueLocation(None, position)] = value
        if self._unneeded_writes:
            self._find_conflicts(self._events())

    @cached_property
    def _skipped(self) -> set[int]:
        """The skipped calls, as if a call -1 before the model had returned its inputs."""
        return {-1, *(call.index for level in self._crossing.levels for call in level.skipped)}

    def _events_back(self) -> Iterator[TracedCall | Op]:
        """The events of a model whose code reads no values, the last first.

        While nothing is needed, which is most of the way back, only operators that do more than compute matter.
        """
        for level in reversed(self._crossing.levels):
            yield from self._events_of(level)

    def _events_of(self, level: Level) -> Iterator[TracedCall | Op]:
        calls, ops = level.skipped, level.call.ops
        num_calls, num_ops = len(calls), bisect_left(ops, self._crossing.cut.ends)
        while num_calls or num_ops:
            if not self._needs:
                effects = self._liveness.effects_of(level.call)
                found = bisect_left(effects, ops[num_ops]) if num_ops < len(ops) else len(effects)
                if not found:
                    return
                num_ops = bisect_right(ops, effects[found - 1])
                num_calls = bisect_right(calls, effects[found - 1], hi=num_calls, key=_begins)
            if num_ops and (not num_calls or ops[num_ops - 1] >= calls[num_calls - 1].begins):
                num_ops -= 1
                yield self._trace.ops[ops[num_ops]]
            else:
                num_calls -= 1
                yield calls[num_calls]

    def _events(self) -> list[TracedCall | Op | Read]:
        """The skipped calls, glue operators and reads of Python code before the cut, in order."""
        end = self._crossing.cut.ends
        after_calls = len(self._trace.calls)  # a read comes after a call that begins at the same operator
        reads = self._liveness.reads_until(self._crossing.cut, self._skipped)
        keyed: list[tuple[tuple[int, int, int], TracedCall | Op | Read]]
        keyed = [((read.op, 0, after_calls), read) for read in reads]
        for level in self._crossing.levels:
            keyed += [((call.begins, 0, call.index), call) for call in level.skipped]
            keyed += [((op, 1, 0), self._trace.ops[op]) for op in level.call.ops if op < end]
        return [event for _, event in sorted(keyed, key=lambda pair: pair[0])]

    def _replay_op(self, op: Op) -> None:
        is_needed = self._liveness.step_back(op, self._needs, forced=op.index in self._forced)
        written = self._analysis.memories(op.mutates)
        self.glue_writes |= written
        if written and not is_needed:
            self._unneeded_writes.add(op.index)

    def _receive_draw(self, op: Op) -> None:
        """Send the outputs of a random operator: the tail does not draw again."""
        draw = self._analysis.draws[op.index]
        if not draw.can_be_sent(op, is_fused=self._analysis.fuses_dropout):
            enclosing = self._trace.calls[op.call or 0]
            self.refused = (
                f"{draw.name} draws random numbers in the forward of {enclosing.address or 'the model'!r} itself, "
                "which both sides run, and they cannot be sent"
            )
            if self._analysis.is_training:
                self.refused += "; if it is dropout, call model.eval()"
        for position, value in enumerate(op.outputs):
            memory, location = self._memory_of[value], ValueLocation(None, position, draw=op.index)
            if value in op.mutates:
                self.sources[location] = value  # the tail has no other way to fill it
                self.glue_writes.add(memory)
                if memory in self._needs:
                    self._needs[memory] = {**self._needs[memory], value: True}
            elif self._needs.pop(memory, None):
                self.sources[location] = value

    # -- skipped calls -------------------------------------------------------------------------------------------------

    def _skip_call(self, call: TracedCall) -> None:
        touched = self._analysis.touched_memories(call.index)
        if touched.isdisjoint(self._needs):
            return
        memory_of = self._memory_of
        for memory in touched & self._needs.keys():
            outputs = {value: at for at, value in enumerate(call.outputs) if memory_of[value] == memory}
            arguments = {value: at for at, value in enumerate(call.inputs) if memory_of[value] == memory}
            access = _Access(call, memory, outputs, arguments)
            if call.begins <= self._analysis.allocated_by.get(memory, -1) < call.ends:
                self._take_all(access._replace(arguments={}))
            elif not self._analysis.writes(memory, call.begins, call.ends):
                self._take_outputs(access)
            else:
                self._check_views(access)
                if self._has_one_tensor(memory, call):
                    self._take_all(access)
                else:
                    self._take_writes(access)

    def _take_all(self, access: _Access) -> None:
        """Take all needed values of a memory from the outputs of a call, or from the arguments that it wrote to."""
        call, memory, outputs, arguments = access
        for value, is_certain in self._needs.pop(memory).items():
            if value in outputs:
                self.sources[ValueLocation(call.index, outputs[value])] = value
            elif value in arguments:
                self.sources[ValueLocation(call.index, arguments[value], is_argument=True)] = value
            elif is_certain:
                self._refuse(call, value, "is changed in place" if arguments else "is made")

    def _take_writes(self, access: _Access) -> None:
        """Take what a call wrote to its arguments, and keep these needed: the tail writes to the same tensors."""
        call, memory, outputs, arguments = access
        needed = self._needs[memory] = dict(self._needs[memory])
        if not arguments and any(needed.values()):
            self._refuse(call, next(iter(needed)), "is changed in place")
        for value, position in arguments.items():
            self.sources[ValueLocation(call.index, position, is_argument=True)] = value
        for value in needed.keys() & self._new_outputs(access).keys():
            self.sources[ValueLocation(call.index, outputs[value])] = value
        for value in arguments:
            needed[value] = True

    def _take_outputs(self, access: _Access) -> None:
        """Take needed values from the new tensors that a call returned, and keep the others needed."""
        call, memory, _, arguments = access
        values, is_written_later = self._trace.values, self._analysis.writes(memory, call.ends)
        needed = self._needs[memory] = dict(self._needs[memory])
        new_outputs = self._new_outputs(access)
        for value in [value for value in needed if value in new_outputs]:
            is_certain, location = needed.pop(value), ValueLocation(call.index, new_outputs[value])
            bases = {base: at for base, at in arguments.items() if values[base].dtype == values[value].dtype}
            if not is_written_later:
                self.sources[location] = value
            elif bases:
                base, self.views[location] = next(iter(bases.items()))
                needed[base] = needed.get(base, False) or is_certain
            elif is_certain:
                self._refuse(call, value, "is a view of something that is written to later, and")
            if self._liveness.existed_before(value, call.begins):
                needed.setdefault(value, False)
        if not needed:
            del self._needs[memory]

    def _new_outputs(self, access: _Access) -> dict[int, int]:
        """The outputs of a call in tensors that are not among its arguments."""
        aliases = self._analysis.call_structures[access.call.index].output_aliases
        return {value: position for value, position in access.outputs.items() if aliases[position] is None}

    def _check_views(self, access: _Access) -> None:
        """Refuse a value that a call changes in place and returns as a view, if it is written to again."""
        needed = self._needs[access.memory]
        is_written_later = self._analysis.writes(access.memory, access.call.ends)
        if any(needed.values()) and is_written_later and self._new_outputs(access):
            self._refuse(access.call, next(iter(needed)), "is changed in place and returned as a view")

    def _has_one_tensor(self, memory: int, call: TracedCall) -> bool:
        """Whether there was one tensor on a memory, and no view of it, when a call began."""
        ops, calls = self._liveness.alias_sources.get(memory, ((), ()))
        return not any(op < call.begins and self._trace.ops[op].call in self._enclosing for op in ops) and not any(
            other < call.index and other in self._skipped for other in calls
        )

    def _refuse(self, call: TracedCall, value: int, reason: str) -> None:
        shape = "x".join(map(str, self._trace.values[value].shape))
        self.refused = (
            f"the tail reads a value ({shape}) that {reason} inside {call.address!r}, which does not return it"
        )

    # -- conflicts -----------------------------------------------------------------------------------------------------

    def _find_conflicts(self, events: list[TracedCall | Op | Read]) -> None:
        """Walk forward, as the tail does, and track which memories contain placeholders."""
        memories, allocated_by = self._analysis.memories, self._analysis.allocated_by
        placeholders = memories(self._trace.calls[0].inputs)
        placeholders -= memories(value for location, value in self.sources.items() if location.is_input)
        for event in events:
            if isinstance(event, TracedCall):
                allocated = memories(event.outputs)
                placeholders |= {
                    memory for memory in allocated if event.begins <= allocated_by.get(memory, -1) < event.ends
                }
                placeholders -= memories(v for location, v in self.sources.items() if location.call == event.index)
            elif isinstance(event, Op) and event.index in self._analysis.draws:
                placeholders |= memories(event.outputs)
                placeholders -= memories(v for location, v in self.sources.items() if location.draw == event.index)
            elif isinstance(event, Op) and event.name not in SHAPE_ONLY and memories(event.inputs) & placeholders:
                if event.index in self._unneeded_writes and memories(event.mutates) - placeholders:
                    self.conflicts.add(event.index)
                allocated = memories(event.outputs)
                placeholders |= {memory for memory in allocated if allocated_by.get(memory) == event.index}
