"""The wire format of a boundary, and writing it; `decoder.py` reads it.

::

    offset  bytes
    0       8      b"\\x89MTBOUND"
    8       4      version of this format
    12      4      length of the header
    16      8      total length
    24      8      xxh3_64 of the 24 bytes before and the header
    32             header: JSON in ASCII, padded with spaces to a multiple of 64
                   {"at", "fingerprint", "tensors": [{"name", "dtype", "shape", "strides", "parts"}, …], "facts"}
                   parts of the tensors, each padded with zeros to a multiple of 64
    -16     16     xxh3_128 of the digests: the header's, then the xxh3_128 of every 256 KiB of each part

A tensor has one part, its dense values, or two after int8 quantization, whose scales follow the values. "parts" lists
`[bytes, compression or None]` for each. A lossy codec adds "coded", the dtype of the values, and "channel". "layout" is
present if the tensor is not dense or not aligned to 64 bytes: its strides, and the number of elements by which it
begins after such a multiple.

Integers are little-endian. Offsets follow from the lengths, and the memory that a tensor needs from its dtype and
shape, so neither can be stated wrongly. The checksums detect damage, not forgery: an attacker can compute them, too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_128_digest

from microtome.devices.pinned_memory import read_chunks
from microtome.engine.composite_ops import is_meta_or_fake
from microtome.errors import BadBoundary, describe_error
from microtome.files.tensors import memory_of
from microtome.split.boundary.codecs import COMPRESSORS, Codec, parse_codec
from microtome.split.boundary.tensor_bytes import (
    ALIGNMENT,
    alignment_offset,
    allocate_bytes,
    copy_hashed,
    to_cpu,
    to_dense,
)

if TYPE_CHECKING:
    from microtome.split.boundary.boundary import Boundary

MAGIC = b"\x89MTBOUND"
VERSION = 2

PREFIX = struct.Struct("<8sIIQ")
HEADER_OFFSET = PREFIX.size + 8
CHECKSUM_BYTES = 16

#: Dtypes by torch's names; without quantized ones, whose scales would be lost.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_JSON = json.JSONEncoder(separators=(",", ":"))
#: The JSON of the last records, by that of their values in order; how many are kept, and the most bytes of each.
_encoded_records: dict[str, str] = {}
_MAX_RECORDS, _MAX_RECORD_BYTES = 16, 64 << 10
_JSON_SCALARS = (str, int, float, bool, type(None))


def header_length(data: bytes) -> int:
    """The number of bytes before the tensors in an encoded boundary."""
    return HEADER_OFFSET + int(PREFIX.unpack_from(data)[2])


class Part(NamedTuple):
    """The bytes of a dense tensor, or compressed ones, to write."""

    source: Tensor | bytes
    nbytes: int
    compression: str | None = None

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes; a view is valid until the next one is asked for."""
        return iter([memoryview(self.source)]) if isinstance(self.source, bytes) else read_chunks(self.source)


def encode(boundary: Boundary, codec: str, make_prefix: Callable[[int], bytes] = lambda _: b"") -> bytes:
    """Encode a boundary.

    Args:
        make_prefix: Returns bytes to put in front, for the length of the boundary; this avoids a copy of all of it.
    """
    steps = parse_codec(codec)
    entries: list[dict[str, Any]] = []
    parts: list[Part] = []
    for name, tensor in boundary.tensors.items():
        entry, tensor_parts = encode_tensor(name, tensor, steps)
        entries.append(entry)
        parts += tensor_parts
    header = _encode_header(boundary, entries)
    return _assemble(header.ljust(len(header) + padding(HEADER_OFFSET + len(header))), parts, make_prefix)


def _assemble(header: bytes, parts: list[Part], make_prefix: Callable[[int], bytes]) -> bytes:
    position = HEADER_OFFSET + len(header)
    total = position + sum(part.nbytes + padding(part.nbytes) for part in parts) + CHECKSUM_BYTES
    start = PREFIX.pack(MAGIC, VERSION, len(header), total)
    digests = [xxh3_64_digest(start + header)]
    outer = make_prefix(total)
    data, view = allocate_bytes(len(outer) + total)
    view[: len(outer)] = outer
    view = view[len(outer) :]
    view[:position] = start + digests[0] + header
    for part in parts:
        for chunk in part.chunks():  # of whole blocks, but for the last
            end = position + len(chunk)
            digests += copy_hashed(chunk, view[position:end])
            position = end
        position = end + padding(end)
        view[end:position] = bytes(position - end)
    view[position:] = xxh3_128_digest(b"".join(digests))
    return data


