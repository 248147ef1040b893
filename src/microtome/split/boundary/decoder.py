"""Decode a boundary from untrusted bytes: everything they state is checked first; `serialization.py` has the format."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_128_digest

from microtome.devices.pinned_memory import write_chunks
from microtome.errors import BadBoundary, NotInstalled, describe_error
from microtome.files.tensors import memory_of, use_huge_pages
from microtome.split.boundary.codecs import COMPRESSORS, CodedTensor, dequantize, is_coded_dtype, scale_dtype
from microtome.split.boundary.serialization import (
    CHECKSUM_BYTES,
    DTYPES,
    HEADER_OFFSET,
    MAGIC,
    PREFIX,
    VERSION,
    padding,
)
from microtome.split.boundary.tensor_bytes import ALIGNMENT, copy_hashed, copy_strided, hash_blocks, is_dense, span_of
from microtome.units import size

#: The most bytes of Python objects for a byte of JSON: `{"":0},` is 7 bytes and takes 232.
JSON_COST = 40

#: Temporary bytes for an element when a lossy codec is undone, beside the values and the result.
DEQUANTIZE_COST = 8

#: Temporary bytes for an element when a tensor is copied to strides that overlap.
LAYOUT_COST = 16

_DAMAGED = "the bytes were damaged in transit; send the boundary again"


@dataclass
class TensorPart:
    """The values or the scales of a tensor.

    Attributes:
        stored_bytes: Its length in the boundary.
        tensor: The target of decoding, allocated once all entries have been checked.
    """

    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    stored_bytes: int
    compression: str | None
    tensor: Tensor = field(init=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class TensorEntry:
    """The header entry of a tensor.

    Attributes:
        layout: The strides of the tensor, and its offset in elements; None: those of the values.
    """

    name: str
    dtype: torch.dtype
    values: TensorPart
    scales: TensorPart | None = None
    is_coded: bool = False
    layout: tuple[list[int], int] | None = None

    @property
    def parts(self) -> list[TensorPart]:
        return [self.values] if self.scales is None else [self.values, self.scales]

    @property
    def peak_bytes(self) -> int:
        """An upper bound of the memory that decoding takes."""
        need = sum(part.nbytes for part in self.parts)
        if not self.values.numel:  # its other dimensions cost nothing to send, and a model may allocate by them
            need += math.prod(max(extent, 1) for extent in self.values.shape) * self.dtype.itemsize
        if self.is_coded:
            need += (self.dtype.itemsize + DEQUANTIZE_COST) * self.values.numel
        if self.layout is not None:
            strides, offset = self.layout
            need += (offset + span_of(self.values.shape, strides)) * self.dtype.itemsize
            need += LAYOUT_COST * self.values.numel
        return need


def decode(
    data: Any, limit: int, max_tensor_bytes: int | None = None, device: torch.device | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Decode the metadata and the tensors of a boundary.

    Args:
        device: The device of tensors that neither a lossy codec nor a compression encodes; None: the CPU.

    Raises:
        BadBoundary: If the bytes are damaged or no boundary, decoding would take more than `limit` bytes of memory, or
            the tensors have more than `max_tensor_bytes`.
    """
    view = _view(data)
    header, header_bytes, digest = _read_header(view, limit)
    header_end = HEADER_OFFSET + header_bytes
    entries = _parse_entries(header.pop("tensors"), limit - JSON_COST * header_bytes, max_tensor_bytes)
    _check_stated(entries, len(view) - header_end - CHECKSUM_BYTES)
    for entry in entries:
        target = None if entry.is_coded or entry.values.compression is not None else device
        for part in entry.parts:
            part.tensor = torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device=target)
    for part, stored in _read_parts(entries, view, header_end, digest):
        _decompress(part, stored)
    return header, {entry.name: _finish_tensor(entry) for entry in entries}


def decode_tensors(
    fields: Sequence[Mapping[str, Any]], parts: Iterable[memoryview], limit: int, max_tensor_bytes: int | None = None
) -> dict[str, Tensor]:
    """Decode tensors whose entries and parts come without a header, as those of `decode`.

    Args:
        fields: The entry of each tensor, as in the header of a boundary.
        parts: The bytes of their parts, in order, of the lengths that the entries state.
    """
    entries = _parse_entries(fields, limit, max_tensor_bytes)
    for part, stored in zip((part for entry in entries for part in entry.parts), parts, strict=True):
        part.tensor = torch.empty_strided(part.shape, part.strides, dtype=part.dtype)
        if part.compression is None:
            memory_of(part.tensor)[:] = stored
        else:
            _decompress(part, stored)
    return {entry.name: _finish_tensor(entry) for entry in entries}


def decode_header(data: Any, limit: int) -> dict[str, Any]:
    """Decode the header of a boundary alone: its cut, fingerprint and facts, and the unchecked entries of its tensors.

    Raises:
        BadBoundary: If the header is damaged or that of no boundary, or decoding it would take more than `limit` bytes.
    """
    return _read_header(_view(data), limit)[0]


