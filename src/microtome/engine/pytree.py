"""Walk, flatten and rebuild the structures (pytrees) that modules take and return.

A structure is a tuple, list, set, mapping, dataclass or record, nested at will; everything else is a leaf. `node_type`
alone decides which, and all walkers are built on it. As in `torch.utils._pytree`, a node type lists the children of a
value by key and rebuilds a value from other children. Unlike there, no code of the user's classes is run: fields and
attributes are read from `__dict__` and slots, and constructors are not called.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from torch import Size, Tensor, UntypedStorage, device, dtype, layout, memory_format, nn, strided

from microtome.devices.base import accelerators_of
from microtome.engine.attributes import attributes_of, dict_of, fields_of
from microtome.errors import Unsupported

# -- node types --------------------------------------------------------------------------------------------------------


_MISSING = object()


class NodeType(NamedTuple):
    """A kind of structure.

    Attributes:
        children: The children of a value, in order.
        items: The same with their keys: indices, keys of a mapping, names of attributes; None in a set.
        rebuild: Make a value like this one from other children.
    """

    children: Callable[[Any], Iterable[Any]]
    items: Callable[[Any], Iterable[tuple[Any, Any]]]
    rebuild: Callable[[Any, list[Any]], Any]


def _rebuild_sequence(value: Any, children: list[Any]) -> Any:
    """Make a list, tuple or set of the same type, without its constructor, which may take other arguments."""
    if isinstance(value, tuple):
        cls: Any = type(value)
        if hasattr(cls, "n_sequence_fields"):  # a struct sequence, such as the output of `torch.max(x, 0)`
            return cls(children)
        # `_make` of a named tuple bypasses a `__new__` that checks its arguments, such as that of a PackedSequence.
        return cls._make(children) if hasattr(cls, "_fields") else tuple.__new__(cls, children)
    if type(value) in (list, set, frozenset) or isinstance(value, frozenset):
        return type(value)(children)
    copied: Any = copy.copy(value)
    copied.clear()
    copied.extend(children) if isinstance(value, list) else copied.update(children)
    return copied


def _rebuild_dict(value: dict[Any, Any], children: list[Any]) -> Any:
    copied = copy.copy(value)
    for key, child in zip(value, children, strict=True):
        if dict.get(copied, key, _MISSING) is not child:
            copied[key] = child  # not by `update`, which outputs of transformers refuse
    return copied


def _rebuild_dataclass(value: Any, children: list[Any]) -> Any:
    own = attributes_of(value)
    changed = dict(zip(fields_of(value), children, strict=True))
    return _set_attributes(copy.copy(value), value, {name: item for name, item in changed.items() if name in own})


def _rebuild_record(value: Any, children: list[Any]) -> Any:
    changed = dict(zip(attributes_of(value), children, strict=True))
    return _set_attributes(object.__new__(type(value)), value, changed)


def _set_attributes(copied: Any, value: Any, attributes: dict[str, Any]) -> Any:
    """Set attributes in the `__dict__` or the slots, as they are in `value`."""
    in_dict, namespace = dict_of(value), dict_of(copied)
    for name, item in attributes.items():
        if name in in_dict:
            namespace[name] = item
        else:
            object.__setattr__(copied, name, item)
    return copied


SEQUENCE = NodeType(iter, enumerate, _rebuild_sequence)
SET = NodeType(iter, lambda value: ((None, item) for item in value), _rebuild_sequence)
MAPPING = NodeType(lambda value: value.values(), lambda value: value.items(), _rebuild_dict)
DATACLASS = NodeType(
    lambda value: fields_of(value).values(), lambda value: fields_of(value).items(), _rebuild_dataclass
)
RECORD = NodeType(
    lambda value: attributes_of(value).values(), lambda value: attributes_of(value).items(), _rebuild_record
)


#: Classes whose objects are leaves in this context because calls mutate them, and the next run goes on with them.
_state_classes: ContextVar[tuple[type, ...]] = ContextVar("_state_classes", default=())


class as_state:  # noqa: N801  a function to its callers, as those of contextlib
    """Treat the objects of these classes, such as a KV cache, as leaves in the block."""

    def __init__(self, classes: tuple[type, ...]) -> None:
        self._classes = classes

    def __enter__(self) -> None:
        self._token = _state_classes.set(self._classes)

    def __exit__(self, *_: object) -> None:
        _state_classes.reset(self._token)


def state_classes() -> tuple[type, ...]:
    """The classes whose objects are state in this context."""
    return _state_classes.get()


def is_state(value: Any) -> bool:
    """Whether an object is of a class that is state in this context."""
    return isinstance(value, _state_classes.get())


#: The most frequent classes of leaves.
_LEAF_CLASSES = frozenset((Tensor, bool, int, float, str, type(None)))


def base_class(cls: type) -> type:
    """The most general class of the same package, so that one kind of cache may take the place of another."""
    package = cls.__module__.partition(".")[0]
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] == package][-1]


def node_type(value: Any) -> NodeType | None:
    """The kind of structure that a value is; None for a leaf."""
    cls = type(value)
    if cls in _LEAF_CLASSES:
        return None
    if (classes := _state_classes.get()) and isinstance(value, classes):
        return None
    node = _class_node_type(cls)
    return None if node is RECORD and not is_record(value) else node


def _find_node_type(cls: Any) -> NodeType | None:
    if issubclass(cls, int | float | str | Size | Tensor | None):
        return None
    if issubclass(cls, list | tuple):
        return SEQUENCE
    if issubclass(cls, set | frozenset):
        return SET
    if issubclass(cls, Mapping):
        return MAPPING
    if is_dataclass(cls):
        return DATACLASS
    return RECORD if is_plain_class(cls) else None


_class_node_type: Callable[[type], NodeType | None] = cache(_find_node_type)


def is_record(value: Any, ancestors: tuple[int, ...] = ()) -> bool:
    """Whether an object of a plain Python class has only tensors, numbers, strings and structures of these.

    >>> from types import SimpleNamespace
    >>> class Boxes:
    ...     def __init__(self, corners):
    ...         self.corners = corners
    >>> is_record(Boxes([1, Boxes("a")])), is_record(Boxes(open)), is_record(SimpleNamespace())
    (True, False, False)
    """
    cls: Any = type(value)
    if not is_plain_class(cls) or id(value) in ancestors:
        return False
    attributes = attributes_of(value)  # an object without attributes matters by its identity
    return bool(attributes) and all(_is_data(item, (*ancestors, id(value))) for item in attributes.values())


_DATA = (Tensor, int, float, str, Size, dtype, layout, memory_format, enum.Enum, type, type(None))


def _is_data(value: Any, ancestors: tuple[int, ...]) -> bool:
    if isinstance(value, _DATA):
        return True
    node = _class_node_type(type(value))
    if node is RECORD:
        return is_record(value, ancestors)
    if node is None or id(value) in ancestors:
        return False
    return all(_is_data(child, (*ancestors, id(value))) for child in node.children(value))


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement


@cache
def is_plain_class(cls: Any) -> bool:
    """Whether instances are nothing but their attributes: no base is written in C, no copy protocol is overridden."""
    if issubclass(cls, nn.Module | enum.Enum | BaseException | type) or is_dataclass(cls):
        return False
    is_default = cls.__new__ is object.__new__ and cls.__reduce__ is object.__reduce__
    return (
        is_default
        and cls.__reduce_ex__ is object.__reduce_ex__
        and all(base.__flags__ & _HEAP_TYPE for base in cls.__mro__ if base is not object)
    )


def find_unsupported(value: Any, ancestors: tuple[int, ...] = ()) -> tuple[str, Any] | None:
    """Find the first item that keeps an object from being a record, with its path; None: there is none.

    >>> class Boxes:
    ...     def __init__(self, corners):
    ...         self.corners = corners
    >>> find_unsupported(Boxes({"at": [1, open]})), find_unsupported(Boxes(1))
    ((".corners['at'][1]", <built-in function open>), None)
    """
    if _is_data(value, ancestors):
        return None
    node = _class_node_type(type(value))
    if node is None or node is SET or id(value) in ancestors:
        return "", value
    for key, item in node.items(value):
        if (found := find_unsupported(item, (*ancestors, id(value)))) is not None:
            step = f".{key}" if node in (DATACLASS, RECORD) else f"[{key!r}]"
            return step + found[0], found[1]
    return "", value


# -- walkers -----------------------------------------------------------------------------------------------------------


def children_of(value: Any) -> list[Any]:
    """The children of a structure; none for a leaf."""
    node = node_type(value)
    return [] if node is None else list(node.children(value))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a structure, once."""
    if isinstance(value, Tensor):  # by far the most frequent
        yield value
        return
    visited: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            if id(item) not in visited:
                visited.add(id(item))
                yield item
        elif (node := node_type(item)) is not None and id(item) not in visited:  # a structure may contain itself
            visited.add(id(item))
            pending.extend([*node.children(item)][::-1])


