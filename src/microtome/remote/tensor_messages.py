"""The message `Tensors`: what crosses a cut, for programs without microtome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError
from torch import Tensor

from microtome.errors import BadBoundary
from microtome.remote import protocol
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.codecs import parse_codec
from microtome.split.boundary.decoder import decode_tensors
from microtome.split.boundary.schema import INPUT_SHAPES
from microtome.split.boundary.serialization import encode_tensor

#: Bytes of Python objects for a byte of the names and shapes in a message.
_PARSING_COST = 40


def parse_tensors(data: bytes | memoryview, limit: int) -> Boundary:
    """Parse a message, as a boundary with the shapes of the model's inputs in place of facts.

    Args:
        limit: The most memory that decoding may take.

    Raises:
        BadBoundary: It is no such message, or decoding needs more memory.
    """
    try:
        message = protocol.Tensors.FromString(bytes(data))
    except DecodeError as error:
        raise BadBoundary(f"expected a message Tensors of split.proto, got {len(data)} other bytes") from error
    parts = [memoryview(part.data) for tensor in message.tensors for part in tensor.parts]
    described = len(data) - sum(map(len, parts))
    entries = [_entry_of(tensor) for tensor in message.tensors]
    description_bytes = _PARSING_COST * described + len(data)
    tensors = decode_tensors(entries, parts, limit, limit // 4, description_bytes=description_bytes)
    shapes = {one.name: list(one.shape) for one in message.inputs}
    return Boundary(message.at, message.fingerprint, tensors, {INPUT_SHAPES: shapes}, limit // 4)


def _entry_of(tensor: Any) -> dict[str, Any]:
    """The entry that the tensor would have in the header of a boundary."""
    shape = list(tensor.shape)
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    entry: dict[str, Any] = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": shape,
        "strides": strides,
        "parts": [[len(part.data), part.compression or None] for part in tensor.parts],
    }
    if tensor.coded:
        entry["coded"] = tensor.coded
    if tensor.HasField("channel"):
        entry["channel"] = tensor.channel
    return entry


def encode_tensors(tensors: Mapping[str, Tensor], at: str, fingerprint: str, codec: str) -> bytes:
    """Encode tensors as a message."""
    steps = parse_codec(codec)
    message = protocol.Tensors(at=at, fingerprint=fingerprint)
    for name, tensor in tensors.items():
        entry, parts = encode_tensor(name, tensor.detach().contiguous(), steps)
        message.tensors.add(
            name=name,
            dtype=entry["dtype"],
            shape=list(entry["shape"]),
            parts=[protocol.Part(data=b"".join(part.chunks()), compression=part.compression or "") for part in parts],
            coded=entry.get("coded", ""),
            channel=entry.get("channel"),
        )
    data: bytes = message.SerializeToString()
    return data
