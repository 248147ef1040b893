"""Mutated messages at a server's port and in every field: `python -m tests.remote.fuzz`.

Whatever comes, the server lives, its memory stays, it closes the connection or answers with an error, and what it
answers with a result is what the model makes of what it was sent.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc
import torch
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_128_digest

import microtome as mt
from microtome import zoo
from microtome.errors import BadBoundary
from microtome.remote import protocol
from microtome.split.boundary.serialization import CHECKSUM_BYTES, HEADER_OFFSET, MAGIC, PREFIX, VERSION, padding
from microtome.split.boundary.tensor_bytes import BLOCK
from tests.remote.process import ServerProcess

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CODECS = ("", "raw", "zstd", "lz4", "fp16", "int8+zstd", "pickle", "zstd+zstd", "+", "\0", "raw" * 1000)
TIMEOUTS = (0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, 1e-9, 60.0)
#: How many requests are on a stream before its replies are awaited.
ROUND = 50


@dataclass
class Fuzzed:
    """What came of it: how many of each kind were sent, and what became of them."""

    sent: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    warm_bytes: int = 0
    end_bytes: int = 0
    seconds: float = 0.0

    @property
    def growth(self) -> float:
        return self.end_bytes / self.warm_bytes - 1

    def __str__(self) -> str:
        def listed(counter: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in counter.most_common())

        return (
            f"{sum(self.sent.values())} mutated messages in {self.seconds:.0f} s ({listed(self.sent)}): "
            f"{listed(self.outcomes)}; {self.wrong} wrong answers; the server's memory {self.warm_bytes / 1e6:.1f} MB "
            f"warm, {self.end_bytes / 1e6:.1f} MB at the end: {100 * self.growth:+.2f} %"
        )


# -- mutations ---------------------------------------------------------------------------------------------------------


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Some bytes changed, put in, left out or doubled."""
    out = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4, 16))):
        at = dice.randrange(len(out) + 1)
        length = dice.choice((1, 1, 2, 4, 8, 64))
        kind = dice.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            out[at : at + length] = dice.randbytes(length)
        elif kind == 2:
            out[at:at] = dice.randbytes(length)
        elif kind == 3:
            del out[at : at + length]
        elif kind == 4:
            out[at:at] = out[at : at + length]
        else:
            out[at : at + length] = dice.choice((b"\xff", b"\0", b"\x7f", b"\x80")) * length
    return bytes(out) if dice.random() < 0.95 else bytes(out[: dice.randrange(len(out) + 1)])


def repaired(header: bytes, body: bytes) -> bytes:
    """A boundary with this header and these parts, whose lengths and checksums fit."""
    header += b" " * padding(HEADER_OFFSET + len(header))
    total = HEADER_OFFSET + len(header) + len(body) + CHECKSUM_BYTES
    prefix = PREFIX.pack(MAGIC, VERSION, len(header), total)
    digests = [xxh3_64_digest(prefix + header)]
    try:
        lengths = [part[0] for entry in json.loads(header)["tensors"] for part in entry["parts"]]
        at = 0
        for length in lengths:
            part = body[at : at + length]
            digests += [xxh3_128_digest(part[begin : begin + BLOCK]) for begin in range(0, len(part), BLOCK)]
            at += length + padding(length)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        pass  # then it does not get as far as the parts
    return prefix + digests[0] + header + body + xxh3_128_digest(b"".join(digests))


STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 1e308, float("nan"), "", "float64", "complex128", "bool", "object"),
    *(
        [],
        {},
        [[]],
        [0],
        [-1],
        [2**40, 2**40],
        [2**62],
        "\ud800",
        "../../etc/passwd",
        "__class__",
        "layer1",
        "fc",
        "x" * 5000,
    ),
)