def _read_header(view: memoryview, limit: int) -> tuple[dict[str, Any], int, bytes]:
    """Return the fields of the header, its length and its checksum."""
    header_bytes = _check_prefix(view, limit)
    digest = bytes(view[PREFIX.size : HEADER_OFFSET])
    text = bytes(view[HEADER_OFFSET : HEADER_OFFSET + header_bytes])
    if xxh3_64_digest(bytes(view[: PREFIX.size]) + text) != digest:
        raise BadBoundary(f"checksum mismatch in the header: {_DAMAGED}")
    return _parse_header(text), header_bytes, digest


def _view(data: Any) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        raise BadBoundary(f"expected contiguous bytes of a boundary, got a {type(data).__name__}") from error


def _check_prefix(view: memoryview, limit: int) -> int:
    """Check the fixed fields, and return the length of the header."""
    if len(view) < HEADER_OFFSET + CHECKSUM_BYTES:
        raise BadBoundary(f"not a boundary: expected at least {HEADER_OFFSET + CHECKSUM_BYTES} bytes, got {len(view)}")
    magic, version, header_bytes, total = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise BadBoundary(f"not a boundary: expected {MAGIC!r} at the start, got {magic!r}")
    if version != VERSION:
        raise BadBoundary(
            f"expected boundary version {VERSION}, got {version}: install the same version of microtome on both sides"
        )
    if total != len(view):
        kind = "truncated" if len(view) < total else "damaged"
        raise BadBoundary(f"{kind} boundary: expected {total} bytes, got {len(view)}")
    if header_bytes > len(view) - HEADER_OFFSET - CHECKSUM_BYTES or padding(HEADER_OFFSET + header_bytes):
        raise BadBoundary(f"a header of {header_bytes} bytes does not fit into {total} bytes: {_DAMAGED}")
    if JSON_COST * header_bytes > limit:
        raise _too_large(JSON_COST * header_bytes, limit)
    return int(header_bytes)


def _too_large(need: int, limit: int) -> BadBoundary:
    return BadBoundary(
        f"decoding the boundary may take {size(need)} of memory, and the limit is {size(limit)}: raise limit= (for a "
        "server max_message, for a client max_reply)"
    )


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise BadBoundary(f"the header is not valid JSON: {describe_error(error)}") from error
    types = {"at": str, "fingerprint": str, "facts": dict, "tensors": list}
    if type(header) is not dict or header.keys() != types.keys():
        raise BadBoundary(f"expected the header fields {', '.join(types)}, got {_describe_keys(header)}")
    for key, kind in types.items():
        if type(header[key]) is not kind:
            raise BadBoundary(f"header field {key!r}: expected {kind.__name__}, got {type(header[key]).__name__}")
    return header


def _describe_keys(header: Any) -> str:
    return f"{', '.join(header):.80}" if isinstance(header, dict) else type(header).__name__


def _parse_entries(fields: Sequence[Any], limit: int, max_tensor_bytes: int | None) -> list[TensorEntry]:
    """Check the entries of all tensors, and that decoding them takes at most `limit` bytes."""
    entries = [_parse_entry(index, entry) for index, entry in enumerate(fields)]
    if len({entry.name for entry in entries}) < len(entries):
        ((name, _),) = Counter(entry.name for entry in entries).most_common(1)
        raise BadBoundary(f"duplicate tensor name in the boundary: {name!r:.80}")
    nbytes = sum(entry.values.numel * entry.dtype.itemsize for entry in entries)
    if max_tensor_bytes is not None and nbytes > max_tensor_bytes:
        raise BadBoundary(
            f"expected at most {size(max_tensor_bytes)} of tensors in the boundary, uncompressed, got {size(nbytes)}: "
            "send fewer rows at once, or raise max_message on the server"
        )
    need = sum(entry.peak_bytes for entry in entries)
    if need > limit:
        raise _too_large(need, limit)
    return entries


