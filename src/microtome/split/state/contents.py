"""The contents of a state object: reading them by path, finding changes, and applying these to another object.

Each stage has a state object of its own. The tensors that calls of other stages wrote are placeholders there: shapes,
numbers and flags are right in every stage, and values are where they were computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine.attributes import dict_of
from microtome.engine.pytree import is_state, state_classes
from microtome.engine.torch_internals import versions_of
from microtome.errors import BadBoundary, Unsupported
from microtome.split.analysis.structure_spec import PLAIN
from microtome.split.boundary.schema import (
    PLACEHOLDER_DTYPES,
    PlaceholderSpec,
    PlainItem,
    StateChange,
    StateClass,
    StateDevice,
    StateDtype,
    StateItem,
    StateNode,
    StateRemoved,
    StateStep,
    StateValues,
)
from microtome.split.execution.placeholder import Placeholder
from microtome.split.state.snapshot import (
    LARGE_DTYPES,
    LEAVES,
    Path,
    StatePart,
    StateSnapshot,
    changed_parts,
    format_path,
    has_same_layout,
    is_equal,
    is_known_by_value,
)

#: The value of a part that a state lacks.
MISSING: Any = object()


#: The paths of several parts: the path of a holder, and the last steps of the paths of its parts.
PathGroups = Sequence[tuple[Path, list[Any]]]


def group_paths(paths: Iterable[Path]) -> PathGroups:
    """Group paths by the holders of the parts, so that each of these is found once."""
    groups: list[tuple[Path, list[Any]]] = []
    for path in paths:
        if not path or not groups or groups[-1][0] != path[:-1]:
            groups.append((path[:-1], []))
        groups[-1][1].extend(path[-1:])
    return groups


class StateParts(NamedTuple):
    """Some parts of a state object at some time.

    Attributes:
        values: Their values; `MISSING` for a part that there is not.
        versions: The version counters of those that are tensors, in order.
    """

    values: list[Any]
    versions: list[Any]

    def describe_changes(self, paths: Sequence[Path], before: StateParts) -> dict[Path, StateChange]:
        """Describe those that changed since another time, by path.

        Args:
            paths: The path of each part.
        """
        changes: dict[Path, StateChange] = {}
        gone: list[Path] = []
        written = set() if self.versions == before.versions else self._written_since(before)
        for path, value, old in zip(paths, self.values, before.values, strict=True):
            if value is old:
                if not written or id(value) not in written:
                    continue
            elif type(value) is not Tensor and is_equal(value, old):
                continue
            if value is MISSING:
                gone.append(path)
            else:
                changes[path] = StateChange(_to_steps(path), describe_value(value, path))
        if gone:
            changes |= {path: removed_change(path) for path in reversed(gone) if path[:-1] not in gone}
        return changes

    def _written_since(self, before: StateParts) -> set[int]:
        """The ids of the tensors that are still the same, and were written to."""
        then = dict(zip(before._tensor_ids(), before.versions, strict=True))
        now = zip(self._tensor_ids(), self.versions, strict=True)
        return {key for key, version in now if key in then and then[key] != version}

    def _tensor_ids(self) -> list[int]:
        return [id(value) for value in self.values if type(value) is Tensor]


def parts_at(state: Any, groups: PathGroups) -> StateParts:
    """The parts at grouped paths."""
    values: list[Any] = []
    for holder_path, steps in groups:
        holder = _value_at(state, holder_path)
        if steps and type(steps[0]) is str:
            items = dict_of(holder)
            values += map(items.get, steps, repeat(MISSING))
        else:
            values += [_value_at(holder, (step,)) for step in steps] if steps else [holder]
    return StateParts(values, versions_of([value for value in values if type(value) is Tensor]))


def part_at(state: Any, path: Path) -> StatePart | None:
    """The part at a path; None: there is none."""
    value = _value_at(state, path)
    return None if value is MISSING else StatePart.of(value)


def _value_at(state: Any, path: Path) -> Any:
    value = state
    for step in path:
        cls = type(step)
        if cls is str:
            value = dict_of(value).get(step, MISSING)
        elif cls is int:
            value = value[step] if isinstance(value, list) and 0 <= step < len(value) else MISSING
        else:
            value = value.get(step[0], MISSING) if isinstance(value, dict) else MISSING
        if value is MISSING:
            break
    return value


# -- describing --------------------------------------------------------------------------------------------------------


def find_changes(
    before: Mapping[Path, StatePart], after: Mapping[Path, StatePart], *, by_others: bool = True
) -> list[StateChange]:
    """The parts that are new or changed, described without the values of tensors, and those that are gone.

    Args:
        by_others: Include placeholders: tensors that other stages wrote.
    """
    if isinstance(before, StateSnapshot) and isinstance(after, StateSnapshot) and before.layout is after.layout:
        paths, values = after.layout.paths, after.part_values
        return [
            StateChange(_to_steps(paths[at]), describe_value(values[at], paths[at]))
            for at in after.changed_positions(before)
            if by_others or not isinstance(values[at], Placeholder)
        ]
    changes = [
        describe_change(path, part)
        for path, part in changed_parts(before, after).items()
        if by_others or not isinstance(part.value, Placeholder)
    ]
    gone = [path for path in _removed(before, after) if not path or path[:-1] in after]
    return changes + [removed_change(path) for path in reversed(gone)]


def _removed(before: Mapping[Path, StatePart], after: Mapping[Path, StatePart]) -> list[Path]:
    return [] if has_same_layout(before, after) else [path for path in before if path not in after]


def describe_change(path: Path, part: StatePart) -> StateChange:
    """Describe a part as it is now."""
    return StateChange(_to_steps(path), describe_value(part.value, path))


def removed_change(path: Path) -> StateChange:
    """Describe a part that is gone."""
    return StateChange(_to_steps(path), StateRemoved())


def changed_paths(before: StateSnapshot, after: StateSnapshot) -> tuple[Path, ...]:
    """The paths of the parts that are new, changed or gone."""
    if before.layout is after.layout:
        paths = after.layout.paths
        return tuple([paths[at] for at in after.changed_positions(before)])
    return (*changed_parts(before, after), *_removed(before, after))


def describe_state(state: Any) -> list[StateChange]:
    """All of a state object, as changes of nothing."""
    return find_changes({}, StateSnapshot.of(state))


def describe_value(value: Any, path: Path) -> StateItem:
    """Describe a part without the values of a tensor, unless they are a few integers."""
    if isinstance(value, Tensor):
        if value.dtype in LARGE_DTYPES or not is_known_by_value(value):
            return PlaceholderSpec.of(value, requires_grad=False)
        return StateValues(list(value.shape), str(value.dtype).removeprefix("torch."), value.reshape(-1).tolist())
    if type(value) in PLAIN:
        return PlainItem(value)
    if isinstance(value, torch.dtype):
        return StateDtype(str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return StateDevice()
    if isinstance(value, type):
        return StateClass(_class_name(value, path))
    if type(value) in (list, dict):
        return StateNode(type(value).__name__)
    if isinstance(value, tuple | nn.Module):
        raise Unsupported(f"the state changes a {type(value).__name__} at {format_path(path)}, which cannot be sent")
    return StateNode(_class_name(type(value), path))


def has_same_value(value: Any, other: Any) -> bool:
    """Whether two tensors are the same few integers, which all stages know by value."""
    tensors = isinstance(value, Tensor) and isinstance(other, Tensor)
    if not tensors or not is_known_by_value(value) or not is_known_by_value(other):
        return False
    return describe_value(value, ()) == describe_value(other, ())


def to_path(steps: Iterable[StateStep]) -> Path:
    """The path of a change."""
    path = tuple(steps)
    return tuple([tuple(step) if type(step) is list else step for step in path]) if list in map(type, path) else path


def _to_steps(path: Path) -> list[StateStep]:
    return [[step[0]] if type(step) is tuple else step for step in path] if tuple in map(type, path) else list(path)


def _class_name(cls: type, path: Path) -> str:
    if find_class(cls.__name__) is not cls:
        raise Unsupported(f"the state holds a {cls.__name__} at {format_path(path)}, which other stages cannot create")
    return cls.__name__


def find_class(name: str) -> type | None:
    """The class of parts of states by this name: one in the module of a declared class of states, or a base of it."""
    for declared in state_classes():
        for base in declared.__mro__:
            found = getattr(sys.modules.get(base.__module__), name, None)
            if isinstance(found, type) and found.__module__ == base.__module__ != "builtins":
                return found
    return None


# -- applying ----------------------------------------------------------------------------------------------------------


def apply_changes(
    state: Any,
    changes: Iterable[StateChange],
    device: torch.device | None,
    make_tensor: Callable[[PlaceholderSpec, Path], Tensor],
    *,
    keeps_tensors: bool = False,
) -> Any:
    """Change a state object as another one changed; return it, or the new one if there is none yet.

    Args:
        device: The device of small tensors, and of devices that the state holds.
        make_tensor: Makes what stands for a tensor.
        keeps_tensors: Keep the tensors that this object has values of: they are the stage's own.
    """
    last_holder: tuple[Path, Any] | None = None  # most changes are of parts of the same holder as the one before
    for steps, item in changes:
        path = to_path(steps)
        if keeps_tensors and _keeps(_value_at(state, path), item):
            continue
        if type(item) is PlaceholderSpec:
            value = make_tensor(item, path)
        else:
            if isinstance(item, StateNode | StateRemoved):
                last_holder = None
                if isinstance(item, StateRemoved):
                    _remove(state, path)
                    continue
                if type(_value_at(state, path)).__name__ == item.name:
                    continue  # a holder of the same kind: the parts that changed follow
            value = _restore(item, path, device)
        if not path:
            state = value
            continue
        if last_holder is None or last_holder[0] != path[:-1]:
            last_holder = path[:-1], _value_at(state, path[:-1])
        _set_item(last_holder[1], path, value)
    return state


def _keeps(value: Any, item: StateItem) -> bool:
    """Whether a tensor is the stage's own, or has the values that an item states."""
    if not isinstance(value, Tensor) or isinstance(value, Placeholder):
        return False
    return not isinstance(item, StateValues) or describe_value(value, ()) == item