def encode_tensor(name: str, tensor: Tensor, codec: Codec) -> tuple[dict[str, Any], list[Part]]:
    """Return the header entry and the parts of a tensor."""
    _check_tensor(name, tensor)
    strides, offset = tensor.stride(), alignment_offset(tensor)
    tensor = to_dense(tensor)
    coded = codec.quantize(tensor.detach()) if codec.quantize else None
    stored = [tensor] if coded is None else [part for part in (coded.values, coded.scales) if part is not None]
    parts = [_make_part(part.detach(), codec.compression) for part in stored]
    entry: dict[str, Any] = {
        "name": name,
        "dtype": DTYPE_NAMES[tensor.dtype],
        "shape": tensor.shape,
        "strides": tensor.stride(),
        "parts": [(part.nbytes, part.compression) for part in parts],
    }
    if coded is not None:
        entry |= {"coded": DTYPE_NAMES[coded.values.dtype], "channel": coded.channel}
    if strides != tensor.stride() or offset:
        entry["layout"] = [strides, offset]
    return entry, parts


def _check_tensor(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
        raise BadBoundary(f"cannot send tensor {name!r}: expected a strided tensor with values, got a {kind} tensor")
    if is_meta_or_fake(tensor):  # it has a device, and no memory
        raise BadBoundary(
            f"cannot send tensor {name!r}: expected one with values, got a {type(tensor).__name__}. The model's code "
            "has it from a cache that was filled while the model was traced: run the model once before splitting it"
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise BadBoundary(f"cannot send tensor {name!r} of {tensor.dtype}: dequantize it first")


def _make_part(tensor: Tensor, compression: str | None) -> Part:
    if compression is not None:
        on_cpu = to_cpu(tensor)
        compressed = COMPRESSORS[compression].compress(memory_of(on_cpu))
        if len(compressed) < tensor.nbytes:
            return Part(compressed, len(compressed), compression)
    return Part(tensor, tensor.nbytes)


def _encode_header(boundary: Boundary, entries: list[dict[str, Any]]) -> bytes:
    try:
        for name in [boundary.at, boundary.fingerprint, *(entry["name"] for entry in entries)]:
            if not isinstance(name, str):
                raise BadBoundary(f"expected strings as address, fingerprint and tensor names, got {name!r:.80}")
        stated = _JSON.encode({"at": boundary.at, "fingerprint": boundary.fingerprint, "tensors": entries})
        return f'{stated[:-1]},"facts":{_encode_facts(boundary)}}}'.encode("ascii")
    except BadBoundary:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise BadBoundary(f"the facts of the boundary cannot be encoded as JSON: {describe_error(error)}") from error


def _encode_facts(boundary: Boundary) -> str:
    """Encode the facts as JSON; those of the last records are kept, since the runs of a stage make like ones."""
    if (record := boundary.record) is None:
        if (found := _find_non_json(boundary.facts)) is not None:
            raise BadBoundary(f"facts{found[0]}: {found[1]}")
        return _JSON.encode(boundary.facts)
    key = _JSON.encode(record)  # named tuples as lists: much faster than with their names, and as exact
    if (text := _encoded_records.get(key)) is None:
        text = _JSON.encode(record.to_facts())
        if len(_encoded_records) >= _MAX_RECORDS:
            _encoded_records.clear()
        if len(text) <= _MAX_RECORD_BYTES:
            _encoded_records[key] = text
    return text


def _find_non_json(value: object) -> tuple[str, str] | None:
    """The path of the first value that JSON would not restore, and the reason; None if there is none."""
    kind = type(value)
    if kind in _JSON_SCALARS:
        return None
    if kind is not dict and kind is not list:
        expected = "a list" if isinstance(value, tuple) else "a number, string, None, list or dict"
        return "", f"expected {expected}, got a {kind.__name__}, which JSON would not restore"
    assert isinstance(value, dict | list)
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if kind is dict and type(key) is not str:
            return "", f"expected strings as keys, got {key!r}, which JSON would make a string"
        if (found := _find_non_json(item)) is not None:
            return f"[{key!r}]{found[0]}", found[1]
    return None


def padding(end: int) -> int:
    """The number of bytes from an end to the next multiple of the alignment."""
    return -end % ALIGNMENT
