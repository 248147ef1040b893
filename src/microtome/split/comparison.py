"""Compare two outputs of a model, bit for bit and inside objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine.attributes import attributes_of
from microtome.engine.pytree import DATACLASS, MAPPING, SEQUENCE, SET, is_state, node_type
from microtome.files.tensors import resolve_lazy_bits
from microtome.split.state.snapshot import StateSnapshot, format_path

_MAX_DEPTH = 12  # an object may contain itself


class Difference(NamedTuple):
    """A difference between two values.

    Attributes:
        path: The path in the value, such as `[0].logits`; empty for the value itself.
        description: Both values, in words.
        largest: The largest absolute difference of two tensors; None if they differ in more than numbers.
        expected: The tensor that is expected, in that case.
    """

    path: str
    description: str
    largest: float | None = None
    expected: Tensor | None = None


def differences(value: Any, expected: Any, path: str = "", depth: int = 0) -> Iterator[Difference]:
    """Find the differences between two values, also inside objects such as a KV cache."""
    if depth > _MAX_DEPTH or value is expected or is_state(value):  # each stage has its own part of the state
        return
    if isinstance(value, Tensor) and isinstance(expected, Tensor):
        yield from _compare_tensors(value, expected, path)
    elif type(value) is not type(expected):
        yield Difference(path, f"a {type(value).__name__} instead of a {type(expected).__name__}")
    elif (node := node_type(value)) is SEQUENCE and len(value) != len(expected):
        yield Difference(path, f"{len(value)} items instead of {len(expected)}")
    elif node is MAPPING and list(value) != list(expected):
        yield Difference(path, f"keys {list(value)} instead of {list(expected)}")
    elif node is not None and node in (SEQUENCE, MAPPING, DATACLASS):
        for (key, item), other in zip(node.items(value), node.children(expected), strict=True):
            step = f".{key}" if node is DATACLASS else f"[{key!r}]"
            yield from differences(item, other, path + step, depth + 1)
    elif node is SET:  # tensors are hashed by identity, so items are matched by value
        if len(value) != len(expected) or not all(any(_is_same(item, other) for other in expected) for item in value):
            yield Difference(path, f"a {type(value).__name__} with other items")
    elif isinstance(value, bool | int | float | str | bytes | torch.Size):
        is_nan = value != value and expected != expected
        if value != expected and not is_nan:
            yield Difference(path, f"{value!r} instead of {expected!r}")
    elif isinstance(value, torch.dtype | torch.layout | torch.memory_format | Enum | type):  # compared by identity
        yield Difference(path, f"{value} instead of {expected}")
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray | numpy.generic):
        yield from _compare_arrays(value, expected, path, depth)
    elif not isinstance(value, nn.Module) and not callable(value):
        if attributes := attributes_of(value):
            yield from differences(attributes, attributes_of(expected), path, depth + 1)
        elif _defines_equality(type(value)) and value != expected:
            yield Difference(path, f"{value!r:.80} instead of {expected!r:.80}")


def state_differences(expected: Any, states: Sequence[Any]) -> Iterator[Difference]:
    """Find the differences between a state object and those of the stages, which together have all values of it."""
    parts = list(map(StateSnapshot.of, states))
    for path, part in StateSnapshot.of(expected).items():
        if isinstance(part.value, Tensor) and part.value.numel():
            values = [one[path].value for one in parts if path in one and type(one[path].value) is Tensor]
            if not values:
                yield Difference(f"the state{format_path(path)}", "no values in any stage")
            for value in values:
                yield from _compare_tensors(value, part.value, f"the state{format_path(path)}")


def _defines_equality(cls: Any) -> bool:
    """Whether `==` compares more than identity."""
    return cls.__eq__ is not object.__eq__


def _is_same(value: Any, expected: Any) -> bool:
    return next(differences(value, expected), None) is None


def _compare_arrays(array: Any, expected: Any, path: str, depth: int) -> Iterator[Difference]:
    if array.shape != expected.shape or array.dtype != expected.dtype:
        kinds = [f"{one.shape} {one.dtype}" for one in (array, expected)]
        yield Difference(path, f"{kinds[0]} instead of {kinds[1]}")
    elif array.dtype.hasobject:  # its bytes are addresses
        yield from differences(array.tolist(), expected.tolist(), path, depth + 1)
    elif array.tobytes() != expected.tobytes():
        yield Difference(path, f"an array of {array.dtype} with other numbers")


def _compare_tensors(tensor: Tensor, expected: Tensor, path: str) -> Iterator[Difference]:
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        kinds = [f"{tuple(one.shape)} {one.dtype}" for one in (tensor, expected)]
        yield Difference(path, f"{kinds[0]} instead of {kinds[1]}")
        return
    tensor, expected = tensor.detach().cpu(), expected.detach().cpu()
    if not _is_bit_equal(tensor, expected):
        errors = (tensor.to(torch.complex128) - expected.to(torch.complex128)).abs().nan_to_num(torch.inf)
        errors[(tensor == expected) | (tensor.isnan() & expected.isnan())] = 0.0  # infinity, too
        largest = float(errors.max()) if errors.numel() else 0.0
        yield Difference(path, f"numbers that differ by up to {largest:.3g}", largest, expected)


def _is_bit_equal(tensor: Tensor, expected: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return bool(torch.equal(tensor, expected))
    return torch.equal(_bits(tensor), _bits(expected))


def _bits(tensor: Tensor) -> Tensor:
    flat = resolve_lazy_bits(tensor).contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