def tensor_occurrences(value: Any, ancestors: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Every occurrence of a tensor in a structure, in the order of `map_tensors`."""
    if isinstance(value, Tensor):
        yield value
    elif (node := node_type(value)) is not None and id(value) not in ancestors:
        for child in node.children(value):
            yield from tensor_occurrences(child, (*ancestors, id(value)))


def named_tensors(value: Any, path: str = "", ancestors: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a structure with its path, such as `[0][key]`; that of a lone tensor is empty.

    A path does not depend on how many other tensors there are. Sets are skipped, since their items have no path.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif (node := node_type(value)) is not None and node is not SET:
        inside = _extend_ancestors(value, ancestors)
        for key, item in node.items(value):
            yield from named_tensors(item, f"{path}[{key}]", inside)


#: Types whose instances `reachable_tensors` does not look into.
_NO_ATTRIBUTES = (int, float, str, bytes, nn.Module, ModuleType, type, type(None))


def reachable_tensors(value: Any, depth: int = 12, ignore: Iterable[Any] = ()) -> Iterator[Tensor]:
    """Every tensor that a value refers to, through the attributes of any object but modules, to a depth; each once.

    Args:
        ignore: Objects that are not looked into.
    """
    visited: dict[int, Any] = {id(item): item for item in ignore}
    pending = [value]
    for _ in range(depth + 1):
        level, pending = pending, []
        for item in level:
            if id(item) in visited or isinstance(item, _NO_ATTRIBUTES):
                continue
            visited[id(item)] = item
            if isinstance(item, Tensor):
                yield item
            elif (node := node_type(item)) is not None:
                pending += [*node.children(item), *dict_of(item).values()]
            else:
                pending += attributes_of(item).values()


def accelerators_in(value: Any) -> list[device]:
    """The devices of the tensors in a structure, without the CPU, in order."""
    return accelerators_of(tensors_in(value))


def map_tensors(
    change: Callable[[Tensor], Any],
    value: Any,
    other: Callable[[Any], Any] | None = None,
    ancestors: tuple[int, ...] = (),
) -> Any:
    """Copy a structure with each tensor changed.

    Args:
        other: Applied to the other leaves; None: they stay.

    Raises:
        Unsupported: The structure contains itself.
    """
    if isinstance(value, Tensor):
        return change(value)
    node = node_type(value)
    if node is MAPPING and not isinstance(value, dict):  # only its attributes can be set
        node = RECORD if is_record(value) else None
    if node is None:
        return value if other is None else other(value)
    inside = _extend_ancestors(value, ancestors)
    return node.rebuild(value, [map_tensors(change, child, other, inside) for child in node.children(value)])


def _extend_ancestors(value: Any, ancestors: tuple[int, ...]) -> tuple[int, ...]:
    if id(value) in ancestors:
        raise Unsupported(f"a {type(value).__name__} contains itself, so it cannot be copied or named")
    return (*ancestors, id(value))


def clone_tensors(value: Any) -> Any:
    """Copy a structure with new tensors, which are one tensor, or share memory, where those did."""
    sharing: dict[int, set[int]] = {}
    for tensor in tensors_in(value):
        if tensor.layout is strided and not tensor.is_nested:
            sharing.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))
    storages: dict[int, UntypedStorage] = {}
    clones: dict[int, Tensor] = {}

    def clone(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage() if tensor.layout is strided and not tensor.is_nested else None
        if storage is None or len(sharing[storage._cdata]) == 1:
            return tensor.clone()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        empty = tensor.detach().new_empty(0)
        return empty.set_(storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())

    def clone_once(tensor: Tensor) -> Tensor:
        if id(tensor) not in clones:
            clones[id(tensor)] = clone(tensor)
        return clones[id(tensor)]

    return map_tensors(clone_once, value)
