"""Snapshots of a state object: each of its parts by path, compared with those of another time or stage.

A state is read several times in each step of a sequence. Its structure rarely changes: so the way to each part is found
once, and reading it again takes one look-up for each part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import compress, groupby, repeat
from operator import getitem, is_, is_not, ne
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from microtome.engine.attributes import dict_of
from microtome.engine.pytree import is_plain_class
from microtome.engine.torch_internals import DisableTorchFunction, versions_of
from microtome.errors import Unsupported
from microtome.split.analysis.structure_spec import PLAIN
from microtome.split.execution.placeholder import Placeholder

#: The way from a state object to one of its parts: names of attributes, indices of lists, keys of dicts in a tuple.
Path = tuple[Any, ...]

#: Integer tensors of up to so many elements are known by value in every stage: models compute masks from them.
_MAX_VALUES = 16
#: The classes of leaves that hold no other part.
LEAVES = frozenset((*PLAIN, Tensor, torch.dtype, torch.device))
_COMPARED = frozenset((*PLAIN, torch.dtype, torch.device, tuple))
#: The most frequent dtypes of tensors that are not known by value.
LARGE_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


class StatePart(NamedTuple):
    """A part of a state object at some time.

    Attributes:
        value: A tensor, plain value, dtype, device or class, or the list, dict or object that holds further parts.
        version: The version counter of a tensor, which in-place operators increment.
    """

    value: Any
    version: Any = 0

    @classmethod
    def of(cls, value: Any) -> StatePart:
        return cls(value, versions_of([value])[0] if type(value) is Tensor else 0)

    def is_same(self, other: StatePart) -> bool:
        if self.value is other.value:
            return bool(self.version == other.version)
        return is_equal(self.value, other.value)


def is_equal(value: Any, other: Any) -> bool:
    """Whether two plain values are equal; False for parts that are compared by identity."""
    if type(value) is not type(other) or type(value) not in _COMPARED:
        return False
    return repr(value) == repr(other) if type(value) is float else bool(value == other)  # 0.0 is not -0.0


class _Holder(NamedTuple):
    """A list, dict or object in a state, which holds other parts.

    Attributes:
        position: Its number among the parts.
        items: The list or dict, or the `__dict__` of the object; None: its parts are not looked at here, since it is a
            tuple, or holds itself.
        keys: The keys of a dict, or the length of a list.
        key_types: Their types in a dict, where 1 and True are one key.
    """

    position: int
    value: Any
    items: Any
    keys: Any
    key_types: list[type] | None

    def spell(self) -> str:
        """Describe it for a digest, without the parts that it holds."""
        cls = type(self.value)
        if self.items is None:
            return cls.__name__
        if cls is list:
            return f"list {self.keys}"
        return f"{cls.__name__} {[key if type(key) in PLAIN else str(key) for key in self.keys]}"


class StateLayout:
    """The structure of a state object: its parts in a fixed order, holders before what they hold.

    Attributes:
        paths: The path of each part.
        positions: The position of each path.
        tensors: The positions of tensors, without those of a subclass.
        tensor_numbers: The number of each of these.
        identified: The positions of parts that are compared by identity.
        placeholders: The positions of tensors whose values another stage has.
    """

    def __init__(self, state: Any) -> None:
        self.paths: list[Path] = []
        self._types: list[type] = []
        # Of each part but the first: the items of its holder, and its key there.
        self._parents: list[Any] = []
        self._steps: list[Any] = []
        self._holders: list[_Holder] = []
        self._state = state
        self._add(state, (), set())
        self._holder_positions = [holder.position for holder in self._holders]
        self._held = [holder.value for holder in self._holders]
        self._lists = [holder.items for holder in self._holders if type(holder.items) is list]
        self._lengths = list(map(len, self._lists))
        dicts = [holder for holder in self._holders if isinstance(holder.items, dict)]
        self._dicts = [holder.items for holder in dicts]
        self._keys = [holder.keys for holder in dicts]
        self._typed_dicts = [holder.items for holder in dicts if holder.key_types is not None]
        self._key_types = [holder.key_types for holder in dicts if holder.key_types is not None]
        objects = [holder for holder in dicts if holder.items is not holder.value]
        self._objects = [holder.value for holder in objects]
        self._namespaces = [holder.items for holder in objects]
        self.positions = {path: position for position, path in enumerate(self.paths)}
        self.tensors = [position for position, cls in enumerate(self._types) if cls is Tensor]
        self.tensor_numbers = {position: number for number, position in enumerate(self.tensors)}
        self.identified = {position for position, cls in enumerate(self._types) if cls not in _COMPARED}
        self.placeholders = [position for position, cls in enumerate(self._types) if issubclass(cls, Placeholder)]
        self._all_tensors = [position for position, cls in enumerate(self._types) if issubclass(cls, Tensor)]
        self._plain = [at for at, cls in enumerate(self._types) if cls in _COMPARED and cls is not torch.device]
        leaves = set(range(len(self.paths))).difference(self._all_tensors, self._plain)
        # Classes, devices and modules.
        self._others = sorted(leaves.difference(holder.position for holder in self._holders))
        kinds = dict.fromkeys(range(len(self.paths)), "value") | dict.fromkeys(self._all_tensors, "tensor")
        kinds |= dict.fromkeys(self._others, "other") | {holder.position: holder.spell() for holder in self._holders}
        self._text = str(list(kinds.values()))

    def _add(self, value: Any, path: Path, visited: set[int]) -> None:
        cls, position = type(value), len(self.paths)
        self.paths.append(path)
        self._types.append(cls)
        if cls in LEAVES or isinstance(value, Tensor | type | nn.Module):
            return
        items = None if id(value) in visited else _items_of(value, path)
        visited.add(id(value))
        keys: Any = list(items) if isinstance(items, dict) else None if items is None else len(items)
        key_types = list(map(type, keys)) if cls is dict and keys is not None else None
        self._holders.append(_Holder(position, value, items, keys, key_types))
        if items is None:
            return
        for key in keys if isinstance(items, dict) else range(keys):
            self._parents.append(items)
            self._steps.append(key)
            self._add(items[key], (*path, (key,) if items is value and cls is dict else key), visited)

    def read(self) -> list[Any] | None:
        """The values of all parts as they are now; None: the structure has changed."""
        try:
            values = [self._state, *map(getitem, self._parents, self._steps)]
            # As `dict_of`, without a call of a Python function for each object.
            namespaces = list(map(object.__getattribute__, self._objects, repeat("__dict__")))
        except (KeyError, IndexError, AttributeError):
            return None
        if list(map(type, values)) != self._types:
            return None
        is_same = (
            all(map(is_, [values[at] for at in self._holder_positions], self._held))
            and list(map(len, self._lists)) == self._lengths
            and list(map(list, self._dicts)) == self._keys
            and [list(map(type, items)) for items in self._typed_dicts] == self._key_types
            and all(map(is_, namespaces, self._namespaces))
        )
        return values if is_same else None

    def spell(self, values: list[Any], *, numbers: bool) -> str:
        """All that every stage knows of these values; see `digest_of`."""
        plain = [values[at] for at in self._plain]
        others = [getattr(values[at], "__name__", "-") for at in self._others]
        tensors = [values[at] for at in self._all_tensors]
        shapes, dtypes = [one.shape for one in tensors], [one.dtype for one in tensors]
        known = []
        if numbers and not LARGE_DTYPES.issuperset(dtypes):
            known = [(at, one.tolist()) for at, one in enumerate(tensors) if is_known_by_value(one)]
        # Runs of equal ones, since those of all layers mostly are, and text takes long to write.
        runs = [[(key, len(list(run))) for key, run in groupby(items)] for items in (shapes, dtypes)]
        return f"{self._text}{plain}{others}{runs}{known}"


def _items_of(value: Any, path: Path) -> Any:
    """The list or dict of the parts of a holder; None: it is a leaf."""
    cls: Any = type(value)
    if cls is list or cls is dict:
        return value
    if cls is tuple and all(type(item) in PLAIN for item in value):
        return None
    if not is_plain_class(cls) or not cls.__dictoffset__:
        where = format_path(path)
        raise Unsupported(f"the state holds a {cls.__name__} at {where}, which cannot be described")
    return dict_of(value)


class StateSnapshot(Mapping[Path, StatePart]):
    """The parts of a state object at some time, by path, holders before what they hold."""

    def __init__(self, layout: StateLayout, values: list[Any]) -> None:
        self.layout = layout
        self.part_values = values
        #: The version counters of the tensors of the layout, in order.
        self._versions = versions_of([values[position] for position in layout.tensors])

    @classmethod
    def of(cls, state: Any, last: StateSnapshot | None = None) -> StateSnapshot:
        """Read a state object.

        Args:
            last: An earlier snapshot of the same object.

        Raises:
            Unsupported: It holds a part that cannot be described.
        """
        values = None if last is None else last.layout.read()
        if last is not None and values is not None:
            return cls(last.layout, values)
        layout = StateLayout(state)
        values = layout.read()
        assert values is not None
        return cls(layout, values)

    def __getitem__(self, path: Path) -> StatePart:
        return self._part(self.layout.positions[path])

    def __iter__(self) -> Iterator[Path]:
        return iter(self.layout.paths)

    def __len__(self) -> int:
        return len(self.layout.paths)

    def __contains__(self, path: object) -> bool:
        return path in self.layout.positions

    def _part(self, position: int) -> StatePart:
        number = self.layout.tensor_numbers.get(position)
        return StatePart(self.part_values[position], 0 if number is None else self._versions[number])

    def changed_positions(self, before: StateSnapshot) -> list[int]:
        """The positions of the parts that changed since another snapshot with the same layout."""
        values, earlier = self.part_values, before.part_values
        replaced = compress(range(len(values)), map(is_not, values, earlier))
        identified = self.layout.identified
        changed = [at for at in replaced if at in identified or not is_equal(values[at], earlier[at])]
        if self._versions == before._versions:
            return changed
        written = compress(self.layout.tensors, map(ne, self._versions, before._versions))
        return sorted({*changed, *written})

    def changes_since(self, before: StateSnapshot) -> dict[Path, StatePart]:
        """The parts that changed since another snapshot with the same layout."""
        return {self.layout.paths[at]: self._part(at) for at in self.changed_positions(before)}

    def placeholders(self) -> Iterator[tuple[Path, Placeholder]]:
        """The tensors whose values another stage has."""
        for position in self.layout.placeholders:
            yield self.layout.paths[position], self.part_values[position]


def has_same_layout(before: Mapping[Path, StatePart], after: Mapping[Path, StatePart]) -> bool:
    """Whether these are snapshots of one object, whose structure has not changed."""
    return isinstance(before, StateSnapshot) and isinstance(after, StateSnapshot) and before.layout is after.layout


def changed_parts(before: Mapping[Path, StatePart], after: Mapping[Path, StatePart]) -> dict[Path, StatePart]:
    """The parts that are new or changed."""
    if isinstance(before, StateSnapshot) and isinstance(after, StateSnapshot) and before.layout is after.layout:
        return after.changes_since(before)
    return {path: part for path, part in after.items() if path not in before or not before[path].is_same(part)}


def format_path(path: Iterable[Any]) -> str:
    """Format a path as Python code, such as `.layers[3].keys`."""
    steps = (f".{step}" if isinstance(step, str) else f"[{step!r}]" for step in map(_unwrap_key, path))
    return "".join(steps) or "its root"


def _unwrap_key(step: Any) -> Any:
    return step[0] if isinstance(step, tuple) else step


# -- digests -----------------------------------------------------------------------------------------------------------


def digest_of(states: Iterable[Any], *, values: bool = True) -> str:
    """A digest of the contents of state objects: equal in all stages, whichever of them has the values.

    Args:
        values: Include the values of small integer tensors, which are known in every stage.
    """
    return digest_of_snapshots(map(StateSnapshot.of, states), values=values)


def digest_of_snapshots(snapshots: Iterable[StateSnapshot], *, values: bool = True) -> str:
    """The `digest_of` state objects with these parts."""
    with DisableTorchFunction():  # else reading the shape of a placeholder calls Python code
        texts = [snapshot.layout.spell(snapshot.part_values, numbers=values) for snapshot in snapshots]
    return xxh3_64_hexdigest("\n".join(texts).encode())


def is_known_by_value(tensor: Tensor) -> bool:
    """Whether a tensor is a few integers, which models compute masks and positions from."""
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex or tensor.numel() > _MAX_VALUES:
        return False
    return not isinstance(tensor, Placeholder) and not tensor.is_meta
