"""Codecs of tensors that cross: an optional lossy step, then an optional compression.

=================  ===========================================================  ======================================
name               what becomes of a tensor                                     error of an element x
=================  ===========================================================  ======================================
``raw``            its bytes                                                    none
``zstd``, ``lz4``  its bytes, compressed where that makes them fewer            none
``fp16``           float64 and float32 are cast to float16                      2**-11 abs(x), or 2**-25 if more
``bf16``           float64 and float32 are cast to bfloat16                     2**-8 abs(x), or 2**-134 if more
``int8``           floats of 16 bits and more become whole numbers from -127    half the scale: peak / 254, of the
                   to 127 times a scale: one scale a channel                    peak of abs(x) in the channel
``int8_tensor``    the same, one scale a tensor                                 the same, of the peak in the tensor
``fp16+zstd`` …    a lossy step, then a compressing one                         that of the lossy step
=================  ===========================================================  ======================================

To the errors of int8 comes that of rounding to the tensor's own dtype; its scale is never less than the smallest normal
float. The channel is dimension 1 of 4 and more (images, volumes), the last of 2 and 3 (features; tokens and features).
Where a channel has fewer than 16 values the scales would outweigh them, and there is one for the tensor.

A lossy step leaves integers, bools, complex numbers and floats of 8 bits as they are, and each tensor for which it
would not keep its word: fp16 and bf16 one with a number that would become infinite (infinities and NaN themselves stay
what they are), int8 one with an infinity, a NaN, or a number above half the greatest float.

>>> is_lossless("zstd"), is_lossless("fp16+zstd")
(True, False)
>>> codec_of("zip")
Traceback (most recent call last):
    ...
microtome.errors.NoMatch: no codec 'zip'; known: raw, zstd, lz4, fp16, bf16, int8, int8_tensor, and such as fp16+zstd
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from microtome.errors import NoMatch, NotInstalled

#: The fewest values that share a scale, unless they are all that the tensor has.
_SHARE_SCALE = 16

_LZ4_BLOCK = 1 << 20
_LENGTH = struct.Struct("<I")

#: What a decompressor of zstd may take to look back. Level 1 looks back half a MiB at most.
_ZSTD_WINDOW = 1 << 21
_ZSTD_LEVEL = 1


# -- lossy steps -----------------------------------------------------------------------------------------------------


class Coded(NamedTuple):
    """A tensor as a lossy step made it.

    Attributes:
        values: Of another dtype, with the shape and the strides of the tensor.
        scales: What to multiply them with: as many dimensions, of size 1 but for the channel's.
        channel: The dimension that has a scale for each of its places.
    """

    values: Tensor
    scales: Tensor | None = None
    channel: int | None = None


Lossy = Callable[[Tensor], Coded | None]  # of a dense tensor; None: it stays as it is


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)


def _cast(tensor: Tensor, to: torch.dtype) -> Coded | None:
    if not can_be(to, tensor.dtype):
        return None
    values = _like(tensor, to).copy_(tensor)
    infinite = values.isinf()
    if infinite.any() and not torch.equal(infinite, tensor.isinf()):
        return None
    return Coded(values)


def _fp16(tensor: Tensor) -> Coded | None:
    return _cast(tensor, torch.float16)


def _bf16(tensor: Tensor) -> Coded | None:
    return _cast(tensor, torch.bfloat16)


def _int8(tensor: Tensor) -> Coded | None:
    return _scaled(tensor, _channel_of(tensor.shape))


def _int8_tensor(tensor: Tensor) -> Coded | None:
    return _scaled(tensor, None)


def _channel_of(shape: torch.Size) -> int | None:
    if len(shape) < 2 or 0 in shape:
        return None
    channel = 1 if len(shape) >= 4 else len(shape) - 1
    return channel if shape.numel() // shape[channel] >= _SHARE_SCALE else None


def _scaled(tensor: Tensor, channel: int | None) -> Coded | None:
    if not can_be(torch.int8, tensor.dtype) or not tensor.numel():
        return None
    numbers = tensor.to(scale_dtype(tensor.dtype))
    limits = torch.finfo(numbers.dtype)
    others = [dim for dim in range(tensor.ndim) if dim != channel]
    peaks = numbers.abs().amax(others, keepdim=True)
    if not (peaks <= limits.max / 2).all():  # which a NaN is not either
        return None
    scales = (peaks / 127).clamp_min(limits.tiny)
    whole = (numbers / scales).round_().clamp_(-127, 127)
    return Coded(_like(tensor, torch.int8).copy_(whole), scales, channel)


def can_be(coded: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a lossy step makes the one dtype of the other."""
    if coded == torch.int8:
        return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return coded in (torch.float16, torch.bfloat16) and dtype in (torch.float64, torch.float32)


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the scales of a tensor."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def restore(coded: Coded, dtype: torch.dtype) -> Tensor:
    """The tensor, of that dtype, as near as it was coded."""
    tensor = _like(coded.values, dtype)
    if coded.scales is None:
        return tensor.copy_(coded.values)
    if dtype == coded.scales.dtype:
        return tensor.copy_(coded.values).mul_(coded.scales)
    return tensor.copy_(coded.values.to(coded.scales.dtype).mul_(coded.scales))


