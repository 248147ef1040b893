"""Reading what crosses a cut: all that bytes say is checked before it is believed; `wire.py` says how they lie."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_128_digest

from microtome.errors import BadBoundary, NotInstalled, describe_error
from microtome.split.codecs import PACKERS, Coded, can_be, restore, scale_dtype
from microtome.split.serialization import CHECKSUM_BYTES, DTYPES, HEADER_AT, MAGIC, PREFIX, VERSION, gap
from microtome.split.tensor_bytes import ALIGNED, copy_hashed, hashed, is_dense, lay_out, span_of, view_of
from microtome.units import size

#: The most memory that Python's objects take for a byte of JSON: `{"":0},` is 7 bytes and takes 232.
JSON_COST = 40

#: What undoing a lossy step may take for an element beside the values and the result, for a moment.
UNDO_COST = 8

#: What laying a tensor out with strides that overlap may take for an element beside it, for a moment.
LAYOUT_COST = 16

_DAMAGED = "it was changed on its way, have it sent again"


@dataclass
class DecodedTensor:
    """A part of a tensor that is to be read.

    Attributes:
        stored_bytes: How long it is in the data.
        tensor: Where it is read to; made when all that is said of it has been checked.
    """

    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    stored_bytes: int
    packer: str | None
    tensor: Tensor = field(init=False)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def allocate(self) -> None:
        self.tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


@dataclass
class Entry:
    """A tensor that is to be read.

    Attributes:
        layout: Its strides, and where it begins in its memory; None: as the values.
    """

    name: str
    dtype: torch.dtype
    values: DecodedTensor
    scales: DecodedTensor | None = None
    coded: bool = False
    layout: tuple[list[int], int] | None = None

    @property
    def pieces(self) -> list[DecodedTensor]:
        return [self.values] if self.scales is None else [self.values, self.scales]

    @property
    def needs_bytes(self) -> int:
        """The most memory that reading it takes."""
        need = sum(piece.nbytes for piece in self.pieces)
        if not self.values.elements:  # its other dimensions cost nothing to send, and a model may allocate by them
            need += math.prod(max(extent, 1) for extent in self.values.shape) * self.dtype.itemsize
        if self.coded:
            need += (self.dtype.itemsize + UNDO_COST) * self.values.elements
        if self.layout is not None:
            strides, offset = self.layout
            need += (offset + span_of(self.values.shape, strides)) * self.dtype.itemsize
            need += LAYOUT_COST * self.values.elements
        return need


def decode(data: Any, limit: int, most: int | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Decode the metadata and the tensors of a boundary.

    Raises:
        BadBoundary: If it is none, is damaged, needs more than `limit` bytes, or has tensors of more than `most`.
    """
    view = _bytes_view(data)
    header_bytes = _check_prefix(view, limit)
    digest = bytes(view[PREFIX.size : HEADER_AT])
    header_end = HEADER_AT + header_bytes
    header_text = bytes(view[HEADER_AT:header_end])
    if xxh3_64_digest(bytes(view[: PREFIX.size]) + header_text) != digest:
        raise BadBoundary(f"the checksum of the header does not fit it: {_DAMAGED}")
    header = _read_json(header_text)
    entries = [_entry(number, fields) for number, fields in enumerate(header.pop("tensors"))]
    unpacked = sum(entry.values.elements * entry.dtype.itemsize for entry in entries)
    if most is not None and unpacked > most:
        raise BadBoundary(
            f"the tensors of the boundary have {size(unpacked)}, expected at most {size(most)}, whatever they are "
            "compressed to: send fewer rows at once, or raise max_message on the server"
        )
    _check_sizes(entries, len(view) - header_end - CHECKSUM_BYTES, limit - JSON_COST * header_bytes)
    packed = _fill(entries, view, header_end, digest)
    for piece, stored in packed:
        _unpack(piece, stored)
    return header, {entry.name: _restored(entry) for entry in entries}


def _bytes_view(data: Any) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        kind = type(data).__name__
        raise BadBoundary(f"a boundary is read from bytes that lie in one piece, not from a {kind}") from error


