"""Numpy arrays among the inputs of a model: they cross a cut as tensors, and are arrays again on the other side."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from microtome.errors import BadBoundary
from microtome.split.serialization import DTYPES
from microtome.split.tensor_bytes import duplicate, span_of


def is_array(value: Any) -> bool:
    """Whether a value is an array that a tensor can stand for: of numbers, writable, with strides that tensors have."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return False
    size = value.dtype.itemsize
    is_known = value.dtype.name in DTYPES and value.dtype.isnative
    return is_known and value.flags.writeable and all(step >= 0 and step % size == 0 for step in value.strides)


def to_tensor(array: Any) -> Tensor:
    """Copy an array to a tensor, with its strides and its alignment."""
    return duplicate(torch.from_numpy(array))


def to_array(tensor: Tensor) -> Any:
    """Copy a tensor to an array, likewise.

    Raises:
        BadBoundary: Numpy has no such dtype, so it does not come from an array.
    """
    try:
        return duplicate(tensor, "cpu").numpy()
    except TypeError as error:
        raise BadBoundary(f"expected numbers of an array, got {tensor.dtype}: have it sent again") from error


def array_name(at: int) -> str:
    """The name under which an array crosses."""
    return f"inputs(ndarray#{at})"


def overlap(arrays: Iterable[Any], tensors: Iterable[Tensor]) -> bool:
    """Whether an array may lie in the memory of another, or in that of a tensor: copies would not."""
    spans = [_span(torch.from_numpy(array)) for array in arrays]
    others = [_span(one) for one in tensors if type(one) in (Tensor, nn.Parameter) and _has_memory(one)]
    pairs = [*combinations(spans, 2), *((span, other) for span in spans for other in others)]
    return any(one[0] < other[1] and other[0] < one[1] for one, other in pairs)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested


def _span(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + span_of(tensor.shape, tensor.stride()) * tensor.itemsize
