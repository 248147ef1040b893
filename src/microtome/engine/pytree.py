"""Tensors inside the structures that modules take and return."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from types import FunctionType, MemberDescriptorType
from typing import Any

from torch import Size, Tensor, UntypedStorage, device, dtype, layout, memory_format, nn, strided

from microtome.devices.base import accelerators_of
from microtome.errors import Unsupported


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a value, once. Tuples, lists, sets, mappings, dataclasses and records are looked into."""
    if isinstance(value, Tensor):  # by far the most frequent
        yield value
        return
    seen: set[int] = set()
    pending = children_of(value)[::-1]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            if id(item) not in seen:
                seen.add(id(item))
                yield item
        elif (parts := children_of(item)) and id(item) not in seen:  # a structure may hold itself
            seen.add(id(item))
            pending.extend(reversed(parts))


def tensor_occurrences(value: Any, ancestors: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Every tensor in a value, as often as it is there, in the order in which `map_tensors` changes them."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in ancestors:
        for part in children_of(value):
            yield from tensor_occurrences(part, (*ancestors, id(value)))


def accelerators_in(value: Any) -> list[device]:
    """Return the devices of the tensors in a value other than the CPU, in order."""
    return accelerators_of(tensors_in(value))


def children_of(value: Any) -> list[Any]:
    """Return the parts of a tuple, list, set, mapping, dataclass or record; of anything else, nothing."""
    if value is None or isinstance(value, int | float | str | Size):
        return []
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return list(fields_of(value).values())
    return list(attributes_of(value).values()) if is_record(value) else []


def is_record(value: Any, ancestors: tuple[int, ...] = ()) -> bool:
    """Whether all that an object of a plain Python class holds are tensors, numbers, strings and structures of these.

    >>> from types import SimpleNamespace
    >>> class Boxes:
    ...     def __init__(self, held):
    ...         self.held = held
    >>> is_record(Boxes([1, Boxes("a")])), is_record(Boxes(open)), is_record(SimpleNamespace())
    (True, False, False)
    """
    kind: Any = type(value)
    if not _is_plain_class(kind) or id(value) in ancestors:
        return False
    held = attributes_of(value)  # one that holds nothing is known by its identity
    return bool(held) and all(_is_data(item, (*ancestors, id(value))) for item in held.values())


def _is_data(value: Any, ancestors: tuple[int, ...]) -> bool:
    if value is None or isinstance(value, _DATA):
        return True
    if id(value) in ancestors:
        return False
    if isinstance(value, list | tuple | set | frozenset | Mapping) or is_dataclass(value):
        return all(_is_data(item, (*ancestors, id(value))) for item in children_of(value))
    return is_record(value, ancestors)


def find_unsupported(value: Any, ancestors: tuple[int, ...] = ()) -> tuple[str, Any] | None:
    """The path inside a value to the first item for which an object is no record, and the item; None: there is none.

    >>> class Boxes:
    ...     def __init__(self, held):
    ...         self.held = held
    >>> find_unsupported(Boxes({"at": [1, open]})), find_unsupported(Boxes(1))
    ((".held['at'][1]", <built-in function open>), None)
    """
    kind: Any = type(value)
    if _is_data(value, ancestors):
        return None
    if id(value) in ancestors:  # it holds itself
        return "", value
    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"[{at}]", item) for at, item in enumerate(value)]
    elif _is_plain_class(kind):
        items = [(f".{name}", item) for name, item in attributes_of(value).items()]
    else:
        return "", value
    for name, item in items:
        if (found := find_unsupported(item, (*ancestors, id(value)))) is not None:
            return name + found[0], found[1]
    return "", value


_DATA = (Tensor, int, float, str, Size, dtype, layout, memory_format, enum.Enum, type)
_HEAP_TYPE = 1 << 9  # of a class that was made by a class statement


@cache
def _is_plain_class(cls: type) -> bool:
    """Whether instances are no more than their attributes: no class of C is among the bases, and none is in charge."""
    if issubclass(cls, nn.Module | enum.Enum | BaseException | type) or is_dataclass(cls):
        return False
    made = cls.__new__ is object.__new__ and cls.__reduce__ is object.__reduce__
    return (
        made
        and cls.__reduce_ex__ is object.__reduce_ex__
        and all(base.__flags__ & _HEAP_TYPE for base in cls.__mro__ if base is not object)
    )


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass instance, read without running its properties; None for one that it does not hold."""
    held = dict_of(value)
    names = (field.name for field in fields(value))
    return {name: held[name] if name in held else _class_value(value, name) for name in names}


def _class_value(value: Any, name: str) -> Any:
    """The value of a slot or of a plain class attribute; None for a property, which would run code."""
    found = next((vars(base)[name] for base in type(value).__mro__ if name in vars(base)), None)
    if isinstance(found, MemberDescriptorType):
        with suppress(AttributeError):  # it has not been set
            return found.__get__(value)
        return None
    return None if hasattr(type(found), "__get__") else found


def dict_of(value: Any) -> dict[str, Any]:
    """The `__dict__` of an object, read past a `__getattribute__` of its class; an empty one if it has none."""
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def read_attribute(value: Any, name: str) -> Any:
    """An attribute of any object, read without running code of its class; None if that is not possible."""
    asked = ("__getattribute__", "__getattr__", name)
    if any(isinstance(vars(base).get(hook), FunctionType | property) for base in type(value).__mro__ for hook in asked):
        return dict_of(value).get(name)
    return getattr(value, name, None)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds in its `__dict__` and its slots, sorted by name."""
    found = dict(dict_of(value))
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # it has not been set
                    found[name] = member.__get__(value)
    return dict(sorted(found.items()))


