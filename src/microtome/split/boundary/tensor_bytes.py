"""Tensors as bytes: memory layout, copies that keep it, and copying with a hash in one pass.

Strides and alignment are kept because kernels round differently by them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from microtome.devices.pinned_memory import copy_to_device, needs_staging
from microtome.files.tensors import resolve_lazy_bits, use_huge_pages, view_memory

#: Bytes that are copied and hashed together: few enough that the hash still finds them in the CPU's cache.
BLOCK = 1 << 18

#: From so many bytes on, several threads copy, as many as torch uses for an operator. Four saturate memory.
_PARALLEL_BYTES = 1 << 24
_MAX_THREADS = 4

#: torch allocates at multiples of this many bytes.
ALIGNMENT = 64

#: For each item size a dtype that torch can copy; it cannot copy all dtypes, but can view each as another.
_COPYABLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object
_bytes_address = ctypes.pythonapi.PyBytes_AsString
_bytes_address.argtypes, _bytes_address.restype = (ctypes.py_object,), ctypes.c_void_p


def allocate_bytes(count: int) -> tuple[bytes, memoryview]:
    """Uninitialized bytes, and a view to fill them through before anybody else sees them."""
    data: bytes = _new_bytes(None, count)
    view = view_memory(_bytes_address(data), count)
    use_huge_pages(view)
    return data, view


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor has neither gaps nor overlaps in memory, for any order of its dimensions.

    >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (4, 1)), is_dense((2, 3), (0, 1)), is_dense((1, 3), (99, 1))
    (True, False, False, True)
    """
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(pair for pair in zip(strides, shape, strict=True) if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def to_dense(tensor: Tensor) -> Tensor:
    """A dense copy of a tensor; the tensor itself, with its strides, if it is dense."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = resolve_lazy_bits(tensor.detach())
    if tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()):
        return tensor
    return tensor.detach().view(_COPYABLE[tensor.itemsize]).clone().view(tensor.dtype)


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements of memory from a tensor's first element to its last.

    >>> span_of((2, 3), (4, 1)), span_of((5, 3), (0, 1)), span_of((0, 3), (4, 1))
    (7, 3, 0)
    """
    pairs = zip(shape, strides, strict=True)
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in pairs)


def are_sizes(numbers: Any) -> bool:
    """Whether a JSON value is a list of sizes, strides or offsets."""
    return type(numbers) is list and all(type(number) is int and 0 <= number < 2**62 for number in numbers)


def alignment_offset(tensor: Tensor) -> int:
    """The number of elements between the last multiple of `ALIGNMENT` bytes and the first element."""
    if tensor.is_meta or not tensor.numel():
        return 0
    # Not `tensor.data_ptr()`, which the verification of batches takes for a model's code that reads values.
    nbytes = (tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize) % ALIGNMENT
    return 0 if nbytes % tensor.itemsize else nbytes // tensor.itemsize


def may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share memory, not counting expanded dimensions (of stride 0).

    >>> may_overlap((4, 3), (1, 1)), may_overlap((4, 3), (0, 1)), may_overlap((4, 3), (5, 1))
    (True, False, False)
    """
    end = 1
    for stride, size in sorted(pair for pair in zip(strides, shape, strict=True) if pair[1] > 1 and pair[0]):
        if stride < end:
            return True
        end = stride * (size - 1) + end
    return False


def copy_strided(
    values: Tensor, strides: Sequence[int], offset: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """Copy values to new memory with these strides, starting `offset` elements after its beginning."""
    source = values.detach().view(_COPYABLE[values.itemsize])
    memory = torch.empty(offset + span_of(values.shape, strides), dtype=source.dtype, device=device or values.device)
    copied = memory.as_strided(values.shape, strides, offset)
    target = copied
    for dim, (size, stride) in enumerate(zip(values.shape, strides, strict=True)):
        if size > 1 and stride == 0:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if may_overlap(target.shape, target.stride()):  # `copy_` refuses it
        indices = torch.full((), offset, device=memory.device)
        for size, stride in zip(target.shape, target.stride(), strict=True):
            indices = indices.unsqueeze(-1) + torch.arange(size, device=memory.device) * stride
        memory[indices] = source.to(memory.device)
    elif needs_staging(target) and source.is_cpu and target.stride() == source.stride():
        copy_to_device(target, source)
    else:
        target.copy_(source)
    return copied.view(values.dtype)


def duplicate(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Copy a tensor with its strides and alignment; `clone` and `to` keep the strides of dense tensors only."""
    is_symbolic = any(type(size) is not int for size in tensor.shape)  # while a graph is captured
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or is_symbolic:
        return tensor.detach().clone() if device is None else tensor.detach().to(device)
    return copy_strided(to_dense(tensor.detach()), tensor.stride(), alignment_offset(tensor), device)


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device, with its strides and alignment; the tensor itself if it is there."""
    return tensor.to(device) if is_on(tensor, device) else duplicate(tensor, device)


def is_on(tensor: Tensor, device: torch.device | str | None) -> bool:
    """Whether a tensor is on a device; None: on any."""
    if device is None:
        return True
    target = torch.device(device)
    return tensor.device.type == target.type and target.index in (None, tensor.device.index)


def to_cpu(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor on the CPU in the same order, under any dtype."""
    return tensor if tensor.is_cpu else tensor.detach().view(_COPYABLE[tensor.itemsize]).cpu()


def copy_hashed(source: memoryview, target: memoryview) -> list[bytes]:
    """Copy bytes and return the digest of each block of the copy, since another thread may write to the source."""
    threads = min(torch.get_num_threads(), _MAX_THREADS) if len(source) >= _PARALLEL_BYTES else 1
    if threads == 1:
        return _copy_blocks(source, target)
    share = -(-len(source) // (threads * BLOCK)) * BLOCK
    starts = range(0, len(source), share)
    sources, targets = ([view[begin : begin + share] for begin in starts] for view in (source, target))
    with ThreadPoolExecutor(threads) as pool:
        return list(chain.from_iterable(pool.map(_copy_blocks, sources, targets)))


def _copy_blocks(source: memoryview, target: memoryview) -> list[bytes]:
    if len(source) <= BLOCK:  # without releasing the GIL, which would take longer to get back
        target[:] = source
        return [xxh3_128_digest(target)]
    digests = []
    read, written = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    for begin in range(0, len(source), BLOCK):  # numpy and xxhash release the GIL
        block = written[begin : begin + BLOCK]
        block[:] = read[begin : begin + BLOCK]
        digests.append(xxh3_128_digest(block.data))
    return digests


def hash_blocks(source: memoryview) -> list[bytes]:
    """The digest of each block."""
    return [xxh3_128_digest(source[begin : begin + BLOCK]) for begin in range(0, len(source) or 1, BLOCK)]