# -- compressing steps -----------------------------------------------------------------------------------------------


class Packer(Protocol):
    """Makes bytes fewer, without loss."""

    def pack(self, data: memoryview) -> bytes: ...

    def unpack(self, packed: memoryview, into: memoryview) -> None:
        """Fill `into`; raise if the packed bytes do not just do that. Memory beside it does not grow with them."""


class Zstd:
    def pack(self, data: memoryview) -> bytes:
        packed: bytes = _package("zstandard", "zstd").ZstdCompressor(level=_ZSTD_LEVEL).compress(data)
        return packed

    def unpack(self, packed: memoryview, into: memoryview) -> None:
        decompressor = _package("zstandard", "zstd").ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        with decompressor.stream_reader(packed) as reader:
            at = 0
            while at < len(into) and (count := reader.readinto(into[at:])):
                at += count
            if at < len(into) or reader.read(1):
                raise ValueError("the compressed bytes hold another number of bytes than they should")


class Lz4:
    """Blocks of 1 MiB, each compressed, with its length before it: so one block at a time is in memory twice."""

    def pack(self, data: memoryview) -> bytes:
        compress = _package("lz4.block", "lz4").compress
        blocks = [compress(data[at : at + _LZ4_BLOCK], store_size=False) for at in range(0, len(data), _LZ4_BLOCK)]
        return b"".join(part for block in blocks for part in (_LENGTH.pack(len(block)), block))

    def unpack(self, packed: memoryview, into: memoryview) -> None:
        decompress = _package("lz4.block", "lz4").decompress
        at = 0
        for start in range(0, len(into), _LZ4_BLOCK):
            room = into[start : start + _LZ4_BLOCK]
            (length,) = _LENGTH.unpack_from(packed, at)
            at += _LENGTH.size + length
            room[:] = decompress(packed[at - length : at], uncompressed_size=len(room))  # raises if it is not as long
        if at != len(packed):
            raise ValueError("bytes are left over after the last block")


def _package(module: str, codec: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        message = f"codec {codec!r} needs {package}, which is not installed: pip install 'microtome[remote]'"
        raise NotInstalled(message) from error


# -- by name ---------------------------------------------------------------------------------------------------------

LOSSY: dict[str, Lossy] = {"fp16": _fp16, "bf16": _bf16, "int8": _int8, "int8_tensor": _int8_tensor}
PACKERS: dict[str, Packer] = {"zstd": Zstd(), "lz4": Lz4()}


#: Their names; a lossy one may be followed by a packer, such as fp16+zstd.
CODECS = ("raw", *PACKERS, *LOSSY)


class Codec(NamedTuple):
    """The two steps; None: without it.

    Attributes:
        packer: A name in `PACKERS`.
    """

    lossy: Lossy | None
    packer: str | None


@lru_cache
def codec_of(name: str) -> Codec:
    """The steps that a name stands for."""
    if name == "raw":
        return Codec(None, None)
    if name in PACKERS:
        return Codec(None, name)
    lossy, plus, packer = name.partition("+")
    if lossy not in LOSSY or (plus and packer not in PACKERS):
        raise NoMatch(f"no codec {name!r}; known: {', '.join(CODECS)}, and such as fp16+zstd")
    return Codec(LOSSY[lossy], packer or None)


def is_lossless(codec: str) -> bool:
    """Whether what is encoded so comes back bit for bit."""
    return codec_of(codec).lossy is None