def _rebuild(value: Any, attributes: dict[str, Any], made: Any = None) -> Any:
    """Give a new object of the same class, or `made`, these attributes, without running code of the class."""
    made = object.__new__(type(value)) if made is None else made
    before, held = dict_of(value), dict_of(made)
    for name, item in attributes.items():
        if name in before:
            held[name] = item
        else:
            object.__setattr__(made, name, item)
    return made


def map_tensors(change: Callable[[Tensor], Any], value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """A copy of the structure with each tensor changed.

    Args:
        other: Applied to what `tensors_in` does not look into; None: that is kept as it is.

    Raises:
        Unsupported: The structure holds itself.
    """
    return change(value) if isinstance(value, Tensor) else _map(change, value, other, ())


def _map(
    change: Callable[[Tensor], Any], value: Any, other: Callable[[Any], Any] | None, ancestors: tuple[int, ...]
) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if value is None or isinstance(value, int | float | str | Size):
        return value if other is None else other(value)
    inside = _extend_ancestors(value, ancestors)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        # Past its `__new__`, which may look at what it is given: that of a PackedSequence does.
        named: Any = type(value)
        return named._make(_map(change, item, other, inside) for item in value)
    if isinstance(value, list | tuple | set | frozenset):
        return _rebuild_sequence(value, [_map(change, item, other, inside) for item in value])
    if isinstance(value, dict):
        mapping = copy.copy(value)
        for key, item in value.items():  # not by `update`, which outputs of transformers refuse
            mapping[key] = _map(change, item, other, inside)
        return mapping
    if is_dataclass(value) and not isinstance(value, type):
        held = attributes_of(value)
        names = [field.name for field in fields(value) if field.name in held]  # in the order of `tensors_in`
        changed = {name: _map(change, held[name], other, inside) for name in names}
        return _rebuild(value, changed, copy.copy(value))
    if is_record(value):
        held = attributes_of(value)
        return _rebuild(value, {name: _map(change, item, other, inside) for name, item in held.items()})
    return value if other is None else other(value)


def clone_tensors(value: Any) -> Any:
    """A copy of the structure with tensors of its own, which are one tensor, or share memory, where those did."""
    holders: dict[int, set[int]] = {}
    for tensor in tensors_in(value):
        if tensor.layout is strided and not tensor.is_nested:
            holders.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))
    memories: dict[int, UntypedStorage] = {}
    made: dict[int, Tensor] = {}

    def clone(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage() if tensor.layout is strided and not tensor.is_nested else None
        if storage is None or len(holders[storage._cdata]) == 1:
            return tensor.clone()
        if storage._cdata not in memories:
            memories[storage._cdata] = storage.clone()
        empty = tensor.detach().new_empty(0)
        return empty.set_(memories[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = clone(tensor)
        return made[id(tensor)]

    return map_tensors(once, value)


def _rebuild_sequence(value: Any, parts: list[Any]) -> Any:
    """A list, tuple or set of the same type with these parts; not by its constructor, which may be of its own."""
    if isinstance(value, list | set) and type(value) not in (list, set):
        made: Any = copy.copy(value)
        made.clear()
        made.extend(parts) if isinstance(value, list) else made.update(parts)
        return made
    return tuple.__new__(type(value), parts) if isinstance(value, tuple) else type(value)(parts)


def _extend_ancestors(value: Any, ancestors: tuple[int, ...]) -> tuple[int, ...]:
    if id(value) in ancestors:
        raise Unsupported(f"a {type(value).__name__} holds itself, so that there is no end to what it holds")
    return (*ancestors, id(value))


def named_tensors(value: Any, place: str = "", ancestors: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a value with its place, such as `[0][key]`: a lone one has none.

    A place depends on what is around the tensor, not on how many others there are. Sets are not looked into, since they
    have no places.
    """
    if isinstance(value, Tensor):
        yield place, value
        return
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        items = fields_of(value).items()
    elif is_record(value):
        items = attributes_of(value).items()
    else:
        return
    inside = _extend_ancestors(value, ancestors)
    for key, item in items:
        yield from named_tensors(item, f"{place}[{key}]", inside)
