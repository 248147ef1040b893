"""Codecs of tensors that cross a cut: an optional lossy step, then an optional compression.

=================  ===========================================================  ======================================
name               stored                                                       error of an element x
=================  ===========================================================  ======================================
``raw``            the bytes                                                    none
``zstd``, ``lz4``  the bytes, compressed if that makes them fewer               none
``fp16``           float64 and float32 as float16                               2**-11 abs(x), or 2**-25 if more
``bf16``           float64 and float32 as bfloat16                              2**-8 abs(x), or 2**-134 if more
``int8``           floats of 16 bits and more as integers from -127 to 127      half the scale: max(abs(x)) / 254 of
                   times a scale for each channel                               the channel
``int8_tensor``    the same with one scale for the tensor                       the same, of the tensor
``fp16+zstd`` …    a lossy step, then a compression                             that of the lossy step
=================  ===========================================================  ======================================

int8 also rounds to the tensor's own dtype; its scale is at least the smallest normal float. The channel is dimension 1
of tensors with 4 dimensions and more (images, volumes), else the last (features). Where a channel has fewer than 16
values, for which the scales would outweigh them, the tensor has one scale.

A lossy step leaves integers, bools, complex numbers and 8-bit floats unchanged, and every tensor for which it could not
guarantee the error: fp16 and bf16 if a finite number would become infinite, int8 if there is an infinity, a NaN, or a
number above half the largest float.

>>> is_lossless("zstd"), is_lossless("fp16+zstd")
(True, False)
>>> parse_codec("zip")
Traceback (most recent call last):
    ...
microtome.errors.NoMatch: no codec 'zip'; known: raw, zstd, lz4, fp16, bf16, int8, int8_tensor, and such as fp16+zstd
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from microtome.errors import BadQuery, NoMatch, NotInstalled, describe_value

#: The fewest values with a scale of their own.
_VALUES_PER_SCALE = 16

_LZ4_BLOCK = 1 << 20
_LENGTH = struct.Struct("<I")

#: The window that a zstd decompressor may allocate; level 1 uses at most half a MiB.
_ZSTD_WINDOW = 1 << 21
_ZSTD_LEVEL = 1


# -- lossy steps -----------------------------------------------------------------------------------------------------


class CodedTensor(NamedTuple):
    """A tensor after a lossy step.

    Attributes:
        values: In another dtype, with the tensor's shape and strides.
        scales: The factors to multiply by, broadcastable to the values; None: no scales.
        channel: The dimension with a scale for each index; None: one scale for all.
    """

    values: Tensor
    scales: Tensor | None = None
    channel: int | None = None


#: Encodes a dense tensor; None: the tensor is sent unchanged.
Quantizer = Callable[[Tensor], CodedTensor | None]


def _empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)


def _cast(tensor: Tensor, dtype: torch.dtype) -> CodedTensor | None:
    if not is_coded_dtype(dtype, tensor.dtype):
        return None
    values = _empty_like(tensor, dtype).copy_(tensor)
    infinite = values.isinf()
    if infinite.any() and not torch.equal(infinite, tensor.isinf()):
        return None
    return CodedTensor(values)


def _quantize_channels(tensor: Tensor) -> CodedTensor | None:
    return _quantize(tensor, _channel_dim(tensor.shape))


def _channel_dim(shape: torch.Size) -> int | None:
    if len(shape) < 2 or 0 in shape:
        return None
    channel = 1 if len(shape) >= 4 else len(shape) - 1
    return channel if shape.numel() // shape[channel] >= _VALUES_PER_SCALE else None


def _quantize(tensor: Tensor, channel: int | None = None) -> CodedTensor | None:
    if not is_coded_dtype(torch.int8, tensor.dtype) or not tensor.numel():
        return None
    numbers = tensor.to(scale_dtype(tensor.dtype))
    limits = torch.finfo(numbers.dtype)
    reduced = [dim for dim in range(tensor.ndim) if dim != channel]
    peaks = numbers.abs().amax(reduced, keepdim=True)
    if not (peaks <= limits.max / 2).all():  # also false for NaN
        return None
    # Not by the number 127: CUDA multiplies by its reciprocal, which rounds differently.
    scales = (peaks / torch.full_like(peaks, 127)).clamp_min(limits.tiny)
    rounded = (numbers / scales).round_().clamp_(-127, 127)
    return CodedTensor(_empty_like(tensor, torch.int8).copy_(rounded), scales, channel)


def is_coded_dtype(stored: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a lossy step stores tensors of `dtype` as `stored`."""
    if stored == torch.int8:
        return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return stored in (torch.float16, torch.bfloat16) and dtype in (torch.float64, torch.float32)


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the scales of a tensor."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dequantize(coded: CodedTensor, dtype: torch.dtype) -> Tensor:
    """Undo a lossy step, as far as that is possible."""
    tensor = _empty_like(coded.values, dtype)
    if coded.scales is None:
        return tensor.copy_(coded.values)
    if dtype == coded.scales.dtype:
        return tensor.copy_(coded.values).mul_(coded.scales)
    return tensor.copy_(coded.values.to(coded.scales.dtype).mul_(coded.scales))


