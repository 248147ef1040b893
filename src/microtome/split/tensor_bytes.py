"""Bytes of tensors, looked at where they lie, and copied and hashed in one go.

Views do not keep what they look at alive: whoever makes one holds the tensor too. By way of Python's own C interface,
so that numpy is not needed, and so that nothing is filled with zeros first only to be written over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

#: Bytes copied and hashed together: few enough that the hash finds in the cache what the copy has written.
BLOCK = 1 << 18

#: Of each width, a dtype that torch can copy: it cannot copy all of them, but can look at each as another.
_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

#: Where torch begins memory: at multiples of so many bytes. Kernels round by how a tensor lies to these.
ALIGNED = 64

_WRITE = 0x200  # PyBUF_WRITE

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object
_bytes_at = ctypes.pythonapi.PyBytes_AsString
_bytes_at.argtypes, _bytes_at.restype = (ctypes.py_object,), ctypes.c_void_p
_view_at = ctypes.pythonapi.PyMemoryView_FromMemory
_view_at.argtypes, _view_at.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object


def new_bytes(count: int) -> tuple[bytes, memoryview]:
    """Bytes that hold anything, and the view to fill them through before anybody else sees them."""
    data: bytes = _new_bytes(None, count)
    return data, _view_at(_bytes_at(data), count, _WRITE)


def view_of(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor on the CPU."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    view: memoryview = _view_at(tensor.data_ptr(), tensor.nbytes, _WRITE)
    return view


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each element has a place of its own and no place is left over, in whatever order of dimensions.

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


def dense(tensor: Tensor) -> Tensor:
    """The same values without gaps; the tensor itself where it has none, with the strides it has."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()):
        return tensor
    return tensor.detach().view(_PLAIN[tensor.itemsize]).clone().view(tensor.dtype)


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from the first that a tensor has to the last.

    >>> span_of((2, 3), (4, 1)), span_of((5, 3), (0, 1)), span_of((0, 3), (4, 1))
    (7, 3, 0)
    """
    pairs = zip(shape, strides, strict=True)
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in pairs)


def offset_of(tensor: Tensor) -> int:
    """The number of elements between the last multiple of 64 bytes and the first element."""
    apart = 0 if tensor.is_meta or not tensor.numel() else tensor.data_ptr() % ALIGNED
    return 0 if apart % tensor.itemsize else apart // tensor.itemsize


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie in one place, expanded dimensions (of stride 0) apart.

    >>> overlaps((4, 3), (1, 1)), overlaps((4, 3), (0, 1)), overlaps((4, 3), (5, 1))
    (True, False, False)
    """
    end = 1
    for stride, size in sorted(pair for pair in zip(strides, shape, strict=True) if pair[1] > 1 and pair[0]):
        if stride < end:
            return True
        end = stride * (size - 1) + end
    return False


def lay_out(
    values: Tensor, strides: Sequence[int], offset: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """Copy values to memory of their own where they have these strides, and begin `offset` elements after its start."""
    plain = values.detach().view(_PLAIN[values.itemsize])
    room = torch.empty(offset + span_of(values.shape, strides), dtype=plain.dtype, device=device or values.device)
    made = room.as_strided(values.shape, strides, offset)
    target = made
    for dim, (size, stride) in enumerate(zip(values.shape, strides, strict=True)):
        if size > 1 and stride == 0:
            target, plain = target.narrow(dim, 0, 1), plain.narrow(dim, 0, 1)
    if overlaps(target.shape, target.stride()):
        places = torch.full((), offset, device=room.device)
        for size, stride in zip(target.shape, target.stride(), strict=True):
            places = places.unsqueeze(-1) + torch.arange(size, device=room.device) * stride
        room[places] = plain.to(room.device)
    else:
        target.copy_(plain)
    return made.view(values.dtype)


def duplicate(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Copy a tensor with its strides and its alignment, which `clone` and `to` keep of dense ones alone."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return tensor.detach().clone() if device is None else tensor.detach().to(device)
    return lay_out(dense(tensor.detach()), tensor.stride(), offset_of(tensor), device)


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device, with its strides and its alignment; the tensor itself where it is there."""
    there = torch.device(device)
    here = tensor.device
    if here.type == there.type and there.index in (None, here.index):
        return tensor.to(there)
    return duplicate(tensor, there)


def on_cpu(tensor: Tensor) -> Tensor:
    """A dense tensor's bytes in the same order on the CPU, under any dtype."""
    return tensor if tensor.is_cpu else tensor.detach().view(_PLAIN[tensor.itemsize]).cpu()


def copy_hashed(source: memoryview, target: memoryview) -> list[bytes]:
    """Copy, and the digest of each block of what arrived, should somebody write to the source meanwhile."""
    digests = []
    for at in range(0, len(source) or 1, BLOCK):
        block = target[at : at + BLOCK]
        block[:] = source[at : at + BLOCK]
        digests.append(xxh3_128_digest(block))
    return digests


def hashed(source: memoryview) -> list[bytes]:
    """The digest of each block."""
    return [xxh3_128_digest(source[at : at + BLOCK]) for at in range(0, len(source) or 1, BLOCK)]
