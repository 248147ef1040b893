"""Parse the header of a boundary, and check what it states about tensors; `serialization.py` has the format.

The headers of like boundaries are equal, so those that were parsed last are kept.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch

from microtome.errors import BadBoundary, describe_error
from microtome.split.boundary.codecs import COMPRESSORS, is_coded_dtype, scale_dtype
from microtome.split.boundary.schema import SCHEMA, BoundaryRecord
from microtome.split.boundary.serialization import DTYPES, padding
from microtome.split.boundary.tensor_bytes import ALIGNMENT, are_sizes, is_dense, span_of
from microtome.units import size

#: The most bytes of Python objects for a byte of JSON: `{"":0},` is 7 bytes and takes 232.
JSON_COST = 40

#: Temporary bytes for an element when a lossy codec is undone, beside the values and the result.
DEQUANTIZE_COST = 8

#: Temporary bytes for an element when a tensor is copied to strides that overlap.
LAYOUT_COST = 16

#: How many headers are kept, and the most bytes of each: 10 MiB of Python objects in all.
_MAX_HEADERS, _MAX_HEADER_BYTES = 16, 16 << 10


@dataclass(frozen=True)
class TensorPart:
    """The values or the scales of a tensor.

    Attributes:
        stored_bytes: Its length in the boundary.
    """

    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    stored_bytes: int
    compression: str | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
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


class TensorEntries(NamedTuple):
    """The checked entries of all tensors, and sums of what they state.

    Attributes:
        nbytes: The bytes of the tensors, uncompressed; `stored_bytes`: those in the boundary, padded.
        peak_bytes: An upper bound of the memory that decoding takes.
    """

    entries: tuple[TensorEntry, ...]
    nbytes: int
    stored_bytes: int
    peak_bytes: int

    @classmethod
    def parse(cls, fields: Sequence[Any]) -> Self:
        """Parse and check the entries.

        Raises:
            BadBoundary: If one is invalid.
        """
        entries = tuple([_parse_entry(index, entry) for index, entry in enumerate(fields)])
        if len({entry.name for entry in entries}) < len(entries):
            ((name, _),) = Counter(entry.name for entry in entries).most_common(1)
            raise BadBoundary(f"duplicate tensor name in the boundary: {name!r:.80}")
        return cls(
            entries,
            sum(entry.values.numel * entry.dtype.itemsize for entry in entries),
            sum(part.stored_bytes + padding(part.stored_bytes) for entry in entries for part in entry.parts),
            sum(entry.peak_bytes for entry in entries),
        )

    def check_size(self, limit: int, max_tensor_bytes: int | None, description_bytes: int) -> None:
        """Raise if decoding takes more than `limit` bytes, or there are more than `max_tensor_bytes` of tensors.

        Args:
            description_bytes: An upper bound of the memory of what describes the tensors, which counts too.
        """
        if max_tensor_bytes is not None and self.nbytes > max_tensor_bytes:
            raise BadBoundary(
                f"expected at most {size(max_tensor_bytes)} of tensors in the boundary, uncompressed, got "
                f"{size(self.nbytes)}: send fewer rows at once, or raise max_message on the server"
            )
        if (need := self.peak_bytes + description_bytes) > limit:
            raise too_large(need, limit)


class Header(NamedTuple):
    """A parsed header.

    Attributes:
        facts: The facts; a record that other boundaries share, if a stage wrote them.
    """

    at: str
    fingerprint: str
    facts: dict[str, Any] | BoundaryRecord
    tensors: TensorEntries


def parse_header(text: bytes) -> Header:
    """Parse and check a header, and the facts in a short one.

    Raises:
        BadBoundary: If it is invalid. Invalid facts are left to the stage that reads them.
    """
    if len(text) > _MAX_HEADER_BYTES:
        return _parse_header(text)
    header = _parse_kept_header(text)
    return header if isinstance(header.facts, BoundaryRecord) else header._replace(facts=parse_fields(text)["facts"])


@lru_cache(_MAX_HEADERS)
def _parse_kept_header(text: bytes) -> Header:
    header = _parse_header(text)
    assert isinstance(header.facts, dict)
    if header.facts.get("schema") != SCHEMA or not header.facts.keys() <= set(BoundaryRecord._fields):
        return header
    try:
        return header._replace(facts=BoundaryRecord.from_facts(header.facts))
    except BadBoundary:
        return header


def _parse_header(text: bytes) -> Header:
    fields = parse_fields(text)
    return Header(fields["at"], fields["fingerprint"], fields["facts"], TensorEntries.parse(fields["tensors"]))


def parse_fields(text: bytes) -> dict[str, Any]:
    """Parse a header, with facts and tensor entries unchecked."""
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


def too_large(need: int, limit: int, *, is_least: bool = False) -> BadBoundary:
    """Return the error for a boundary that needs more memory than the limit, with the limit that is enough.

    Args:
        is_least: It may need even more.
    """
    return BadBoundary(
        f"decoding the boundary may take {size(need)}{' or more' if is_least else ''} of memory, and the limit is "
        f"{size(limit)}: raise limit= to {need:,} bytes (for a server raise max_message, for a client max_reply)"
    )


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
