"""Files of tensors in the safetensors format, written whole and read into memory of their own.

The format: 8 bytes that say how long the header is, the header (JSON: dtype, shape and place of each tensor), then the
values. Written here and not by `safetensors.torch.save_file`, which refuses tensors that share memory, needs numpy,
follows links and tells a full disk only in the text of an error of its own.

Files are read, not mapped: reading a page of a mapped file that was truncated ends the process with SIGBUS, and values
that were verified change with the file.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor

from microtome.files.reading import File, opened, parse_json
from microtome.files.writing import write_all, write_whole

#: The code of each dtype in the header of a safetensors file.
CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}

#: The longest header that readers of safetensors take.
_HEADER_BYTES = 100_000_000


class TensorPlace(NamedTuple):
    """The byte range of a tensor in a file."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


# -- writing -----------------------------------------------------------------------------------------------------------


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write contiguous tensors of the CPU; returns the xxh3_128 of the file."""
    header, ordered, _ = places(tensors, 0)
    buffers: list[bytes | memoryview] = [head(header, 0), *map(bytes_of, ordered)]
    write_whole(file, lambda descriptor: write_all(descriptor, buffers))
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def places(tensors: Mapping[str, Tensor], end: int) -> tuple[dict[str, Any], list[Tensor], int]:
    """The header entries of tensors written after `end`, those with values in the order of the file, and their end.

    A tensor that torch conjugates or negates lazily is resolved: its memory holds other values than it has.
    """
    header: dict[str, Any] = {}
    # The widest first, so that each begins at a multiple of its width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    for key, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    return header, [resolve(tensor) for _, tensor in ordered if tensor.nbytes], end


def resolve(tensor: Tensor) -> Tensor:
    """The tensor without a lazy conjugation or negation, for `bytes_of`; itself if it has none."""
    return tensor.resolve_conj().resolve_neg()


def head(header: dict[str, Any], room: int) -> bytes:
    """The bytes before the values; at least `room` of them for the header."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(max(room, len(text) + -len(text) % 8))
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU, which the caller keeps alive.

    Raises:
        ValueError: If the memory does not hold the tensor's values.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("expected a tensor whose memory holds its values, got a lazy conjugation or negation")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


# -- reading -----------------------------------------------------------------------------------------------------------


def read_tensors(file: File, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], str]:
    """All tensors of a file, and the xxh3_128 of the same bytes."""
    with opened(file) as stream:
        start, listed = read_header(stream, file)
        digest = xxhash.xxh3_128(start)
        found, end = {}, len(start)
        for key, place in sorted(listed.items(), key=lambda item: (item[1].begin, item[1].end)):
            if place.begin != end:
                raise ValueError(f"expected tensor {key!r:.80} at byte {end}, got {place.begin}")
            values = read_values(stream, key, place)
            digest.update(bytes_of(values) if values.nbytes else b"")
            found[key] = values.to(device)
            end = place.end
        if end != _size(stream):
            raise ValueError(f"expected {end} bytes, got {_size(stream)}")
        return found, digest.hexdigest()


def read_header(stream: BinaryIO, file: File) -> tuple[bytes, dict[str, TensorPlace]]:
    """The bytes before the values of an open file, and where each tensor is; all places are within the file."""
    total = _size(stream)
    start = _read(stream, 0, 8)
    length = int.from_bytes(start, "little")
    if not 0 < length <= min(total - 8, _HEADER_BYTES):
        raise ValueError(f"its header would be {length} bytes long")
    text = _read(stream, 8, length)
    header = parse_json(text, f"the header of {os.fspath(file)!r}")
    if not isinstance(header, dict):
        raise ValueError("its header is no dict")
    header.pop("__metadata__", None)
    return start + text, {key: _place(key, fields, 8 + length, total) for key, fields in header.items()}


def read_values(stream: BinaryIO, key: str, place: TensorPlace) -> Tensor:
    """A tensor whose place `read_header` gave."""
    values = torch.empty(place.end - place.begin, dtype=torch.uint8, device="cpu")
    view = bytes_of(values) if len(values) else memoryview(b"")
    stream.seek(place.begin)
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"truncated: expected {key!r:.80} to end at byte {place.end}, got the end of the file")
        done += count
    if place.dtype == torch.bool and len(values) and values.max() > 1:
        raise ValueError(f"tensor {key!r:.80} is bool and holds other bytes than 0 and 1")
    return values.view(place.dtype).view(place.shape)


def _place(key: str, fields: Any, start: int, total: int) -> TensorPlace:
    """Decode and check the header entry of a tensor."""
    if fields["dtype"] not in DTYPES:
        raise ValueError(f"expected a dtype that this torch has for {key!r:.80}, got {fields['dtype']!r:.20}")
    dtype, shape, (begin, end) = DTYPES[fields["dtype"]], fields["shape"], fields["data_offsets"]
    numbers = [*shape, begin, end]
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or len(shape) > 64:
        raise ValueError(f"expected sizes for tensor {key!r:.80}, got {numbers!r:.80}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"expected {math.prod(shape) * dtype.itemsize} bytes for {key!r:.80}, got {end - begin}")
    if start + end > total:
        raise ValueError(f"{key!r:.80} would be at {start + begin} to {start + end} of {total} bytes")
    return TensorPlace(start + begin, start + end, dtype, tuple(shape))


def _size(stream: BinaryIO) -> int:
    return os.fstat(stream.fileno()).st_size


def _read(stream: BinaryIO, at: int, count: int) -> bytes:
    stream.seek(at)
    data = stream.read(count)
    if len(data) != count:
        raise ValueError(f"truncated: expected {count} bytes at {at}, got {len(data)}")
    return data