# -- compression -----------------------------------------------------------------------------------------------------


class Compressor(Protocol):
    """Lossless compression."""

    def compress(self, data: memoryview) -> bytes: ...

    def decompress(self, compressed: memoryview, target: memoryview) -> None:
        """Fill the target with bounded additional memory; raise if the data is longer or shorter."""


class Zstd:
    def compress(self, data: memoryview) -> bytes:
        compressed: bytes = _import_package("zstandard", "zstd").ZstdCompressor(level=_ZSTD_LEVEL).compress(data)
        return compressed

    def decompress(self, compressed: memoryview, target: memoryview) -> None:
        decompressor = _import_package("zstandard", "zstd").ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        with decompressor.stream_reader(compressed) as reader:
            position = 0
            while position < len(target) and (count := reader.readinto(target[position:])):
                position += count
            if position < len(target) or reader.read(1):
                raise ValueError(f"the compressed data has not {len(target)} bytes")


class Lz4:
    """Blocks of 1 MiB, each compressed with its length before it, so that only one block is in memory twice."""

    def compress(self, data: memoryview) -> bytes:
        compress = _import_package("lz4.block", "lz4").compress
        starts = range(0, len(data), _LZ4_BLOCK)
        blocks = [compress(data[start : start + _LZ4_BLOCK], store_size=False) for start in starts]
        return b"".join(part for block in blocks for part in (_LENGTH.pack(len(block)), block))

    def decompress(self, compressed: memoryview, target: memoryview) -> None:
        decompress = _import_package("lz4.block", "lz4").decompress
        end = 0
        for start in range(0, len(target), _LZ4_BLOCK):
            block = target[start : start + _LZ4_BLOCK]
            (length,) = _LENGTH.unpack_from(compressed, end)
            end += _LENGTH.size + length
            block[:] = decompress(compressed[end - length : end], uncompressed_size=len(block))  # checks the length
        if end != len(compressed):
            raise ValueError(f"expected {end} compressed bytes, got {len(compressed)}")


def _import_package(module: str, codec: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        message = f"codec {codec!r} needs {package}, which is not installed: pip install 'microtome[remote]'"
        raise NotInstalled(message) from error


# -- by name ---------------------------------------------------------------------------------------------------------

QUANTIZERS: dict[str, Quantizer] = {
    "fp16": partial(_cast, dtype=torch.float16),
    "bf16": partial(_cast, dtype=torch.bfloat16),
    "int8": _quantize_channels,
    "int8_tensor": _quantize,
}
COMPRESSORS: dict[str, Compressor] = {"zstd": Zstd(), "lz4": Lz4()}

#: The names of all codecs; a lossy one may be followed by a compression, such as fp16+zstd.
CODECS = ("raw", *COMPRESSORS, *QUANTIZERS)


class Codec(NamedTuple):
    """The two steps of a codec, either of which may be None; `compression` is a name in `COMPRESSORS`."""

    quantize: Quantizer | None
    compression: str | None


def parse_codec(name: str) -> Codec:
    """The steps of the codec of this name."""
    if not isinstance(name, str):
        raise BadQuery(f"expected the name of a codec, such as 'raw' or 'zstd', got {describe_value(name)}")
    return _parse_codec(name)


@lru_cache
def _parse_codec(name: str) -> Codec:
    if name == "raw":
        return Codec(None, None)
    if name in COMPRESSORS:
        return Codec(None, name)
    lossy, plus, compression = name.partition("+")
    if lossy not in QUANTIZERS or (plus and compression not in COMPRESSORS):
        raise NoMatch(f"no codec {name!r}; known: {', '.join(CODECS)}, and such as fp16+zstd")
    return Codec(QUANTIZERS[lossy], compression or None)


def is_lossless(codec: str) -> bool:
    """Whether decoding restores every bit."""
    return parse_codec(codec).quantize is None
