from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import DecodeError
from grpc_tools import protoc
from hypothesis import given, settings
from hypothesis import strategies as st

import microtome
from microtome.remote import protocol
from tests.remote.fuzz import mutated

SOURCES = Path(microtome.__file__).parent.parent
PROTO = "microtome/remote/split.proto"


def test_the_descriptor_is_that_of_split_proto(tmp_path: Path) -> None:
    out = tmp_path / "split.binpb"
    assert protoc.main(["protoc", f"-I{SOURCES}", f"--descriptor_set_out={out}", f"{SOURCES}/{PROTO}"]) == 0
    (compiled,) = FileDescriptorSet.FromString(out.read_bytes()).file
    assert compiled == protocol.DESCRIPTOR


@given(st.text(), st.floats(allow_nan=False), st.text(), st.binary() | st.integers(0, 70_000).map(bytes))
def test_a_request_with_its_bytes_beside_it_is_the_message_that_protobuf_writes(
    id_: str, timeout_s: float, codec: str, payload: bytes
) -> None:
    head = protocol.Request(id=id_, timeout_s=timeout_s, codec=codec)
    read = protocol.Request.FromString(protocol.with_payload(head, payload))
    assert read == protocol.Request(id=id_, timeout_s=timeout_s, codec=codec, boundary=payload)


@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, 16383, 16384, 2_097_151, 2_097_152])
def test_a_reply_with_its_bytes_beside_it_comes_back(nbytes: int) -> None:
    # The length takes one byte more at each power of 128.
    head = protocol.Reply(id="7", timing=protocol.Timing(run_s=0.5, batch=3))
    read = protocol.Reply.FromString(protocol.with_payload(head, bytes(nbytes)))
    assert (read.id, read.timing.run_s, read.timing.batch, read.HasField("error")) == ("7", 0.5, 3, False)
    assert read.output == bytes(nbytes)


def test_what_a_later_version_adds_is_passed_over() -> None:
    data = protocol.Request(id="1", boundary=b"abc").SerializeToString() + b"\xa2\x06\x03new"  # field 100
    assert protocol.Request.FromString(data).boundary == b"abc"


_HEADS = st.builds(
    protocol.Request, id=st.text(), timeout_s=st.floats(allow_nan=False), codec=st.sampled_from(["", "raw", "zstd"])
)


@given(_HEADS, st.binary(), st.integers(0, 30), st.binary(max_size=3))
def test_a_message_taken_apart_is_what_protobuf_reads_or_is_refused_as_it_refuses_it(
    head: Any, payload: bytes, at: int, instead: bytes
) -> None:
    whole = protocol.with_payload(head, payload)
    for data in (whole, whole[:at], whole[:at] + instead + whole[at + len(instead) :], whole + instead, whole + whole):
        try:
            expected = protocol.Request.FromString(data)
        except DecodeError:
            with pytest.raises(DecodeError):
                protocol.split_payload(protocol.Request, data)
            continue
        read, found = protocol.split_payload(protocol.Request, data)
        assert bytes(found) == expected.boundary
        read.boundary = expected.boundary
        assert read == expected


class TooMuch(Exception):
    """More was looked at than there is reason to."""


class Counted(bytes):
    """Counts how often it is looked into."""

    looks = 0

    def __getitem__(self, key: Any) -> Any:
        self.looks += 1
        if self.looks > 200_000:
            raise TooMuch
        return super().__getitem__(key)


def test_a_message_of_many_small_fields_is_left_to_protobuf() -> None:
    data = Counted(b"\x20\x00" * 1_000_000 + protocol.Request(id="7", boundary=b"abc").SerializeToString())
    head, payload = protocol.split_payload(protocol.Request, data)
    assert (head.id, bytes(payload)) == ("7", b"abc")


@given(st.integers(0, 2**32))
@settings(max_examples=1000, deadline=None)
def test_what_is_taken_apart_is_what_protobuf_reads(seed: int) -> None:
    dice = random.Random(seed)
    made = protocol.Request(id="mine", timeout_s=2.5, codec="zstd", boundary=dice.randbytes(dice.choice((0, 3, 200))))
    data = mutated(made.SerializeToString(), dice)
    try:
        whole = protocol.Request.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            protocol.split_payload(protocol.Request, data)
        return
    head, payload = protocol.split_payload(protocol.Request, data)
    assert bytes(payload) == whole.boundary
    assert (head.id, head.codec) == (whole.id, whole.codec)
    assert struct.pack("<d", head.timeout_s) == struct.pack("<d", whole.timeout_s)


def test_what_is_put_in_front_of_a_boundary_is_not_held_with_it() -> None:
    unknown = b"\xa2\x06" + protocol._varint(1_000_000) + bytes(1_000_000)
    for field in (unknown, b"\x22" + unknown[2:]):  # numbers 100 and 4, of one and two bytes
        head, payload = protocol.split_payload(
            protocol.Request, field + protocol.with_payload(protocol.Request(id="7"), b"abc")
        )
        assert (head.id, payload.obj) == ("7", b"abc")
