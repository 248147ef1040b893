"""The contents of a state object: reading them by path, finding changes, and applying these to another object.

Each stage has a state object of its own. The tensors that calls of other stages wrote are placeholders there: shapes,
numbers and flags are right in every stage, and values are where they were computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from microtome.engine.attributes import dict_of
from microtome.engine.pytree import is_plain_class, is_state, state_classes
from microtome.engine.torch_internals import version_of
from microtome.errors import BadBoundary, Unsupported
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

#: The way from a state object to one of its parts: names of attributes, indices of lists, keys of dicts in a tuple.
Path = tuple[Any, ...]

#: Integer tensors of up to so many elements are sent by value: models compute masks and positions from them.
_MAX_VALUES = 16
_PLAIN = (bool, int, float, str, type(None))
_LEAVES = frozenset((*_PLAIN, Tensor, torch.dtype, torch.device))
_MISSING = object()


class StatePart(NamedTuple):
    """A part of a state object at some time.

    Attributes:
        value: A tensor, plain value, dtype, device or class, or the list, dict or object that holds further parts.
        version: The version counter of a tensor, which in-place operators increment.
    """

    value: Any
    version: int = 0

    def is_same(self, other: StatePart) -> bool:
        if self.value is other.value:
            is_unversioned = type(self.value) is Tensor and self.value.is_inference()  # it may have been written to
            return self.version == other.version and not is_unversioned
        return type(self.value) is type(other.value) and type(self.value) in _COMPARED and self.value == other.value


_COMPARED = (*_PLAIN, torch.dtype, torch.device, tuple)


def parts_of(state: Any) -> dict[Path, StatePart]:
    """Every part of a state object by its path, holders before what they hold."""
    parts: dict[Path, StatePart] = {}
    _collect(state, (), parts, set())
    return parts


def _collect(value: Any, path: Path, parts: dict[Path, StatePart], visited: set[int]) -> None:
    cls = type(value)
    parts[path] = StatePart(value, version_of(value) if cls is Tensor else 0)
    if cls in _LEAVES or isinstance(value, Tensor) or id(value) in visited:
        return
    if (children := _children(value, path)) is not None:
        visited.add(id(value))
        for step, child in children:
            _collect(child, (*path, step), parts, visited)


def part_at(state: Any, path: Path) -> StatePart | None:
    """The part at a path; None: there is none."""
    value = _value_at(state, path)
    return None if value is _MISSING else _part(value)


def _part(value: Any) -> StatePart:
    return StatePart(value, version_of(value) if type(value) is Tensor else 0)


def _children(value: Any, path: Path) -> Iterable[tuple[Any, Any]] | None:
    """The parts of a list, dict or object; None for a leaf."""
    if type(value) is list:
        return enumerate(value)
    if type(value) is dict:
        return [((key,), item) for key, item in value.items()]
    if isinstance(value, type | nn.Module) or (type(value) is tuple and all(map(_is_plain, value))):
        return None
    cls: Any = type(value)
    if not is_plain_class(cls) or not cls.__dictoffset__:
        where = format_path(path)
        raise Unsupported(f"the state holds a {type(value).__name__} at {where}, which cannot be described")
    return dict_of(value).items()


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


def _value_at(state: Any, path: Path) -> Any:
    value = state
    for step in path:
        if isinstance(step, str):
            value = dict_of(value).get(step, _MISSING)
        elif isinstance(step, int):
            value = value[step] if isinstance(value, list) and 0 <= step < len(value) else _MISSING
        else:
            value = value.get(step[0], _MISSING) if isinstance(value, dict) else _MISSING
        if value is _MISSING:
            break
    return value


def format_path(path: Iterable[Any]) -> str:
    """Format a path as Python code, such as `.layers[3].keys`."""
    steps = (f".{step}" if isinstance(step, str) else f"[{step!r}]" for step in map(_unwrap_key, path))
    return "".join(steps) or "its root"


def _unwrap_key(step: Any) -> Any:
    return step[0] if isinstance(step, tuple) else step


# -- describing --------------------------------------------------------------------------------------------------------


def find_changes(
    before: dict[Path, StatePart], after: dict[Path, StatePart], *, by_others: bool = True
) -> list[StateChange]:
    """The parts that are new or changed, described without the values of tensors, and those that are gone.

    Args:
        by_others: Include placeholders: tensors that other stages wrote.
    """
    changes = [
        describe_change(path, part)
        for path, part in after.items()
        if (path not in before or not before[path].is_same(part))
        and (by_others or not isinstance(part.value, Placeholder))
    ]
    gone = [path for path in before if path not in after and (not path or path[:-1] in after)]
    return changes + [StateChange(_to_steps(path), StateRemoved()) for path in reversed(gone)]


def describe_change(path: Path, part: StatePart) -> StateChange:
    """Describe a part as it is now."""
    return StateChange(_to_steps(path), describe_part(part, path))


def changed_paths(before: dict[Path, StatePart], after: dict[Path, StatePart]) -> tuple[Path, ...]:
    """The paths of the parts that are new, changed or gone."""
    paths = dict.fromkeys([*after, *before])
    return tuple(path for path in paths if not _is_same(before.get(path), after.get(path)))


def _is_same(before: StatePart | None, after: StatePart | None) -> bool:
    return before is not None and after is not None and before.is_same(after)


def describe_state(state: Any) -> list[StateChange]:
    """All of a state object, as changes of nothing."""
    return find_changes({}, parts_of(state))


def describe_part(part: StatePart, path: Path) -> StateItem:
    """Describe a part without the values of a tensor, unless they are a few integers."""
    value = part.value
    if isinstance(value, Tensor):
        if _is_sent_by_value(value):
            dtype = str(value.dtype).removeprefix("torch.")
            return StateValues(list(value.shape), dtype, value.reshape(-1).tolist())
        return PlaceholderSpec.of(value, requires_grad=False)
    if type(value) in _PLAIN:
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


def digest_of(states: Iterable[Any], *, values: bool = True) -> str:
    """A digest of the contents of state objects: equal in all stages, whichever of them has the values.

    Args:
        values: Include the values of small integer tensors, which are known in every stage.
    """
    return digest_of_parts(map(parts_of, states), values=values)


def digest_of_parts(states: Iterable[dict[Path, StatePart]], *, values: bool = True) -> str:
    """The `digest_of` state objects with these parts."""
    described = [_spell(part.value, values) for parts in states for part in parts.values()]
    return xxh3_64_hexdigest(repr(described).encode())


def _spell(value: Any, values: bool) -> Any:
    """Describe a part by the contents that all stages know."""
    if isinstance(value, Tensor):
        numbers = value.tolist() if values and _is_sent_by_value(value) else None
        return tuple(value.shape), value.dtype, numbers
    cls = type(value)
    if cls in _COMPARED and cls is not torch.device:
        return value
    if cls is list:
        return "list", len(value)
    if cls is dict:
        return "dict", [str(key) for key in value]
    if isinstance(value, type | torch.device | nn.Module):
        return getattr(value, "__name__", "-")
    return cls.__name__, list(dict_of(value))


def _is_sent_by_value(tensor: Tensor) -> bool:
    """Whether a tensor is a few integers, which models compute masks and positions from."""
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex or tensor.numel() > _MAX_VALUES:
        return False
    return not isinstance(tensor, Placeholder) and not tensor.is_meta


def to_path(steps: Iterable[StateStep]) -> Path:
    """The path of a change."""
    return tuple(tuple(step) if isinstance(step, list) else step for step in steps)


def _to_steps(path: Path) -> list[StateStep]:
    return [[step[0]] if isinstance(step, tuple) else step for step in path]


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
    for change in changes:
        path = to_path(change.path)
        if keeps_tensors and _keeps(_value_at(state, path), change.item):
            continue
        if isinstance(change.item, StateRemoved):
            _remove(state, path)
            continue
        if isinstance(change.item, StateNode) and type(_value_at(state, path)).__name__ == change.item.name:
            continue  # a holder of the same kind: the parts that changed follow
        value = _restore(change.item, path, device, make_tensor)
        if path:
            set_part(state, path, value)
        else:
            state = value
    return state


def _keeps(value: Any, item: StateItem) -> bool:
    """Whether a tensor is the stage's own, or has the values that an item states."""
    if not isinstance(value, Tensor) or isinstance(value, Placeholder):
        return False
    return not isinstance(item, StateValues) or describe_part(StatePart(value), ()) == item


