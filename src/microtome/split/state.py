"""State that a model carries from run to run, and on which side of a cut it is written and read.

A model that changes what its modules hold is run twice more on the same stand-ins. Tensors of an earlier run are known
when they are read again. Numbers are not; but the second and the third run differ where one is read that has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from microtome.engine import Call, Probe
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import dict_of, tensors_in
from microtome.engine.torch_internals import storage_id
from microtome.results.trace import TracedCall
from microtome.split.call_arguments import state_of
from microtome.split.crossing import Crossing
from microtome.split.dataflow import describe_scalars
from microtome.split.signature import describe

#: What holds state: the path of a module, and the name of an attribute.
Location = tuple[str, str]


class Access(NamedTuple):
    """A read or a write of state.

    Attributes:
        call: The call whose code does it; None: unknown.
        clock: How many calls had begun by then.
    """

    call: int | None
    clock: int


@dataclass
class State:
    """The state that a model carries from run to run.

    Attributes:
        writes: By location.
        reads: Of tensors that an earlier run left at a location.
        uses: Reads of numbers that the runs before changed, whichever they are; None: the runs differ in more.
        numbers: The locations that hold such numbers.
        values: The tensors that the first run left at each location, as values of its trace.
    """

    writes: dict[Location, set[Access]] = field(default_factory=dict)
    reads: dict[Location, set[Access]] = field(default_factory=dict)
    uses: set[Access] | None = field(default_factory=set)
    numbers: set[Location] = field(default_factory=set)
    values: dict[Location, list[int]] = field(default_factory=dict)

    def carried(self) -> Location | None:
        """A location at which a run reads what an earlier one wrote; None: there is none."""
        for location in self.writes:
            if self.reads.get(location) or (location in self.numbers and self.uses != set()):
                return location
        return None

    def refusal(self, crossing: Crossing, calls: tuple[TracedCall, ...]) -> str | None:
        """Return the reason why a cut would separate state from its reader; None: it does not."""
        if not self.writes:
            return None
        for location, written, read in self._sides(crossing, calls):
            tail = written | read == {"tail"}
            head = read == {"head"} and written <= ({"head"} if location in self.numbers else {"head", "both"})
            if not (head or tail):
                path, name = location
                module = f"{path!r}" if path else "the model"
                return (
                    f"{name!r} of {module} is state that a run leaves to the next one, written {_told(written)} and "
                    f"read {_told(read)}: from the second request on, that would not be what the model has there. Cut "
                    "where one side does both"
                )
        return None

    def left_by_tail(self, crossing: Crossing, calls: tuple[TracedCall, ...]) -> frozenset[int]:
        """The values that the tail leaves to the next run."""
        found = (self.values.get(at, ()) for at, written, _ in self._sides(crossing, calls) if written == {"tail"})
        return frozenset(value for values in found for value in values)

    def _sides(
        self, crossing: Crossing, calls: tuple[TracedCall, ...]
    ) -> Iterator[tuple[Location, set[str], set[str]]]:
        """Each location that is read, and on which sides of a cut it is written and read."""
        sides = _Sides(crossing, calls)
        for location, writes in self.writes.items():
            reads = set(self.reads.get(location, ()))
            if location in self.numbers:
                reads |= {Access(None, 0)} if self.uses is None else self.uses
            if reads:  # else it changes, and nobody cares
                yield location, {sides.of(access) for access in writes}, {sides.of(access) for access in reads}


_WORDS = {"head": "in the head", "tail": "in the tail", "both": "by code that both sides run", "unknown": "anywhere"}


def _told(sides: set[str]) -> str:
    return " and ".join(_WORDS[side] for side in sorted(sides))


class _Sides:
    """The sides of a cut on which something happens."""

    def __init__(self, crossing: Crossing, calls: tuple[TracedCall, ...]) -> None:
        self._calls = calls
        self._before = {call.index for level in crossing.levels for call in level.skipped}
        # Of each call around the cut, the one right inside it that contains the cut, or is it.
        self._around = {level.call.index: (level.onward or level.skipped[-1]).index for level in crossing.levels}

    def of(self, access: Access) -> str:
        at = access.call
        if at is None:
            return "unknown"
        if at in self._around:
            return "both" if access.clock <= self._around[at] else "tail"
        above: int | None = at
        while above is not None:
            if above in self._before:
                return "head"
            above = self._calls[above].parent
        return "tail"


class StateProbe(Probe):
    """Watches what modules hold change, and what earlier runs left there being read.

    Attributes:
        held: Where earlier runs left tensors, by the identity of their memory. The tensors are held, too, or others
            might come to lie there.
        every: Whether all of a run is noted, to compare it with another.
    """

    def __init__(self, held: dict[int, tuple[Location, Tensor]] | None = None, *, every: bool = False) -> None:
        self.held = held or {}
        self.writes: dict[Location, set[Access]] = {}
        self.reads: dict[Location, set[Access]] = {}
        self.paths: list[str] = []
        self.told: dict[Access, list[Any]] = {}
        self._every = every
        self._numbers: dict[Call, int] = {}
        self._own: dict[Call, dict[str, Any]] = {}
        self._objects: list[tuple[Location, Any, Any]] = []
        self._all: dict[str, dict[str, Any]] = {}

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number = self._numbers[call] = len(self.paths)
        if call.parent is None:
            self._objects = [(at, value, state_of(value)) for at, value in objects_of(call.module)]
            self._all = _own_all(call.module)
        else:
            self._compare(call.parent)
        self.paths.append(call.path)
        self._own[call] = module_state(call.module)
        caller = Access(number if call.parent is None else self._numbers[call.parent], number)
        self._look((args, kwargs), caller)
        self._tell(caller, lambda: describe(args, kwargs)[:2])

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._end(call)
        access = Access(self._numbers[call], len(self.paths))
        self._look(output, access)
        self._tell(access, lambda: describe((output,), {})[:2])
        if call.parent is None:
            self._find_others(call.module)

    def fail(self, call: Call, error: BaseException) -> None:
        self._end(call)

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._every and where.call is not None:
            access = Access(self._numbers[where.call], len(self.paths))
            self._look((args, kwargs), access)
            self._tell(access, lambda: (str(func), describe_scalars(args, kwargs)))

    def _find_others(self, model: nn.Module | None) -> None:
        """Find what was changed by other code than that of the module which holds it."""
        others = [location for location, value, before in self._objects if state_of(value) != before]
        for path, now in _own_all(model).items():
            others += [(path, name) for name in changed_attributes(self._all.get(path, {}), now)]
        for location in others:
            self.writes.setdefault(location, {Access(None, 0)})

    def _tell(self, access: Access, what: Any) -> None:
        if self._every:
            self.told.setdefault(access, []).append(what())

    def _look(self, value: Any, access: Access) -> None:
        for tensor in tensors_in(value) if self.held else ():
            if known := self.held.get(memory_of(tensor)):
                self.reads.setdefault(known[0], set()).add(access)

    def _end(self, call: Call) -> None:
        self._compare(call)
        del self._own[call]

    def _compare(self, call: Call) -> None:
        before, now = self._own[call], module_state(call.module)
        for name in changed_attributes(before, now):
            self.writes.setdefault((call.path, name), set()).add(Access(self._numbers[call], len(self.paths)))
        self._own[call] = now


_NOTHING = object()
_PLAIN = (int, float, bool, str)
_HOLDS = (list, dict, set)
#: The weights of recurrent layers in one list, which `flatten_parameters` makes.
_RECURRENT_WEIGHTS = {"_flat_weights", "_flat_weight_refs"}
TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__) | {"_is_hf_initialized"} | _RECURRENT_WEIGHTS
_TYPES = (*_PLAIN, *_HOLDS, type(None), Tensor, nn.Module, type)


def memory_of(tensor: Tensor) -> int:
    """The identity of the memory of a tensor; 0: it does not lie in one place."""
    try:
        return storage_id(tensor)
    except NotImplementedError:
        return 0


def module_state(module: nn.Module | None) -> dict[str, Any]:
    """The state of what a module holds as attributes and buffers of its own, but for what torch keeps there."""
    if module is None:
        return {}
    attributes = vars(module)
    state = {
        name: value if type(value) in _PLAIN else state_of(value, 3) if type(value) in _HOLDS else (id(value),)
        for name, value in attributes.items()
        if name not in TORCH_ATTRIBUTES
    }
    for name, value in attributes.get("_buffers", {}).items():
        state[name] = (id(value),)
    return state


def changed_attributes(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, ...]:
    """The names under which there is something else now, sorted."""
    if before == now:
        return ()
    every = before.keys() | now.keys()
    return tuple(sorted(name for name in every if before.get(name, _NOTHING) != now.get(name, _NOTHING)))


def _own_all(model: nn.Module | None) -> dict[str, dict[str, Any]]:
    return {} if model is None else {path: module_state(module) for path, module in model.named_modules()}


def objects_of(model: nn.Module | None) -> Iterator[tuple[Location, Any]]:
    """The objects of other classes that modules hold, such as caches, each once."""
    seen: set[int] = set()
    for path, module in () if model is None else model.named_modules():
        for name, value in vars(module).items():
            if name not in TORCH_ATTRIBUTES and not isinstance(value, _TYPES) and id(value) not in seen:
                seen.add(id(value))
                yield (path, name), value


def held_at(model: nn.Module, locations: set[Location]) -> dict[int, tuple[Location, Tensor]]:
    """The tensors at these locations, by the identity of their memory."""
    found: dict[int, tuple[Location, Tensor]] = {}
    weights = {memory_of(parameter) for parameter in model.parameters()}  # which are no state of a run
    weights |= {memory_of(tensor) for name, tensor in model.named_buffers() if _split_name(name) not in locations}
    for path, name in locations:
        for tensor in _tensors_of(_value_at(model, (path, name)), 4):
            if (memory := memory_of(tensor)) not in weights | {0}:
                found[memory] = (path, name), tensor
    return found


def _split_name(name: str) -> Location:
    path, _, last = name.rpartition(".")
    return path, last


def _value_at(model: nn.Module, location: Location) -> Any:
    attributes = vars(model.get_submodule(location[0]))
    return attributes.get(location[1], attributes.get("_buffers", {}).get(location[1]))


def _tensors_of(value: Any, depth: int) -> Iterator[Tensor]:
    yield from tensors_in(value)
    if depth and not isinstance(value, (*_PLAIN, Tensor, nn.Module, type)):
        inside = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
        for item in (*inside, *dict_of(value).values()):
            yield from _tensors_of(item, depth - 1)


def compare_runs(one: StateProbe, other: StateProbe) -> set[Access]:
    """Find where two runs with the same calls differ in operators, or in arguments that are no tensors."""
    return {access for access in one.told.keys() | other.told.keys() if one.told.get(access) != other.told.get(access)}


def analyze_state(
    model: nn.Module, first: StateProbe, again: Callable[[Probe], None], index_of: Callable[[Tensor], int | None]
) -> State:
    """The state that runs leave to the next, from one run and two more.

    Args:
        again: Runs the model once more, from the state that the last run left.
        index_of: The value in the trace of the first run that a tensor is.
    """
    written = set(first.writes)
    if not written:
        return State()
    values: dict[Location, list[int]] = {}
    for location, tensor in held_at(model, written).values():
        if (index := index_of(tensor)) is not None:
            values.setdefault(location, []).append(index)
    runs: list[StateProbe] = []
    for _ in range(2):
        runs.append(StateProbe(held_at(model, written), every=True))
        again(runs[-1])
        written |= set(runs[-1].writes)
    state = State(values=values)
    for run in runs:  # what the first run alone wrote is made once, and then only read
        for location, accesses in run.writes.items():
            state.writes.setdefault(location, set()).update(accesses)
        for location, accesses in run.reads.items():
            state.reads.setdefault(location, set()).update(accesses)
    state.uses = compare_runs(*runs)
    if any(run.paths != first.paths for run in runs):
        state.uses, state.numbers = None, set(state.writes)
    else:
        state.numbers = {location for location in state.writes if not isinstance(_value_at(model, location), Tensor)}
    return state
