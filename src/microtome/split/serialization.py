"""The wire format of a boundary.

::

    0   8  b"\\x89MTBOUND"
    8   4  the version of this layout
    12  4  how long the header is
    16  8  how long all of it is
    24  8  xxh3_64 of the 24 bytes before it and the header
    32     the header: JSON in ASCII, filled up with spaces so that what follows begins at a multiple of 64
           {"at", "fingerprint", "facts", "tensors": [{"name", "dtype", "shape", "strides", "parts"}, …]}
           the parts of a tensor lie one after the other: its values, then its scales if it has some; each is said as
           [bytes, None or the compression]; after a lossy step also "coded", the dtype of the values, and "channel";
           the values are dense, and "layout" is there if the tensor is not, or does not begin at a multiple of 64
           bytes: its own strides, and how many elements lie between such a multiple and its first one
           parts, each from a multiple of 64 on, with zeros between them
    -16    xxh3_128 of the digests: that of the header, then the xxh3_128 of every 256 KiB of each part

Numbers are little-endian. Where a part lies follows from the lengths before it, and how much memory it needs from the
dtype and the shape, so neither can be said wrongly. The checksums tell of damage, not of forgery: who can change the
bytes on purpose can change these too. What is forged well is a boundary; nothing in it is run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_128_digest

from microtome.engine.composite_ops import is_meta_or_fake
from microtome.errors import BadBoundary, describe_error
from microtome.split.codecs import PACKERS, Codec, codec_of
from microtome.split.tensor_bytes import copy_hashed, dense, new_bytes, offset_of, on_cpu, view_of

MAGIC = b"\x89MTBOUND"
VERSION = 2
ALIGN = 64

PREFIX = struct.Struct("<8sIIQ")
HEADER_AT = PREFIX.size + 8
CHECKSUM_BYTES = 16

#: Dtypes by torch's own names. Those of quantised tensors have scales beside them that would be lost.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
_JSON = json.JSONEncoder(separators=(",", ":"))

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Section(NamedTuple):
    """Bytes that are to be written; the owner keeps them there."""

    data: memoryview
    packer: str | None
    owner: object


def encode(
    about: Mapping[str, Any], tensors: Mapping[str, Tensor], codec: str, before: Callable[[int], bytes] | None = None
) -> bytes:
    """The bytes of a boundary: what is said of it, and its tensors.

    Args:
        before: Gives what is to lie before them in the same bytes, from how many they are.
    """
    steps = codec_of(codec)
    entries: list[dict[str, Any]] = []
    parts: list[Section] = []
    for name, tensor in tensors.items():
        entry, its_parts = _described(name, tensor, steps)
        entries.append(entry)
        parts += its_parts
    header = _as_json({**about, "tensors": entries})
    header += b" " * gap(HEADER_AT + len(header))
    return _written(header, parts, before or (lambda _: b""))


def _written(header: bytes, parts: list[Section], before: Callable[[int], bytes]) -> bytes:
    at = HEADER_AT + len(header)
    total = at + sum(len(part.data) + gap(len(part.data)) for part in parts) + CHECKSUM_BYTES
    prefix = PREFIX.pack(MAGIC, VERSION, len(header), total)
    digests = [xxh3_64_digest(prefix + header)]
    first = before(total)
    data, out = new_bytes(len(first) + total)
    out[: len(first)] = first
    out = out[len(first) :]
    out[:at] = prefix + digests[0] + header
    for part in parts:
        end = at + len(part.data)
        digests += copy_hashed(part.data, out[at:end])
        at = end + gap(end)
        out[end:at] = bytes(at - end)
    out[at:] = xxh3_128_digest(b"".join(digests))
    return data


def _described(name: str, tensor: Tensor, steps: Codec) -> tuple[dict[str, Any], list[Section]]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
        raise BadBoundary(f"tensor {name!r} is {kind} and cannot be sent: only strided ones with values can")
    if is_meta_or_fake(tensor):  # it has a device, and no memory
        raise BadBoundary(
            f"tensor {name!r} is a {type(tensor).__name__} and cannot be sent: expected one with values. The model's "
            "code has it from a cache that was filled as the model was traced: run the model once before"
        )
    if tensor.dtype not in _NAMES:
        raise BadBoundary(f"tensor {name!r} is {tensor.dtype} and cannot be sent: dequantize it first")
    own, offset = tensor.stride(), offset_of(tensor)
    tensor = dense(tensor)
    coded = steps.lossy(tensor.detach()) if steps.lossy else None
    stored = [tensor] if coded is None else [part for part in (coded.values, coded.scales) if part is not None]
    parts = [_part(on_cpu(part), steps.packer) for part in stored]
    entry: dict[str, Any] = {
        "name": name,
        "dtype": _NAMES[tensor.dtype],
        "shape": tensor.shape,
        "strides": tensor.stride(),
        "parts": [(len(part.data), part.packer) for part in parts],
    }
    if coded is not None:
        entry |= {"coded": _NAMES[coded.values.dtype], "channel": coded.channel}
    if own != tensor.stride() or offset:
        entry["layout"] = [own, offset]
    return entry, parts


def _part(tensor: Tensor, packer: str | None) -> Section:
    data = view_of(tensor)
    if packer is not None:
        packed = PACKERS[packer].pack(data)
        if len(packed) < len(data):
            return Section(memoryview(packed), packer, packed)
    return Section(data, None, tensor)


def _as_json(header: dict[str, Any]) -> bytes:
    try:
        for name in [header["at"], header["fingerprint"], *(entry["name"] for entry in header["tensors"])]:
            if not isinstance(name, str):
                raise BadBoundary(f"addresses, fingerprints and names of tensors are texts; {name!r:.80} is none")
        _check_json(header["facts"], "facts")
        return _JSON.encode(header).encode("ascii")
    except BadBoundary:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise BadBoundary(f"what is said of the boundary cannot be JSON: {describe_error(error)}") from error


def _check_json(value: object, where: str) -> None:
    """Raise where JSON would make something else of it."""
    kind = type(value)
    if kind is dict:
        assert isinstance(value, dict)
        for key, inner in value.items():
            if type(key) is not str:
                raise BadBoundary(f"{where} has the key {key!r}, which JSON would make a text: use a str")
            _check_json(inner, f"{where}[{key!r}]")
    elif kind is list:
        assert isinstance(value, list)
        for at, inner in enumerate(value):
            _check_json(inner, f"{where}[{at}]")
    elif kind not in (str, int, float, bool, type(None)):
        instead = "a list" if isinstance(value, tuple) else "numbers, texts, None, lists and dicts of these"
        raise BadBoundary(f"{where} is a {kind.__name__} and would not arrive as one: use {instead}")


def gap(end: int) -> int:
    """Return the padding before the next part."""
    return -end % ALIGN