def _restore(item: StateItem, path: Path, device: torch.device | None) -> Any:
    if isinstance(item, PlainItem):
        return item.value
    if isinstance(item, StateValues):
        return torch.tensor(item.values, dtype=PLACEHOLDER_DTYPES[item.dtype], device=device).reshape(item.shape)
    if isinstance(item, StateDtype):
        return PLACEHOLDER_DTYPES[item.name]
    if isinstance(item, StateDevice):
        return device or torch.device("cpu")
    assert isinstance(item, StateNode | StateClass)
    if isinstance(item, StateNode) and item.name in ("list", "dict"):
        return [] if item.name == "list" else {}
    cls = find_class(item.name)
    if cls is None:
        raise BadBoundary(f"expected a class of states at {format_path(path)}, got {item.name!r:.80}")
    return cls if isinstance(item, StateClass) else object.__new__(cls)


def set_part(state: Any, path: Path, value: Any) -> None:
    """Set the part at a path, whose holder must exist."""
    _set_item(_value_at(state, path[:-1]), path, value)


def _set_item(holder: Any, path: Path, value: Any) -> None:
    step = path[-1]
    if type(step) is str and holder is not MISSING and type(holder).__dictoffset__:
        dict_of(holder)[step] = value
    elif isinstance(step, int) and isinstance(holder, list) and 0 <= step <= len(holder):
        holder[step : step + 1] = [value]
    elif isinstance(step, tuple) and isinstance(holder, dict):
        holder[step[0]] = value
    else:
        raise BadBoundary(f"expected a change of a part of the state, got one at {format_path(path)}, which it lacks")


