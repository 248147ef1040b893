"""Whether two outputs of a model are the same, to the last bit, whatever they are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine.pytree import attributes_of, fields_of

_DEEPEST = 12


class Difference(NamedTuple):
    """A difference between two values, and its place.

    Attributes:
        place: Where in the value, such as `[0].logits`; empty for the value itself.
        what: In words.
        largest: Of tensors, the largest absolute difference; None where they differ in more than numbers.
    """

    place: str
    what: str
    largest: float | None = None


def differences(one: Any, other: Any, place: str = "", depth: int = 0) -> Iterator[Difference]:
    """Find the differences between two values, inside objects such as a KV cache, too."""
    if depth > _DEEPEST or one is other:
        return
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        yield from _tensors(one, other, place)
    elif type(one) is not type(other):
        yield Difference(place, f"a {type(one).__name__} in place of a {type(other).__name__}")
    elif isinstance(one, Mapping):
        if list(one) != list(other):
            yield Difference(place, f"keys {list(one)} in place of {list(other)}")
            return
        for key in one:
            yield from differences(one[key], other[key], f"{place}[{key!r}]", depth + 1)
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield Difference(place, f"{len(one)} items in place of {len(other)}")
            return
        for at, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{place}[{at}]", depth + 1)
    elif is_dataclass(one) and not isinstance(one, type):
        rights = fields_of(other)
        for name, left in fields_of(one).items():
            yield from differences(left, rights.get(name), f"{place}.{name}", depth + 1)
    elif isinstance(one, bool | int | float | str | bytes):
        if one != other and (one == one or other == other):
            yield Difference(place, f"{one!r} in place of {other!r}")
    elif not isinstance(one, nn.Module | type) and not callable(one):
        yield from differences(attributes_of(one), attributes_of(other), place, depth + 1)


def _tensors(one: Tensor, other: Tensor, place: str) -> Iterator[Difference]:
    if one.shape != other.shape or one.dtype != other.dtype:
        kinds = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (one, other)]
        yield Difference(place, f"{kinds[0]} in place of {kinds[1]}")
        return
    one, other = one.detach().cpu(), other.detach().cpu()
    if not _same_bits(one, other):
        apart = (one.to(torch.complex128) - other.to(torch.complex128)).abs()
        largest = float(apart.nan_to_num(torch.inf).max()) if apart.numel() else 0.0
        yield Difference(place, f"numbers that differ by up to {largest:.3g}", largest)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or one.is_quantized:
        return bool(torch.equal(one, other))
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
