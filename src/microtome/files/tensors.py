"""Read and write tensors in the safetensors format.

The format: 8 bytes with the length of the header, the header (JSON: dtype, shape and offsets of each tensor), then the
values. `safetensors.torch.save_file` is not used: it refuses tensors that share memory, needs numpy, follows links and
reports a full disk only in the text of an error of its own.

Files are read rather than mapped: reading a mapped file that was truncated kills the process with SIGBUS, and values
that were verified would change with the file.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor

from microtome.files.reading import File, open_regular, parse_json
from microtome.files.writing import write_atomically, write_buffers

#: The code of each dtype in the header of a safetensors file.
DTYPE_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
CODE_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}

#: The maximum length of a header in safetensors.
_MAX_HEADER_BYTES = 100_000_000

#: The key of the text beside the tensors in a header.
_METADATA = "__metadata__"
#: Memory of so many bytes is mapped anew by malloc; less may have been used before.
_HUGE_BYTES = 1 << 25

_PYBUF_WRITE = 0x200
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes, _from_memory.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object


class TensorRange(NamedTuple):
    """The byte range of a tensor in a file."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, sync: bool = False
) -> str:
    """Write contiguous CPU tensors, and return the xxh3_128 of the file.

    Args:
        metadata: Text beside the tensors.
        sync: Make the file survive a power failure.
    """
    header, ordered, _ = layout_tensors(tensors, 0)
    if metadata:
        header[_METADATA] = dict(metadata)
    buffers: list[bytes | memoryview] = [encode_header(header, 0), *map(memory_of, ordered)]
    write_atomically(file, lambda descriptor: write_buffers(descriptor, buffers), sync=sync)
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def layout_tensors(tensors: Mapping[str, Tensor], end: int) -> tuple[dict[str, Any], list[Tensor], int]:
    """Lay out tensors from the offset `end` on.

    Returns:
        Their entries in the header; the tensors that have values, resolved, in the order of the file; and their end.
    """
    header: dict[str, Any] = {}
    # By descending item size, so that each is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    for key, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": DTYPE_CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    return header, [resolve_lazy_bits(tensor) for _, tensor in ordered if tensor.nbytes], end


def resolve_lazy_bits(tensor: Tensor) -> Tensor:
    """Materialize a lazy conjugation or negation, which the memory of a tensor does not reflect."""
    return tensor.resolve_conj().resolve_neg()


def encode_header(header: dict[str, Any], min_bytes: int) -> bytes:
    """Encode everything before the values, with the header padded to at least `min_bytes`."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(max(min_bytes, len(text) + -len(text) % 8))
    return len(text).to_bytes(8, "little") + text


def memory_of(tensor: Tensor) -> memoryview:
    """Return a writable view of the memory of a dense CPU tensor, which the caller must keep alive.

    Raises:
        ValueError: A lazy conjugation or negation is pending.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("expected a tensor whose memory holds its values, got a lazy conjugation or negation")
    return view_memory(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else memoryview(bytearray())


def view_memory(address: int, nbytes: int) -> memoryview:
    """Return a writable view of memory, through Python's C API: numpy is not needed, and every dtype is allowed."""
    view: memoryview = _from_memory(address, nbytes, _PYBUF_WRITE)
    return view


def use_huge_pages(view: memoryview) -> None:
    """Ask Linux for huge pages in large new memory: page faults on small ones take longer than the copy into it."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or len(view) < _HUGE_BYTES:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    begin, end = -(-address // mmap.PAGESIZE), (address + len(view)) // mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise  # a kernel without huge pages refuses, and nothing is lost
    madvise(ctypes.c_void_p(begin * mmap.PAGESIZE), ctypes.c_size_t((end - begin) * mmap.PAGESIZE), advice)


def read_tensors(file: File, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], str]:
    """Read all tensors of a file; return them with the xxh3_128 of the file."""
    with open_regular(file) as stream:
        start, ranges = read_header(stream, file)
        digest = xxhash.xxh3_128(start)
        tensors, end = {}, len(start)
        for key, entry in sorted(ranges.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end:
                raise ValueError(f"expected tensor {key!r:.80} at byte {end}, got {entry.begin}")
            values = read_values(stream, key, entry)
            digest.update(memory_of(values))
            tensors[key] = values.to(device)
            end = entry.end
        if end != _size(stream):
            raise ValueError(f"expected {end} bytes, got {_size(stream)}")
        return tensors, digest.hexdigest()


def read_metadata(file: File) -> dict[str, str]:
    """Read the text beside the tensors of a file."""
    with open_regular(file) as stream:
        metadata = _parse_header(stream, file)[1].get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"expected texts as the metadata of {os.fspath(file)!r}, got {metadata!r:.80}")
    return metadata


def read_header(stream: BinaryIO, file: File) -> tuple[bytes, dict[str, TensorRange]]:
    """Read everything before the values; return it with the range of each tensor, all within the file."""
    start, header = _parse_header(stream, file)
    header.pop(_METADATA, None)
    total = _size(stream)
    return start, {key: _parse_range(key, fields, len(start), total) for key, fields in header.items()}


def _parse_header(stream: BinaryIO, file: File) -> tuple[bytes, dict[str, Any]]:
    total = _size(stream)
    start = _read(stream, 0, 8)
    length = int.from_bytes(start, "little")
    if not 0 < length <= min(total - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"its header would be {length} bytes long, in a file of {total} bytes")
    text = _read(stream, 8, length)
    header = parse_json(text, f"the header of {os.fspath(file)!r}")
    if not isinstance(header, dict):
        raise ValueError(f"expected a dict as its header, got {type(header).__name__}")
    return start + text, header


def read_values(stream: BinaryIO, key: str, entry: TensorRange) -> Tensor:
    """Read the tensor at a range from `read_header`."""
    values = torch.empty(entry.end - entry.begin, dtype=torch.uint8, device="cpu")
    view = memory_of(values)
    stream.seek(entry.begin)
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"truncated: expected {key!r:.80} to end at byte {entry.end}, got the end of the file")
        done += count
    if entry.dtype == torch.bool and len(values) and values.max() > 1:
        raise ValueError(f"tensor {key!r:.80} is bool and holds other bytes than 0 and 1")
    return values.view(entry.dtype).view(entry.shape)


def _parse_range(key: str, fields: Any, start: int, total: int) -> TensorRange:
    """Decode and check the header entry of a tensor."""
    if fields["dtype"] not in CODE_DTYPES:
        raise ValueError(f"expected a dtype that this torch has for {key!r:.80}, got {fields['dtype']!r:.20}")
    dtype, shape, (begin, end) = CODE_DTYPES[fields["dtype"]], fields["shape"], fields["data_offsets"]
    numbers = [*shape, begin, end]
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or len(shape) > 64:
        raise ValueError(f"expected sizes for tensor {key!r:.80}, got {numbers!r:.80}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"expected {math.prod(shape) * dtype.itemsize} bytes for {key!r:.80}, got {end - begin}")
    if start + end > total:
        raise ValueError(f"{key!r:.80} would be at {start + begin} to {start + end} of {total} bytes")
    return TensorRange(start + begin, start + end, dtype, tuple(shape))


def _size(stream: BinaryIO) -> int:
    return os.fstat(stream.fileno()).st_size


def _read(stream: BinaryIO, offset: int, count: int) -> bytes:
    stream.seek(offset)
    data = stream.read(count)
    if len(data) != count:
        raise ValueError(f"truncated: expected {count} bytes at {offset}, got {len(data)}")
    return data
