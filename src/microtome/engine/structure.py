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
    pending = [value]
    while pending:
        item = pending.pop()
        if id(item) in seen:  # a structure may hold itself
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        else:
            pending.extend(reversed(_parts(item)))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return []
