"""The messages of `split.proto`, as classes, and its methods.

They are made from the table below rather than by generated code, which works with some versions of protobuf alone; a
test compiles `split.proto` and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from microtome.remote.optional_packages import (
    FieldDescriptorProto,
    FileDescriptorProto,
    descriptor_pool,
    message_factory,
)

PROTOCOL = 1
PACKAGE = "microtome.remote.v1"
SERVICE = f"{PACKAGE}.Split"

_TYPES = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
    "Error.Kind": FieldDescriptorProto.TYPE_ENUM,
    "Error": FieldDescriptorProto.TYPE_MESSAGE,
    "Timing": FieldDescriptorProto.TYPE_MESSAGE,
}
_MESSAGES = {
    "HelloRequest": "1 uint32 protocol, 2 string microtome, 3 string torch, 4 string fingerprint",
    "HelloReply": (
        "1 uint32 protocol, 2 string microtome, 3 string torch, 4 string model, 5 string fingerprint, 6 string device, "
        "7 string* codecs, 8 string* cuts, 9 uint64 max_message, 10 uint32 batch, 11 uint64 max_part"
    ),
    "Request": "1 string id, 2 double timeout_s, 3 string codec, 4 uint64 size, 15 bytes boundary",
    "Reply": "1 string id, 2 Error error, 3 Timing timing, 15 bytes output",
    "Error": "1 Error.Kind kind, 2 string message",
    "Timing": "1 double decode_s, 2 double queue_s, 3 double run_s, 4 double encode_s, 5 uint32 batch",
    "EchoRequest": "1 bytes payload, 2 uint32 reply_bytes",
    "EchoReply": "1 bytes payload",
    "ProfileRequest": "",
    "ProfileReply": "1 string json",
}
KINDS = (
    "UNKNOWN",
    "BAD_REQUEST",
    "WRONG_MODEL",
    "NO_CUT",
    "TOO_LARGE",
    "OUT_OF_MEMORY",
    "DEADLINE",
    "MODEL_FAILED",
    "DRAINING",
)


class Method(NamedTuple):
    """A method of the service.

    Attributes:
        streams: Whether both sides send several messages.
    """

    request: str
    reply: str
    streams: bool = False

    @property
    def read_reply(self) -> Callable[[bytes], Any]:
        return MESSAGES[self.reply].FromString


METHODS = {
    "Hello": Method("HelloRequest", "HelloReply"),
    "Stream": Method("Request", "Reply", streams=True),
    "Run": Method("Request", "Reply"),
    "Echo": Method("EchoRequest", "EchoReply"),
    "Profile": Method("ProfileRequest", "ProfileReply"),
}


def described() -> FileDescriptorProto:
    """The descriptor of `split.proto`."""
    file = FileDescriptorProto(name="microtome/remote/split.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            number, kind, called = field.split(" ")
            plain = kind.removesuffix("*")
            added = message.field.add(name=called, json_name=_camel(called), number=int(number), type=_TYPES[plain])
            added.label = FieldDescriptorProto.LABEL_REPEATED if kind != plain else FieldDescriptorProto.LABEL_OPTIONAL
            if plain[0].isupper():
                added.type_name = f".{PACKAGE}.{plain}"
        if name == "Error":
            kinds = message.enum_type.add(name="Kind")
            for at, known in enumerate(KINDS):
                kinds.value.add(name=known, number=at)
    service = file.service.add(name="Split")
    for name, method in METHODS.items():
        added_method = service.method.add(
            name=name, input_type=f".{PACKAGE}.{method.request}", output_type=f".{PACKAGE}.{method.reply}"
        )
        if method.streams:
            added_method.client_streaming = added_method.server_streaming = True
    return file


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.title() for word in others)


_pool = descriptor_pool.DescriptorPool()
_pool.Add(described())
MESSAGES: dict[str, Any] = {
    name: message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
}
HelloRequest, HelloReply = MESSAGES["HelloRequest"], MESSAGES["HelloReply"]
Request, Reply = MESSAGES["Request"], MESSAGES["Reply"]
Error, Timing = MESSAGES["Error"], MESSAGES["Timing"]
EchoRequest, EchoReply = MESSAGES["EchoRequest"], MESSAGES["EchoReply"]
ProfileRequest, ProfileReply = MESSAGES["ProfileRequest"], MESSAGES["ProfileReply"]

#: Field 15, of bytes: what is long in a message comes last.
_LONG = b"\x7a"


def with_bytes(message: Any, payload: bytes | memoryview) -> bytes:
    """A request or reply as bytes, with its field 15 beside it: protobuf would copy that three times.

    >>> Request.FromString(with_bytes(Request(id="1"), b"abc")).boundary
    b'abc'
    """
    return b"".join((before_bytes(message, len(payload)), payload))


def before_bytes(message: Any, nbytes: int) -> bytes:
    """A request or reply up to its field 15, of so many bytes, which is to follow."""
    begun: bytes = message.SerializeToString() + _LONG + _varint(nbytes)
    return begun


#: How far field 15 is looked for: what is longer in front of it keeps protobuf busy and not this, and is not held.
_HEAD = 32 << 10


def apart(kind: Any, data: bytes) -> tuple[Any, memoryview]:
    """A request or reply without its field 15, and that, looked at where it lies: protobuf would copy it twice.

    Where the field is not the last, or anything else is unusual, protobuf reads all of it.

    >>> head, payload = apart(Request, with_bytes(Request(id="1"), b"abc"))
    >>> head.id, bytes(payload)
    ('1', b'abc')

    Raises:
        DecodeError: If the bytes are no such message.
    """
    at = _long_at(data)
    if at is None:
        message = kind.FromString(data)
        return message, memoryview(getattr(message, kind.DESCRIPTOR.fields_by_number[15].name))
    start = _read_varint(data, at + 1)[1]
    return kind.FromString(data[:at]), memoryview(data)[start:]


def _long_at(data: bytes) -> int | None:
    """Return the offset of field 15, if it reaches to the end of the message."""
    at = 0
    try:
        while data[at] != _LONG[0]:
            kind = data[at] & 7
            if data[at] > 127 or kind not in (0, 1, 2, 5) or at > _HEAD:
                return None
            if kind in (0, 2):
                number, at = _read_varint(data, at + 1)
                at += number if kind == 2 else 0
            else:
                at += 9 if kind == 1 else 5
        length, start = _read_varint(data, at + 1)
    except IndexError:
        return None
    return at if at <= _HEAD and start + length == len(data) else None


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    number = shift = 0
    while True:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return number, at
        if shift > 63:
            raise IndexError("a number is too long")


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)
