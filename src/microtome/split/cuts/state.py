"""State that a model carries from run to run, and the sides of a cut that write and read it.

A model that sets attributes of its modules is run twice more on the same stand-ins. Reads of a tensor that an earlier
run left behind are recognized by its memory. Reads of numbers are not: but where one that has changed is read, the
second and the third run differ in their operators or arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from microtome.engine import Call, Probe
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import reachable_tensors, tensors_in
from microtome.engine.torch_internals import storage_id
from microtome.results.trace import TracedCall
from microtome.split.analysis.call_arguments import state_of
from microtome.split.analysis.dataflow import describe_scalars
from microtome.split.analysis.module_attributes import (
    CONTAINERS,
    PLAIN,
    TORCH_ATTRIBUTES,
    ModuleStates,
    changed_attributes,
)
from microtome.split.analysis.signature import describe
from microtome.split.cuts.crossing import Crossing

#: The path of a module, and the name of an attribute.
Location = tuple[str, str]


class Access(NamedTuple):
    """A read or a write of state.

    Attributes:
        call: The call whose code does it; None: unknown.
        clock: The number of calls that had begun by then.
    """

    call: int | None
    clock: int


@dataclass
class State:
    """The state that a model carries from run to run.

    Attributes:
        writes: The writes to each location.
        reads: The reads of tensors that an earlier run left at a location.
        plain_reads: The reads of changed numbers, at whichever location; None: unknown, since the calls differ.
        plain_locations: The locations that do not hold tensors.
        values: The tensors that the first run left at each location, as values of its trace.
    """

    writes: dict[Location, set[Access]] = field(default_factory=dict)
    reads: dict[Location, set[Access]] = field(default_factory=dict)
    plain_reads: set[Access] | None = field(default_factory=set)
    plain_locations: set[Location] = field(default_factory=set)
    values: dict[Location, list[int]] = field(default_factory=dict)

    def carried(self) -> Location | None:
        """A location that a run reads and an earlier one wrote; None: there is none."""
        for location in self.writes:
            if self.reads.get(location) or (location in self.plain_locations and self.plain_reads != set()):
                return location
        return None

    def refusal(self, crossing: Crossing, calls: tuple[TracedCall, ...]) -> str | None:
        """The reason why a cut would separate state from its reader; None: it does not."""
        for (path, name), writers, readers in self._sides(crossing, calls):
            head_writers = {"head"} if (path, name) in self.plain_locations else {"head", "both"}
            is_in_head = readers == {"head"} and writers <= head_writers
            if not is_in_head and writers | readers != {"tail"}:
                module = f"{path!r}" if path else "the model"
                return (
                    f"{name!r} of {module} is state that a run leaves to the next one, written {_join(writers)} and "
                    f"read {_join(readers)}: from the second request on, that would not be what the model has there. "
                    "Cut where one side does both"
                )
        return None

    def left_by_tail(self, crossing: Crossing, calls: tuple[TracedCall, ...]) -> frozenset[int]:
        """The values that the tail leaves to the next run."""
        sides = self._sides(crossing, calls)
        return frozenset(
            value for location, writers, _ in sides if writers == {"tail"} for value in self.values.get(location, ())
        )

    def _sides(
        self, crossing: Crossing, calls: tuple[TracedCall, ...]
    ) -> Iterator[tuple[Location, set[str], set[str]]]:
        """Each location that is read, with the sides of a cut that write and that read it."""
        if not self.writes:
            return
        skipped = {call.index for level in crossing.levels for call in level.skipped}
        # For each enclosing call, its child that contains the cut, or is it.
        onward = {level.call.index: (level.onward or level.skipped[-1]).index for level in crossing.levels}

        def side_of(access: Access) -> str:
            if access.call is None:
                return "unknown"
            if access.call in onward:
                return "both" if access.clock <= onward[access.call] else "tail"
            ancestor: int | None = access.call
            while ancestor is not None:
                if ancestor in skipped:
                    return "head"
                ancestor = calls[ancestor].parent
            return "tail"

        for location, writes in self.writes.items():
            reads = set(self.reads.get(location, ()))
            if location in self.plain_locations:
                reads |= {Access(None, 0)} if self.plain_reads is None else self.plain_reads
            if reads:  # or it changes without effect
                yield location, set(map(side_of, writes)), set(map(side_of, reads))


_SIDES = {"head": "in the head", "tail": "in the tail", "both": "by code that both sides run", "unknown": "anywhere"}


def _join(sides: set[str]) -> str:
    return " and ".join(_SIDES[side] for side in sorted(sides))


class StateProbe(Probe):
    """Records the writes to module attributes, and the reads of tensors that earlier runs left there.

    Attributes:
        carried: The tensors that earlier runs left, and their locations, by the identity of their memory. They are kept
            alive, or others might be allocated there.
        paths: The path of each call.
        log: What each piece of code does, to compare two runs: its operators, calls and their arguments.
    """

    def __init__(
        self,
        carried: dict[int, tuple[Location, Tensor]] | None = None,
        *,
        keeps_log: bool = False,
        states: ModuleStates | None = None,
    ) -> None:
        self.carried = carried or {}
        self.writes: dict[Location, set[Access]] = {}
        self.reads: dict[Location, set[Access]] = {}
        self.paths: list[str] = []
        self.log: dict[Access, list[Any]] = {}
        self._keeps_log = keeps_log
        self._indices: dict[Call, int] = {}
        self._states: dict[Call, dict[str, Any]] = {}
        self._first_objects: list[tuple[Location, Any, Any]] = []
        self._first_states: dict[str, dict[str, Any]] = {}
        self._module_states = states or ModuleStates()

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = self._indices[call] = len(self.paths)
        if call.parent is None:
            self._module_states.begin(call.module)
            self._first_objects = [(at, value, state_of(value)) for at, value in _objects_of(call.module)]
            self._first_states = self._states_in(call.module)
        else:
            self._find_writes(call.parent)
        self.paths.append(call.path)
        self._states[call] = self._module_states.of(call.module)
        caller = Access(self._indices[call.parent or call], index)
        self._find_reads((args, kwargs), caller)
        self._add_to_log(caller, lambda: describe(args, kwargs)[:2])

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._find_writes(call)
        access = Access(self._indices[call], len(self.paths))
        self._find_reads(output, access)
        self._add_to_log(access, lambda: describe((output,), {})[:2])
        if call.parent is None:
            self._find_foreign_writes(call.module)

    def fail(self, call: Call, error: BaseException) -> None:
        self._find_writes(call)

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._keeps_log and where.call is not None:
            access = Access(self._indices[where.call], len(self.paths))
            self._find_reads((args, kwargs), access)
            self._add_to_log(access, lambda: (str(func), describe_scalars(args, kwargs)))

    def _add_to_log(self, access: Access, describe_event: Callable[[], Any]) -> None:
        if self._keeps_log:
            self.log.setdefault(access, []).append(describe_event())

    def _find_reads(self, value: Any, access: Access) -> None:
        for tensor in tensors_in(value) if self.carried else ():
            if carried := self.carried.get(_memory_id(tensor)):
                self.reads.setdefault(carried[0], set()).add(access)

    def _find_writes(self, call: Call) -> None:
        before, now = self._states[call], self._module_states.of(call.module)
        for name in changed_attributes(before, now):
            self.writes.setdefault((call.path, name), set()).add(Access(self._indices[call], len(self.paths)))
        self._states[call] = now

    def _states_in(self, model: nn.Module | None) -> dict[str, dict[str, Any]]:
        modules = () if model is None else model.named_modules()
        return {path: self._module_states.of(module) for path, module in modules}

    def _find_foreign_writes(self, model: nn.Module | None) -> None:
        """Find what was changed by other code than that of the module that holds it."""
        changed = [location for location, value, before in self._first_objects if state_of(value) != before]
        for path, now in self._states_in(model).items():
            changed += [(path, name) for name in changed_attributes(self._first_states.get(path, {}), now)]
        for location in changed:
            self.writes.setdefault(location, {Access(None, 0)})


def analyze_state(
    model: nn.Module, first: StateProbe, run_again: Callable[[Probe], None], index_of: Callable[[Tensor], int | None]
) -> State:
    """Find the state that a model carries, from one run and two more.

    Args:
        run_again: Runs the model once more, from the state that the last run left.
        index_of: The value in the trace of the first run that a tensor is.
    """
    written = set(first.writes)
    if not written:
        return State()
    state = State()
    for location, tensor in _tensors_at(model, written).values():
        if (index := index_of(tensor)) is not None:
            state.values.setdefault(location, []).append(index)
    runs: list[StateProbe] = []
    for _ in range(2):
        runs.append(StateProbe(_tensors_at(model, written), keeps_log=True))
        run_again(runs[-1])
        written |= set(runs[-1].writes)
    for run in runs:  # what only the first run wrote is computed once, and then only read
        for location, accesses in run.writes.items():
            state.writes.setdefault(location, set()).update(accesses)
        for location, accesses in run.reads.items():
            state.reads.setdefault(location, set()).update(accesses)
    if any(run.paths != first.paths for run in runs):
        state.plain_reads, state.plain_locations = None, set(state.writes)
    else:
        logs = [run.log for run in runs]
        accesses = logs[0].keys() | logs[1].keys()
        state.plain_reads = {access for access in accesses if logs[0].get(access) != logs[1].get(access)}
        state.plain_locations = {at for at in state.writes if not isinstance(_value_at(model, at), Tensor)}
    return state


# -- what modules hold -------------------------------------------------------------------------------------------------


#: Attributes that `module_state` compares by value, or that hold no state of their own.
_VALUES = PLAIN | {type(None)}
_HELD = (*PLAIN, *CONTAINERS, Tensor, nn.Module, type)


def _objects_of(model: nn.Module | None) -> Iterator[tuple[Location, Any]]:
    """The objects of other classes that modules hold, such as caches, each once."""
    visited: set[int] = set()
    for path, module in () if model is None else model.named_modules():
        for name, value in vars(module).items():
            if name in TORCH_ATTRIBUTES or type(value) in _VALUES or isinstance(value, _HELD) or id(value) in visited:
                continue
            visited.add(id(value))
            if type(value) is not tuple or not _VALUES.issuperset(map(type, value)):
                yield (path, name), value


def _tensors_at(model: nn.Module, locations: set[Location]) -> dict[int, tuple[Location, Tensor]]:
    """The tensors at these locations other than weights, by the identity of their memory."""
    weights = {0, *map(_memory_id, model.parameters())}
    for name, buffer in model.named_buffers():
        path, _, last = name.rpartition(".")
        if (path, last) not in locations:
            weights.add(_memory_id(buffer))
    tensors: dict[int, tuple[Location, Tensor]] = {}
    for location in locations:
        for tensor in reachable_tensors(_value_at(model, location), depth=4):
            if (memory := _memory_id(tensor)) not in weights:
                tensors[memory] = location, tensor
    return tensors


def _value_at(model: nn.Module, location: Location) -> Any:
    attributes = vars(model.get_submodule(location[0]))
    return attributes.get(location[1], attributes.get("_buffers", {}).get(location[1]))


def _memory_id(tensor: Tensor) -> int:
    """The identity of the memory of a tensor; 0: it has no storage of its own."""
    try:
        return storage_id(tensor)
    except NotImplementedError:
        return 0