def another_header(header: Any, dice: random.Random) -> Any:
    """One value somewhere in it replaced, left out or doubled."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(header)
    inside, key = dice.choice(places)
    kind = dice.randrange(5)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, list):
        inside.insert(key, inside[key])
    elif kind == 2 and isinstance(inside[key], int):
        inside[key] += dice.choice((-1, 1, 64, -64))
    elif kind == 3:
        inside[key] = dice.choice(places)[0] if dice.random() < 0.2 else dice.choice(STRANGE)
    else:
        inside[key] = dice.choice(STRANGE)
    return header


def deeply(data: bytes, dice: random.Random) -> bytes:
    """A boundary changed so that its checksums hold: the header, or the values."""
    length = PREFIX.unpack_from(data)[2]
    header, body = data[HEADER_OFFSET : HEADER_OFFSET + length], data[HEADER_OFFSET + length : -CHECKSUM_BYTES]
    kind = dice.randrange(4)
    try:
        if kind == 0:
            return repaired(mutated(header.rstrip(), dice), body)
        if kind == 1:
            body = mutated(body, dice)
            return repaired(header, body)
        changed = another_header(json.loads(header), dice)
        return repaired(json.dumps(changed, separators=(",", ":")).encode("ascii"), body)
    except (ValueError, RecursionError):  # it has itself inside
        return repaired(mutated(header.rstrip(), dice), body)


# -- what is sent ------------------------------------------------------------------------------------------------------


class Fuzzer:
    """Sends mutated messages to one server, and looks at what comes back."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.server = server
        self.found = Fuzzed()
        self._dice = random.Random(seed)
        self._model, x = zoo.build("tiny-resnet")
        assert isinstance(x, Tensor)
        self._x = x[:1]
        self._splitter = {at: mt.split(self._model, x, at=at) for at in ("layer1", "layer2.0", "pool")}
        with torch.no_grad():
            self._good = {
                at: [parts[0](self._x).to_bytes(codec) for codec in ("raw", "zstd", "int8")]
                for at, parts in self._splitter.items()
            }
            self._expected = self._model(self._x)
        self._open()

    def _open(self) -> None:
        self._channel = grpc.insecure_channel(self.server.address, [("grpc.use_local_subchannel_pool", 1)])

    def close(self) -> None:
        self._channel.close()

    # Raw bytes.

    def garbage(self) -> None:
        """Anything on the port."""
        self._raw("port", self._dice.randbytes(self._dice.choice((1, 9, 24, 100, 5000))))

    def frames(self) -> None:
        """HTTP/2 from its preface on, then frames that make no sense, or half of one that does."""
        dice = self._dice
        out = bytearray(PREFACE if dice.random() < 0.9 else mutated(PREFACE, dice))
        out += _frame(4, 0, 0, b"")
        for _ in range(dice.randrange(1, 8)):
            body = dice.randbytes(dice.choice((0, 4, 5, 8, 40, 1000)))
            stream = dice.choice((0, 1, 1, 3, 2**31 - 1))
            out += _frame(dice.choice((*range(10), 200)), dice.choice((0, 1, 4, 5, 0x25, 255)), stream, body)
        data = bytes(out)
        self._raw("http/2", data if dice.random() < 0.7 else mutated(data, dice))

    def _raw(self, kind: str, data: bytes) -> None:
        self.found.sent[kind] += 1
        host, _, port = self.server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as line:
            try:
                line.sendall(data)
                line.shutdown(socket.SHUT_WR)
                while line.recv(65536):
                    pass
                self.found.outcomes["closed"] += 1
            except ConnectionError:
                self.found.outcomes["closed"] += 1

    # Messages of gRPC.

    def calls(self) -> None:
        """Each unary method with bytes that nearly are its message."""
        dice = self._dice
        good = {
            "Hello": protocol.HelloRequest(protocol=1, microtome="0.1", torch="2", fingerprint="a-b"),
            "Echo": protocol.EchoRequest(payload=b"abc", reply_bytes=dice.choice((0, 3, 100, 2**32 - 1))),
            "Run": protocol.Request(id="1", codec="raw", boundary=dice.choice(self._good["pool"])),
        }
        name = dice.choice(list(good))
        data = mutated(good[name].SerializeToString(), dice)
        self.found.sent["message"] += 1
        method = protocol.METHODS[name]
        try:
            reply = self._channel.unary_unary(f"/{protocol.SERVICE}/{name}")(data, timeout=30)
        except grpc.RpcError as error:
            self._refused(error)
            return
        read = method.parse_reply(reply)
        if name == "Run":
            self._look(data, read)
        else:
            self.found.outcomes["answered"] += 1

    def stream(self) -> None:
        """A round of requests on one stream, each mutated in one of its fields or in its bytes."""
        sent: dict[str, bytes] = {}
        queue: SimpleQueue[bytes | None] = SimpleQueue()
        for number in range(ROUND):
            data = self._request(str(number))
            sent[_id(data, str(number))] = data
            queue.put(data)
        queue.put(None)
        call = self._channel.stream_stream(
            f"/{protocol.SERVICE}/Stream", response_deserializer=protocol.Reply.FromString
        )(iter(queue.get, None), timeout=60)
        came = Counter[str]()
        try:
            for reply in call:
                came[reply.id] += 1
                self._look(sent[reply.id], reply)
        except grpc.RpcError as error:
            self._refused(error)
        else:
            assert set(came) == set(sent), "a request was not answered, and the stream ended well"

    def _request(self, id_: str) -> bytes:
        dice = self._dice
        at = dice.choice(list(self._good))
        good = dice.choice(self._good[at])
        kind = dice.choice(("deep", "deep", "deep", "boundary", "field", "field"))
        self.found.sent[kind] += 1
        request = protocol.Request(id=id_, codec="raw", boundary=good)
        if kind == "deep":
            request.boundary = deeply(good, dice)
        elif kind == "boundary":
            request.boundary = mutated(good, dice)
        else:
            request.codec = dice.choice(CODECS)
            request.timeout_s = dice.choice((*TIMEOUTS, struct.unpack("<d", dice.randbytes(8))[0]))
            request.id = dice.choice((id_, id_ + "\0", id_ + "é" * 100, id_ + "x" * 10_000))
        data: bytes = request.SerializeToString()
        return data

    # What comes back.

    def _refused(self, error: grpc.RpcError) -> None:
        code = error.code()
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), (
            f"{code}: {error.details()}"
        )
        assert error.details(), "it is closed without a reason"
        self.found.outcomes["refused"] += 1

    def _look(self, data: bytes, reply: Any) -> None:
        if reply.HasField("error"):
            assert reply.error.message, "an error without a reason"
            self.found.outcomes[protocol.KINDS[reply.error.kind].lower()] += 1
            return
        self.found.outcomes["result"] += 1
        if not self._is_right(protocol.Request.FromString(data), reply):
            self.found.wrong += 1
            sys.stderr.write(f"a wrong answer to {data[:2000]!r}\n")

    @torch.no_grad()
    def _is_right(self, request: Any, reply: Any) -> bool:
        """Whether it is what the model makes of what was sent: values may be changed, and are a boundary still."""
        try:
            boundary = mt.Boundary.from_bytes(request.boundary)
            expected = self._splitter[boundary.at][1](boundary)
        except (BadBoundary, KeyError):
            return False
        (got,) = mt.Boundary.from_bytes(reply.output).tensors.values()
        if request.codec not in ("", "raw", "zstd", "lz4"):
            return got.shape == expected.shape
        return bool(torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8)))

    def good(self) -> None:
        """What is right is answered."""
        self._open_again()
        for name, several in self._good.items():
            request = protocol.Request(id=name, boundary=several[0])
            call = self._channel.unary_unary(
                f"/{protocol.SERVICE}/Run", response_deserializer=protocol.Reply.FromString
            )
            reply = call(request.SerializeToString(), timeout=30)
            (got,) = mt.Boundary.from_bytes(reply.output).tensors.values()
            assert got.equal(self._expected), name
        assert self.server.is_alive

    def _open_again(self) -> None:
        self._channel.close()
        self._open()


