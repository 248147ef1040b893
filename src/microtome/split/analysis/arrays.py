"""Numpy arrays among the inputs of a model, which cross a cut as tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from microtome.errors import BadBoundary
from microtome.split.boundary.serialization import DTYPES
from microtome.split.boundary.tensor_bytes import duplicate, span_of


def is_array(value: Any) -> bool:
    """Whether a value is an array that can be converted to a tensor: writable, a native dtype, no negative strides."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return False
    has_dtype = value.dtype.name in DTYPES and value.dtype.isnative
    size = value.dtype.itemsize
    return has_dtype and value.flags.writeable and all(step >= 0 and step % size == 0 for step in value.strides)


def to_tensor(array: Any) -> Tensor:
    """Copy an array to a tensor of the same strides and alignment."""
    return duplicate(torch.from_numpy(array))


def to_array(tensor: Tensor) -> Any:
    """Copy a tensor to an array of the same strides and alignment.

    Raises:
        BadBoundary: Numpy has no such dtype, so that it was no array.
    """
    try:
        return duplicate(tensor, "cpu").numpy()
    except TypeError as error:
        raise BadBoundary(f"expected numbers of an array, got {tensor.dtype}: send it again") from error


def array_name(index: int) -> str:
    """The name of an array in a boundary."""
    return f"inputs(ndarray#{index})"


def overlap(arrays: Iterable[Any], tensors: Iterable[Tensor]) -> bool:
    """Whether an array may share memory with another, or with a tensor, which their copies would not."""
    spans = [_span(torch.from_numpy(array)) for array in arrays]
    others = [_span(tensor) for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and _is_on_cpu(tensor)]
    pairs = [*combinations(spans, 2), *((span, other) for span in spans for other in others)]
    return any(left[0] < right[1] and right[0] < left[1] for left, right in pairs)


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested


def _span(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + span_of(tensor.shape, tensor.stride()) * tensor.itemsize
