"""Answer a client with more than it asked for: long replies, bombs, other shapes, long errors, long greetings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import grpc
import torch

import microtome as mt
from microtome import zoo
from microtome.errors import MicrotomeError
from microtome.remote import protocol
from microtome.remote.protocol import DEFAULT_REPLY_BYTES
from microtome.remote.served_model import ServedModel
from microtome.split.boundary.boundary import Boundary
from tests.remote.attack.harness import Outcome, Tally, run_limited
from tests.remote.hostile import Answer, Hostile, truthful

#: Bytes of a reply that is too long, and of a bomb when it has been unpacked.
LONG = 400_000_000
#: What a client may hold of a reply: the message, what protobuf makes of it, and twice that to read it.
BUDGET = 4 * DEFAULT_REPLY_BYTES


def run(seconds: float) -> Outcome:
    model, x = zoo.build("tiny-resnet")
    plain, gzip = (Hostile(ServedModel(model.eval(), x), how) for how in (None, grpc.Compression.Gzip))
    lies = cycle(LIES)
    plain.reply = gzip.reply = lambda request, reply: next(lies)(request, reply)
    with plain.listening() as address, gzip.listening() as compressing:
        ran = run_limited(f"{__name__}:client", address, compressing, seconds, timeout=seconds + 120)
    tally = Tally(**ran.result) if ran.fault is None else Tally()
    faults = [] if ran.fault is None else [ran.fault]
    if tally.held < tally.tried:
        faults.append(f"{tally.tried - tally.held} answers were neither correct nor refused")
    name = "malicious_server"
    return Outcome(name, tally.tried, tally.held, ran.peak_mb, ran.rest_mb, BUDGET / 1e6, faults=tuple(faults))


def client(address: str, compressing: str, seconds: float) -> dict[str, int]:
    """Ask again and again; an answer is correct, or an error that says why not."""
    torch.set_num_threads(1)
    model, x = zoo.build("tiny-resnet")
    model.eval()
    head = mt.split(model, x, at="layer1")[0]
    tally, ends = Tally(), time.monotonic() + seconds
    with torch.no_grad():
        expected = model(x)
        for server in cycle((address, address, compressing)):
            if time.monotonic() > ends:
                break
            try:
                with mt.connect(head, None, server, codec="raw", fallback=None, timeout=10.0) as remote:
                    for _ in range(2 * len(LIES)):
                        tally.tried += 1
                        tally.held += _is_held(remote, x, expected)
            except MicrotomeError:  # it compresses what it says of itself, too
                tally.tried += 1
                tally.held += 1
    return {"tried": tally.tried, "held": tally.held}


def _is_held(remote: Any, x: Any, expected: Any) -> bool:
    try:
        answer = remote(x)
    except MicrotomeError as error:
        return str(error).isprintable() and len(str(error)) < 5000
    return bool(answer.equal(expected))


# -- the lies ----------------------------------------------------------------------------------------------------------


def _long(request: Any, reply: Any) -> bytes:
    return protocol.with_payload(protocol.Reply(id=request.id), bytes(LONG))


def _long_error(request: Any, reply: Any) -> bytes:
    error = protocol.Error(kind=1, message="\x1b[31m\u202e" + "x" * (DEFAULT_REPLY_BYTES // 2))
    data: bytes = protocol.Reply(id=request.id, error=error).SerializeToString()
    return data


def _output(change: Callable[[Boundary], Boundary], codec: str) -> Answer:
    def answer(request: Any, reply: Any) -> bytes:
        return protocol.with_payload(
            protocol.Reply(id=request.id), change(Boundary.from_bytes(reply.output)).to_bytes(codec)
        )

    return answer


def _bomb(boundary: Boundary) -> Boundary:
    return replace(boundary, tensors={"0": torch.zeros(LONG // 4)})


def _other_shape(boundary: Boundary) -> Boundary:
    return replace(boundary, tensors={"0": torch.zeros(1000, 1000)})


def _many_facts(boundary: Boundary) -> Boundary:
    return replace(boundary, facts={**boundary.facts, "more": [{"": 0}] * 1_000_000})


LIES: tuple[Answer, ...] = (
    _long,
    truthful,
    _output(_bomb, "zstd"),
    _long_error,
    _output(_other_shape, "raw"),
    _output(_many_facts, "raw"),
    truthful,
)