def _restore(
    item: StateItem,
    path: Path,
    device: torch.device | None,
    make_tensor: Callable[[PlaceholderSpec, Path], Tensor],
) -> Any:
    if isinstance(item, PlaceholderSpec):
        return make_tensor(item, path)
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
    holder, step = _value_at(state, path[:-1]), path[-1]
    if isinstance(step, str) and holder is not _MISSING and type(holder).__dictoffset__:
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
    if _value_at(state, path) is _MISSING:
        raise BadBoundary(f"expected a part of the state to remove, got {format_path(path)}, which it lacks")
    del parts[key]


def kind_of(states: Iterable[Any]) -> str:
    """The classes of state objects and of their parts: calls change other parts of another kind of state."""
    values = (part.value for state in states for part in parts_of(state).values())
    return ", ".join(sorted({type(value).__qualname__ for value in values if type(value) not in _LEAVES}))


def has_tensors(state: Any) -> bool:
    """Whether a state object holds tensors other than a few integers: a step has written to it."""
    tensors = (part.value for part in parts_of(state).values() if isinstance(part.value, Tensor))
    return any(tensor.is_floating_point() and tensor.numel() for tensor in tensors)


def fill_placeholders(leaf: Any) -> Any:
    """A copy of a state object with tensors of zeros, to analyze a model on; any other leaf unchanged."""
    if not is_state(leaf):
        return leaf

    def make_zeros(spec: PlaceholderSpec, path: Path) -> Tensor:
        return torch.zeros(spec.shape, dtype=PLACEHOLDER_DTYPES[spec.dtype], device=_value_at(leaf, path).device)

    devices = {str(part.value.device) for part in parts_of(leaf).values() if isinstance(part.value, Tensor)}
    return apply_changes(None, describe_state(leaf), torch.device(min(devices, default="cpu")), make_zeros)