def _remove(state: Any, path: Path) -> None:
    holder, step = _value_at(state, path[:-1]), path[-1]
    key = step[0] if isinstance(step, tuple) else step
    parts = dict_of(holder) if isinstance(step, str) else holder
    if _value_at(state, path) is MISSING:
        raise BadBoundary(f"expected a part of the state to remove, got {format_path(path)}, which it lacks")
    del parts[key]


def kind_of(states: Iterable[Any]) -> str:
    """The classes of state objects and of their parts: calls change other parts of another kind of state."""
    values = (part.value for state in states for part in StateSnapshot.of(state).values())
    return ", ".join(sorted({type(value).__qualname__ for value in values if type(value) not in LEAVES}))


def has_tensors(state: StateSnapshot) -> bool:
    """Whether a state object holds tensors other than a few integers: a step has written to it."""
    tensors = (value for value in state.part_values if isinstance(value, Tensor))
    return any(tensor.is_floating_point() and tensor.numel() for tensor in tensors)


def fill_placeholders(leaf: Any) -> Any:
    """A copy of a state object with tensors of zeros, to analyze a model on; any other leaf unchanged."""
    if not is_state(leaf):
        return leaf

    def make_zeros(spec: PlaceholderSpec, path: Path) -> Tensor:
        return torch.zeros(spec.shape, dtype=PLACEHOLDER_DTYPES[spec.dtype], device=_value_at(leaf, path).device)

    filled = apply_changes(None, describe_state(leaf), None, make_zeros)
    for path, part in StateSnapshot.of(leaf).items():  # layers may be on several devices
        if isinstance(part.value, torch.device):
            set_part(filled, path, part.value)
        elif isinstance(part.value, Tensor) and is_known_by_value(part.value):
            set_part(filled, path, part.value.detach().clone())
    return filled