def _id(data: bytes, otherwise: str) -> str:
    return str(protocol.Request.FromString(data).id) or otherwise


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body


def rounds(fuzzer: Fuzzer) -> Iterator[Callable[[], None]]:
    """What is done again and again: nine in ten messages are on streams."""
    while True:
        yield from (fuzzer.garbage, fuzzer.frames, fuzzer.calls, fuzzer.calls, fuzzer.stream)


def fuzz(count: int, seed: int = 0) -> Fuzzed:
    """Send a number of mutated messages, with valid ones in between."""
    began = time.perf_counter()
    with ServerProcess("zoo:tiny-resnet", "--log-level", "error", "--max-message", "1MB") as server:
        fuzzer = Fuzzer(server, seed)
        found = fuzzer.found
        for number, act in enumerate(rounds(fuzzer)):
            act()
            total = sum(found.sent.values())
            if not found.warm_bytes and total >= count // 5:
                found.warm_bytes = server.rss
            if number % 50 == 0 or total >= count:
                fuzzer.good()
            if total >= count:
                break
        found.end_bytes = server.rss
        fuzzer.close()
        server.terminate()
        assert server.end() == 0, server.stderr
        # Neither tracebacks, nor what came from outside.
        assert not server.stderr, server.stderr
        found.seconds = time.perf_counter() - began
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = fuzz(given.messages, given.seed)
    sys.stdout.write(f"{found}\n")
    if found.wrong or found.growth > 0.05:
        sys.exit(1)


if __name__ == "__main__":
    main()