def _check_prefix(view: memoryview, limit: int) -> int:
    """The length of the header, once nothing speaks against reading it."""
    if len(view) < HEADER_AT + CHECKSUM_BYTES:
        raise BadBoundary(f"{len(view)} bytes are no boundary: one has {HEADER_AT + CHECKSUM_BYTES} at least")
    magic, version, header_bytes, total = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise BadBoundary(f"the bytes are no boundary: they begin with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise BadBoundary(
            f"the boundary has version {version}; this microtome reads {VERSION}: have both sides the same"
        )
    if total != len(view):
        kind = "truncated" if len(view) < total else "damaged"
        raise BadBoundary(f"{kind} boundary: expected {total} bytes, got {len(view)}")
    if header_bytes > len(view) - HEADER_AT - CHECKSUM_BYTES or gap(HEADER_AT + header_bytes):
        raise BadBoundary(f"a header of {header_bytes} bytes cannot be in {total}: {_DAMAGED}")
    if JSON_COST * header_bytes > limit:
        raise _too_large(JSON_COST * header_bytes, limit)
    return int(header_bytes)


def _too_large(need: int, limit: int) -> BadBoundary:
    return BadBoundary(
        f"reading the boundary may take {size(need)} and the limit is {size(limit)}: raise limit= if it may (for a "
        "server max_message, for a client max_reply)"
    )


