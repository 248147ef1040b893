"""The messages and methods of `split.proto`, and fast paths for their long bytes field.

`split.binpb` is `split.proto` compiled by `make proto`. A descriptor loads with every version of protobuf; generated
Python code raises on import if the runtime is older than the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet

PROTOCOL = 1
SERVICE = "microtome.remote.v1.Split"
#: The largest message that protobuf parses, in bytes.
MAX_MESSAGE_BYTES = (2 << 30) - 1
#: Bytes of a reply that every channel accepts: a profile, an echo, or an output whose size the example does not bound.
DEFAULT_REPLY_BYTES = 32 << 20

DESCRIPTOR = FileDescriptorSet.FromString(Path(__file__).with_name("split.binpb").read_bytes()).file[0]
_pool = descriptor_pool.DescriptorPool()
_pool.Add(DESCRIPTOR)
_service = _pool.FindServiceByName(SERVICE)
MESSAGES: dict[str, Any] = {
    message.name: message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{DESCRIPTOR.package}.{message.name}"))
    for message in DESCRIPTOR.message_type
}
HelloRequest, HelloReply = MESSAGES["HelloRequest"], MESSAGES["HelloReply"]
Request, Reply, Step = MESSAGES["Request"], MESSAGES["Reply"], MESSAGES["Step"]
Error, Timing = MESSAGES["Error"], MESSAGES["Timing"]
TrainAction, TrainReply = MESSAGES["TrainAction"], MESSAGES["TrainReply"]
StageRef, Hop = MESSAGES["StageRef"], MESSAGES["Hop"]
Tensors, InputShape = MESSAGES["Tensors"], MESSAGES["InputShape"]
Tensor, Part = MESSAGES["Tensor"], MESSAGES["Part"]
EchoRequest, EchoReply = MESSAGES["EchoRequest"], MESSAGES["EchoReply"]
ProfileRequest, ProfileReply = MESSAGES["ProfileRequest"], MESSAGES["ProfileReply"]
#: The format of messages `Tensors`.
TENSORS: int = _pool.FindEnumTypeByName(f"{DESCRIPTOR.package}.Format").values_by_name["TENSORS"].number
KINDS: tuple[str, ...] = tuple(Error.Kind.keys())


class Method(NamedTuple):
    """A method of the service."""

    path: str
    is_stream: bool
    parse_reply: Callable[[bytes], Any]


METHODS = {
    method.name: Method(
        f"/{SERVICE}/{method.name}", method.client_streaming, MESSAGES[method.output_type.name].FromString
    )
    for method in _service.methods
}

#: The tag of field 15, bytes: the long field of a request or a reply, always the last.
_PAYLOAD_TAG = b"\x7a"
#: How far into a message its payload may begin: longer prefixes are left to protobuf, and not kept in memory.
_MAX_PREFIX_BYTES = 32 << 10


def with_payload(message: Any, payload: bytes | memoryview) -> bytes:
    """Serialize a request or a reply with its field 15, which protobuf would copy three times.

    >>> Request.FromString(with_payload(Request(id="1"), b"abc")).boundary
    b'abc'
    """
    return b"".join((payload_prefix(message, len(payload)), payload))


def payload_prefix(message: Any, nbytes: int) -> bytes:
    """Serialize a request or a reply up to a field 15 of `nbytes` bytes, which must follow."""
    prefix: bytes = message.SerializeToString() + _PAYLOAD_TAG + _varint(nbytes)
    return prefix


def split_payload(message_class: Any, data: bytes) -> tuple[Any, memoryview]:
    """Parse a request or a reply without its field 15, and return that as a view: protobuf would copy it twice.

    If field 15 is not the last one, or the encoding is unusual, protobuf parses the whole message.

    >>> header, payload = split_payload(Request, with_payload(Request(id="1"), b"abc"))
    >>> header.id, bytes(payload)
    ('1', b'abc')

    Raises:
        DecodeError: If the bytes are not such a message.
    """
    offset = _payload_offset(data)
    if offset is None:
        message = message_class.FromString(data)
        return message, memoryview(getattr(message, message_class.DESCRIPTOR.fields_by_number[15].name))
    start = _read_varint(data, offset + 1)[1]
    return message_class.FromString(data[:offset]), memoryview(data)[start:]


def _payload_offset(data: bytes) -> int | None:
    """Return the offset of field 15, if it extends to the end of the message."""
    offset = 0
    try:
        while data[offset] != _PAYLOAD_TAG[0]:
            wire_type = data[offset] & 7
            if data[offset] > 127 or wire_type not in (0, 1, 2, 5) or offset > _MAX_PREFIX_BYTES:
                return None
            if wire_type in (0, 2):
                number, offset = _read_varint(data, offset + 1)
                offset += number if wire_type == 2 else 0
            else:
                offset += 9 if wire_type == 1 else 5
        length, start = _read_varint(data, offset + 1)
    except IndexError:
        return None
    return offset if offset <= _MAX_PREFIX_BYTES and start + length == len(data) else None


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return a number, and the offset after it."""
    number = shift = 0
    while True:
        number |= (data[offset] & 127) << shift
        offset, shift = offset + 1, shift + 7
        if data[offset - 1] < 128:
            return number, offset
        if shift > 63:
            raise IndexError("expected a varint of at most 10 bytes")


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
