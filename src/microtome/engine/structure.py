"""Tensors inside the structures that modules take and return."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a value, once. Tuples, lists, sets, mappings and dataclasses are looked into, nothing else is."""
    if isinstance(value, Tensor):  # by far the most frequent
        yield value
        return
    seen: set[int] = set()
    pending = _parts(value)[::-1]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            if id(item) not in seen:
                seen.add(id(item))
                yield item
        elif (parts := _parts(item)) and id(item) not in seen:  # a structure may hold itself
            seen.add(id(item))
            pending.extend(reversed(parts))


def _parts(value: Any) -> list[Any]:
    if value is None or isinstance(value, int | float | str):
        return []
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return []


def map_tensors(change: Callable[[Tensor], Any], value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """A copy of the structure with each tensor changed.

    Args:
        other: Applied to what `tensors_in` does not look into; None: that is kept as it is.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(map_tensors(change, item, other) for item in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(map_tensors(change, item, other) for item in value)
    if isinstance(value, dict):
        mapping = copy.copy(value)
        for key, item in value.items():  # not by `update`, which outputs of transformers refuse
            mapping[key] = map_tensors(change, item, other)
        return mapping
    if is_dataclass(value) and not isinstance(value, type):
        instance = copy.copy(value)
        for field in fields(value):
            object.__setattr__(instance, field.name, map_tensors(change, getattr(value, field.name), other))
        return instance
    return value if other is None else other(value)