def _read_json(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise BadBoundary(f"the header cannot be read as JSON: {describe_error(error)}") from error
    kinds = {"at": str, "fingerprint": str, "facts": dict, "tensors": list}
    if type(header) is not dict or header.keys() != kinds.keys():
        raise BadBoundary(f"the header does not hold just {', '.join(kinds)}")
    for key, kind in kinds.items():
        if type(header[key]) is not kind:
            raise BadBoundary(f"the header's {key!r} is a {type(header[key]).__name__}, not a {kind.__name__}")
    return header


def _entry(number: int, fields: Any) -> Entry:
    """Check and return the header's entry of a tensor."""
    try:
        return _read_entry(**fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadBoundary(f"what the header says of tensor {number} makes no sense: {describe_error(error)}") from error


def _read_entry(
    *,
    name: Any,
    dtype: Any,
    shape: Any,
    strides: Any,
    parts: Any,
    coded: Any = None,
    channel: Any = None,
    layout: Any = None,
) -> Entry:
    if type(name) is not str:
        raise ValueError(f"its name is {name!r:.80}")
    own = _dtype(dtype)
    _check_shape(shape, strides)
    stored = own if coded is None else _dtype(coded)
    if coded is not None and not can_be(stored, own):
        raise ValueError(f"{dtype} is not coded as {coded}")
    scaled = coded is not None and stored == torch.int8
    if type(parts) is not list or len(parts) != 1 + scaled:
        raise ValueError(f"its parts are {parts!r:.80}")
    values = _piece(parts[0], stored, shape, strides)
    if channel is not None and not (scaled and type(channel) is int and 0 <= channel < len(shape)):
        raise ValueError(f"its channel is {channel!r:.80}")
    lies = _layout(layout, shape, own)
    if not scaled:
        return Entry(name, own, values, coded=coded is not None, layout=lies)
    scales_shape = [extent if dim == channel else 1 for dim, extent in enumerate(shape)]
    scales = _piece(parts[1], scale_dtype(own), scales_shape, [1] * len(shape))
    return Entry(name, own, values, scales, coded=True, layout=lies)


def _layout(layout: Any, shape: list[int], dtype: torch.dtype) -> tuple[list[int], int] | None:
    if layout is None:
        return None
    if type(layout) is not list or len(layout) != 2 or not _are_sizes(layout[0]) or not _are_sizes(layout[1:]):
        raise ValueError(f"its layout is {layout!r:.80}")
    strides, offset = layout
    if len(strides) != len(shape) or offset * dtype.itemsize >= ALIGNED:
        raise ValueError(f"its layout is {layout!r:.80}, its shape {shape!r:.80}")
    return strides, offset


def _check_shape(shape: Any, strides: Any) -> None:
    if not (_are_sizes(shape) and _are_sizes(strides) and len(shape) == len(strides) <= 64):
        raise ValueError(f"its shape is {shape!r:.80}, its strides are {strides!r:.80}")
    if math.prod(max(extent, 1) for extent in shape) >= 2**56:
        raise ValueError(f"no memory holds a tensor of {shape!r:.80}")
    if not is_dense(shape, strides):
        raise ValueError(f"strides {strides!r:.80} leave gaps or overlap in {shape!r:.80}")


def _piece(part: Any, dtype: torch.dtype, shape: list[int], strides: list[int]) -> DecodedTensor:
    if type(part) is not list or len(part) != 2 or not _are_sizes(part[:1]):
        raise ValueError(f"a part of it is {part!r:.80}")
    stored_bytes, packer = part
    piece = DecodedTensor(dtype, shape, strides, stored_bytes, packer)
    if packer is None and stored_bytes != piece.nbytes:
        raise ValueError(f"it needs {piece.nbytes} bytes and has {stored_bytes}")
    if packer is not None and (type(packer) is not str or packer not in PACKERS or stored_bytes >= piece.nbytes):
        raise ValueError(f"its compression is {packer!r:.80}, to {stored_bytes} bytes of {piece.nbytes}")
    return piece


def _dtype(name: Any) -> torch.dtype:
    if type(name) is not str or name not in DTYPES:
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r:.80}")
    return DTYPES[name]


def _are_sizes(numbers: Any) -> bool:
    return type(numbers) is list and all(type(number) is int and 0 <= number < 2**62 for number in numbers)


def _check_sizes(entries: list[Entry], room: int, limit: int) -> None:
    if len({entry.name for entry in entries}) < len(entries):
        ((name, _),) = Counter(entry.name for entry in entries).most_common(1)
        raise BadBoundary(f"two tensors of the boundary have the same name: {name!r:.80}")
    need = sum(entry.needs_bytes for entry in entries)
    if need > limit:
        raise _too_large(need, limit)
    told = sum(piece.stored_bytes + gap(piece.stored_bytes) for entry in entries for piece in entry.pieces)
    if told != room:
        raise BadBoundary(f"the tensors are said to take {told} bytes of the boundary, where there are {room}")


def _fill(entries: list[Entry], view: memoryview, at: int, digest: bytes) -> Iterator[tuple[DecodedTensor, memoryview]]:
    """Read what is not compressed; what is, when all has proved to be undamaged."""
    digests, packed = [digest], []
    for piece in (piece for entry in entries for piece in entry.pieces):
        end = at + piece.stored_bytes
        piece.allocate()
        if piece.packer is None:
            digests += copy_hashed(view[at:end], view_of(piece.tensor))
        else:
            digests += hashed(view[at:end])
            packed.append((piece, view[at:end]))
        at = end + gap(end)
        if any(view[end:at]):
            raise BadBoundary(f"there is something between two tensors: {_DAMAGED}")
    if xxh3_128_digest(b"".join(digests)) != view[at:]:
        raise BadBoundary(f"the checksum of the tensors does not fit them: {_DAMAGED}")
    return iter(packed)


def _unpack(piece: DecodedTensor, stored: memoryview) -> None:
    assert piece.packer is not None
    try:
        PACKERS[piece.packer].unpack(stored, view_of(piece.tensor))
    except NotInstalled:
        raise
    except Exception as error:  # each package has errors of its own
        raise BadBoundary(f"what {piece.packer} compressed cannot be read: {describe_error(error)}") from error


def _restored(entry: Entry) -> Tensor:
    values = entry.values.tensor
    if entry.dtype == torch.bool and values.numel() and values.view(torch.uint8).max() > 1:
        raise BadBoundary(f"tensor {entry.name!r} is bool and holds other bytes than 0 and 1")
    if entry.coded:
        values = _decoded(entry, values)
    return values if entry.layout is None else lay_out(values, *entry.layout)


def _decoded(entry: Entry, values: Tensor) -> Tensor:
    scales = entry.scales.tensor if entry.scales is not None else None
    if scales is not None and not (scales.isfinite() & (scales > 0)).all():
        raise BadBoundary(f"tensor {entry.name!r} has a scale that is no positive number")
    return restore(Coded(values, scales), entry.dtype)
