"""Decode a boundary from untrusted bytes: everything they state is checked first; `serialization.py` has the format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_128_digest

from microtome.devices.pinned_memory import write_chunks
from microtome.errors import BadBoundary, NotInstalled, describe_error
from microtome.files.tensors import memory_of, use_huge_pages
from microtome.split.boundary.codecs import COMPRESSORS, CodedTensor, dequantize
from microtome.split.boundary.header import (
    JSON_COST,
    Header,
    TensorEntries,
    TensorEntry,
    TensorPart,
    parse_fields,
    parse_header,
    too_large,
)
from microtome.split.boundary.serialization import CHECKSUM_BYTES, HEADER_OFFSET, MAGIC, PREFIX, VERSION, padding
from microtome.split.boundary.tensor_bytes import copy_hashed, copy_strided, hash_blocks

#: A part of a tensor, and the tensor that takes its values.
_Target = tuple[TensorPart, Tensor]

_DAMAGED = "the bytes were damaged in transit; send the boundary again"


def decode(
    data: Any, limit: int, max_tensor_bytes: int | None = None, device: torch.device | None = None
) -> tuple[Header, dict[str, Tensor]]:
    """Decode the header and the tensors of a boundary.

    Args:
        device: The device of tensors that neither a lossy codec nor a compression encodes; None: the CPU.

    Raises:
        BadBoundary: If the bytes are damaged or no boundary, decoding would take more than `limit` bytes of memory, or
            the tensors have more than `max_tensor_bytes`.
    """
    view = _view(data)
    text, digest = _read_header(view, limit)
    header, header_end = parse_header(text), HEADER_OFFSET + len(text)
    entries = header.tensors.entries
    header.tensors.check_size(limit, max_tensor_bytes, JSON_COST * len(text))
    if header.tensors.stored_bytes != (available := len(view) - header_end - CHECKSUM_BYTES):
        raise BadBoundary(f"the header states {header.tensors.stored_bytes} bytes of tensors, got {available}")
    targets = []
    for entry in entries:
        on = None if entry.is_coded or entry.values.compression is not None else device
        targets += [_allocate(part, on) for part in entry.parts]
    for target, stored in _read_parts(targets, view, header_end, digest):
        _decompress(*target, stored)
    return header, _finish_tensors(entries, targets)


def decode_tensors(
    fields: Sequence[Mapping[str, Any]],
    parts: Iterable[memoryview],
    limit: int,
    max_tensor_bytes: int | None = None,
    *,
    description_bytes: int = 0,
) -> dict[str, Tensor]:
    """Decode tensors whose entries and parts come without a header, as those of `decode`.

    Args:
        fields: The entry of each tensor, as in the header of a boundary.
        parts: The bytes of their parts, in order, of the lengths that the entries state.
        description_bytes: The memory that the entries and the message take, which counts against the limit.
    """
    parsed = TensorEntries.parse(fields)
    parsed.check_size(limit, max_tensor_bytes, description_bytes)
    targets = [_allocate(part) for entry in parsed.entries for part in entry.parts]
    for target, stored in zip(targets, parts, strict=True):
        if target[0].compression is None:
            memory_of(target[1])[:] = stored
        else:
            _decompress(*target, stored)
    return _finish_tensors(parsed.entries, targets)


def decode_header(data: Any, limit: int) -> dict[str, Any]:
    """Decode the header of a boundary alone: its cut, fingerprint and facts, and the unchecked entries of its tensors.

    Raises:
        BadBoundary: If the header is damaged or that of no boundary, or decoding it would take more than `limit` bytes.
    """
    return parse_fields(_read_header(_view(data), limit)[0])


def _read_header(view: memoryview, limit: int) -> tuple[bytes, bytes]:
    """Return the text of the header, and its checksum."""
    header_bytes = _check_prefix(view, limit)
    digest = bytes(view[PREFIX.size : HEADER_OFFSET])
    text = bytes(view[HEADER_OFFSET : HEADER_OFFSET + header_bytes])
    if xxh3_64_digest(bytes(view[: PREFIX.size]) + text) != digest:
        raise BadBoundary(f"checksum mismatch in the header: {_DAMAGED}")
    return text, digest


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
        stored_bytes = total - HEADER_OFFSET - header_bytes - CHECKSUM_BYTES  # of tensors: decoded, they may have more
        raise too_large(JSON_COST * header_bytes + stored_bytes, limit, is_least=True)
    return int(header_bytes)


def _allocate(part: TensorPart, device: torch.device | None = None) -> _Target:
    return part, torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device=device)


def _read_parts(
    targets: list[_Target], view: memoryview, position: int, header_digest: bytes
) -> list[tuple[_Target, memoryview]]:
    """Copy uncompressed parts, and return the compressed ones, which are decompressed only if all checksums match."""
    digests, compressed = [header_digest], []
    for part, tensor in targets:
        end = position + part.stored_bytes
        if part.compression is None:
            for memory in write_chunks(tensor):  # of whole blocks, but for the last
                use_huge_pages(memory)
                digests += copy_hashed(view[position : position + len(memory)], memory)
                position += len(memory)
        else:
            digests += hash_blocks(view[position:end])
            compressed.append(((part, tensor), view[position:end]))
        position = end + padding(end)
        if any(view[end:position]):
            raise BadBoundary(f"expected zeros between two tensors, got other bytes: {_DAMAGED}")
    if xxh3_128_digest(b"".join(digests)) != view[position:]:
        raise BadBoundary(f"checksum mismatch in the tensors: {_DAMAGED}")
    return compressed


def _decompress(part: TensorPart, tensor: Tensor, stored: memoryview) -> None:
    assert part.compression is not None
    try:
        COMPRESSORS[part.compression].decompress(stored, memory_of(tensor))
    except NotInstalled:
        raise
    except Exception as error:  # each package has errors of its own
        raise BadBoundary(f"cannot decompress a tensor with {part.compression}: {describe_error(error)}") from error


def _finish_tensors(entries: Iterable[TensorEntry], targets: Iterable[_Target]) -> dict[str, Tensor]:
    read = (tensor for _, tensor in targets)
    return {entry.name: _finish_tensor(entry, *islice(read, len(entry.parts))) for entry in entries}


def _finish_tensor(entry: TensorEntry, values: Tensor, scales: Tensor | None = None) -> Tensor:
    """Check the values of a tensor that was read, and restore its dtype and layout."""
    if entry.dtype == torch.bool and values.numel() and values.view(torch.uint8).max() > 1:
        raise BadBoundary(f"tensor {entry.name!r} of torch.bool: expected bytes 0 and 1, got others")
    if entry.is_coded:
        if scales is not None and not (scales.isfinite() & (scales > 0)).all():
            raise BadBoundary(f"tensor {entry.name!r}: expected positive, finite scales, got others")
        values = dequantize(CodedTensor(values, scales), entry.dtype)
    return values if entry.layout is None else copy_strided(values, *entry.layout)
