"""Tensors inside the structures that modules take and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