def _parse_entry(index: int, fields: Any) -> TensorEntry:
    try:
        return _check_entry(**fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadBoundary(f"invalid header entry of tensor {index}: {describe_error(error)}") from error


def _check_entry(
    *,
    name: Any,
    dtype: Any,
    shape: Any,
    strides: Any,
    parts: Any,
    coded: Any = None,
    channel: Any = None,
    layout: Any = None,
) -> TensorEntry:
    if type(name) is not str:
        raise ValueError(f"expected a string as name, got {name!r:.80}")
    torch_dtype = _parse_dtype(dtype)
    _check_shape(shape, strides)
    stored = torch_dtype if coded is None else _parse_dtype(coded)
    if coded is not None and not is_coded_dtype(stored, torch_dtype):
        raise ValueError(f"no codec stores {dtype} as {coded}")
    has_scales = coded is not None and stored == torch.int8
    if type(parts) is not list or len(parts) != 1 + has_scales:
        raise ValueError(f"expected {1 + has_scales} parts, got {parts!r:.80}")
    if channel is not None and not (has_scales and type(channel) is int and 0 <= channel < len(shape)):
        raise ValueError(f"invalid channel {channel!r:.80}")
    values = _parse_part(parts[0], stored, shape, strides)
    scales = None
    if has_scales:
        scales_shape = [extent if dim == channel else 1 for dim, extent in enumerate(shape)]
        scales = _parse_part(parts[1], scale_dtype(torch_dtype), scales_shape, [1] * len(shape))
    return TensorEntry(name, torch_dtype, values, scales, coded is not None, _parse_layout(layout, shape, torch_dtype))


def _parse_layout(layout: Any, shape: list[int], dtype: torch.dtype) -> tuple[list[int], int] | None:
    if layout is None:
        return None
    if type(layout) is not list or len(layout) != 2 or not are_sizes(layout[0]) or not are_sizes(layout[1:]):
        raise ValueError(f"expected strides and an offset as layout, got {layout!r:.80}")
    strides, offset = layout
    if len(strides) != len(shape) or offset * dtype.itemsize >= ALIGNMENT:
        raise ValueError(f"layout {layout!r:.80} does not fit shape {shape!r:.80}")
    return strides, offset


def _check_shape(shape: Any, strides: Any) -> None:
    if not (are_sizes(shape) and are_sizes(strides) and len(shape) == len(strides) <= 64):
        raise ValueError(f"invalid shape {shape!r:.80} with strides {strides!r:.80}")
    if math.prod(max(extent, 1) for extent in shape) >= 2**56:
        raise ValueError(f"no memory holds a tensor of shape {shape!r:.80}")
    if not is_dense(shape, strides):
        raise ValueError(f"strides {strides!r:.80} leave gaps or overlap in shape {shape!r:.80}")


def _parse_part(fields: Any, dtype: torch.dtype, shape: list[int], strides: list[int]) -> TensorPart:
    if type(fields) is not list or len(fields) != 2 or not are_sizes(fields[:1]):
        raise ValueError(f"expected bytes and compression of a part, got {fields!r:.80}")
    part = TensorPart(dtype, shape, strides, *fields)
    if part.compression is None:
        if part.stored_bytes != part.nbytes:
            raise ValueError(f"expected {part.nbytes} bytes, got {part.stored_bytes}")
    elif type(part.compression) is not str or part.compression not in COMPRESSORS or part.stored_bytes >= part.nbytes:
        raise ValueError(f"invalid compression {part.compression!r:.80} of {part.nbytes} to {part.stored_bytes} bytes")
    return part


def _parse_dtype(name: Any) -> torch.dtype:
    if type(name) is not str or name not in DTYPES:
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r:.80}")
    return DTYPES[name]


def are_sizes(numbers: Any) -> bool:
    """Whether a JSON value is a list of sizes, strides or offsets."""
    return type(numbers) is list and all(type(number) is int and 0 <= number < 2**62 for number in numbers)


def _check_stated(entries: list[TensorEntry], available: int) -> None:
    stated = sum(part.stored_bytes + padding(part.stored_bytes) for entry in entries for part in entry.parts)
    if stated != available:
        raise BadBoundary(f"the header states {stated} bytes of tensors, got {available}")


def _read_parts(
    entries: list[TensorEntry], view: memoryview, position: int, header_digest: bytes
) -> list[tuple[TensorPart, memoryview]]:
    """Copy uncompressed parts, and return the compressed ones, which are decompressed only if all checksums match."""
    digests, compressed = [header_digest], []
    for part in (part for entry in entries for part in entry.parts):
        end = position + part.stored_bytes
        if part.compression is None:
            for memory in write_chunks(part.tensor):  # of whole blocks, but for the last
                use_huge_pages(memory)
                digests += copy_hashed(view[position : position + len(memory)], memory)
                position += len(memory)
        else:
            digests += hash_blocks(view[position:end])
            compressed.append((part, view[position:end]))
        position = end + padding(end)
        if any(view[end:position]):
            raise BadBoundary(f"expected zeros between two tensors, got other bytes: {_DAMAGED}")
    if xxh3_128_digest(b"".join(digests)) != view[position:]:
        raise BadBoundary(f"checksum mismatch in the tensors: {_DAMAGED}")
    return compressed


def _decompress(part: TensorPart, stored: memoryview) -> None:
    assert part.compression is not None
    try:
        COMPRESSORS[part.compression].decompress(stored, memory_of(part.tensor))
    except NotInstalled:
        raise
    except Exception as error:  # each package has errors of its own
        raise BadBoundary(f"cannot decompress a tensor with {part.compression}: {describe_error(error)}") from error


def _finish_tensor(entry: TensorEntry) -> Tensor:
    """Check the values of a tensor that was read, and restore its dtype and layout."""
    values = entry.values.tensor
    if entry.dtype == torch.bool and values.numel() and values.view(torch.uint8).max() > 1:
        raise BadBoundary(f"tensor {entry.name!r} of torch.bool: expected bytes 0 and 1, got others")
    if entry.is_coded:
        scales = None if entry.scales is None else entry.scales.tensor
        if scales is not None and not (scales.isfinite() & (scales > 0)).all():
            raise BadBoundary(f"tensor {entry.name!r}: expected positive, finite scales, got others")
        values = dequantize(CodedTensor(values, scales), entry.dtype)
    return values if entry.layout is None else copy_strided(values, *entry.layout)
