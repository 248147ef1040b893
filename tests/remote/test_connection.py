"""The stream of requests from the side of the client, against servers that are not ours."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import torch

from microtome.errors import BadQuery, RemoteError
from microtome.remote import protocol
from microtome.remote.connection import Connection
from microtome.remote.message import Message
from microtome.remote.security import Security
from microtome.split.boundary.boundary import Boundary


@contextmanager
def answering(stream: Callable[[Iterator[Any], Any], Iterator[bytes]]) -> Iterator[Connection]:
    """A connection to a server that treats a stream so."""
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", -1)])
    handler = grpc.stream_stream_rpc_method_handler(stream, protocol.Request.FromString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(protocol.SERVICE, {"Stream": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    connection = Connection(f"127.0.0.1:{port}")
    try:
        yield connection
    finally:
        connection.close()
        server.stop(0).wait()


def encoded(name: str, nbytes: int = 8) -> Message:
    message = Message(protocol.Request(id=name))
    message.encode(Boundary("layer", "a-b", {"x": torch.zeros(nbytes, dtype=torch.uint8)}, {}))
    return message


def test_a_request_cancelled_before_its_turn_is_not_sent() -> None:
    reads = threading.Event()
    seen: list[str] = []

    def stream(requests: Iterator[Any], _: Any) -> Iterator[bytes]:
        reads.wait()
        for request in requests:
            seen.append(request.id)
            yield protocol.Reply(id=request.id).SerializeToString()

    with answering(stream) as connection:
        late = [encoded(str(number), 4 << 20) for number in range(20)]
        for one in late:
            connection.submit(one)
        for one in late:
            connection.cancel(one)
        last = encoded("last")
        connection.submit(last)
        reads.set()
        assert last.reply.result(120).id == "last"
        assert last.attempts == 1
        # Some are on their way before the server reads: what the buffers of a connection take.
        assert seen[-1] == "last"
        assert len(seen) < 10


def test_a_request_is_sent_again_after_every_break_until_its_retries_are_exhausted() -> None:
    broken: list[str] = []

    def stream(requests: Iterator[Any], context: Any) -> Iterator[bytes]:
        asked = next(requests)
        if len(broken) < 3:
            broken.append(asked.id)
            context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
        yield protocol.Reply(id=asked.id).SerializeToString()

    with answering(stream) as connection:
        impatient, patient = encoded("impatient"), encoded("patient")
        impatient.retry_until, patient.retry_until = -math.inf, math.inf
        connection.submit(impatient)
        with pytest.raises(RemoteError, match="cannot be reached: broken") as raised:
            impatient.reply.result(20)
        assert (raised.value.kind, impatient.attempts) == ("UNREACHABLE", 1)
        connection.submit(patient)
        assert patient.reply.result(20).id == "patient"
        assert (broken, patient.attempts) == (["impatient", "patient", "patient"], 3)


@pytest.mark.parametrize("kind", [-100, -1, 99])
def test_an_error_of_a_kind_that_is_not_known_is_told_as_such(kind: int) -> None:
    def stream(requests: Iterator[Any], _: Any) -> Iterator[bytes]:
        for request in requests:
            yield protocol.Reply(id=request.id, error=protocol.Error(kind=kind, message="no")).SerializeToString()

    with answering(stream) as connection:
        asked = encoded("one")
        connection.submit(asked)
        with pytest.raises(RemoteError, match="could not answer: no") as raised:
            asked.reply.result(120)
        assert raised.value.kind == "UNKNOWN"


def test_a_connection_that_was_closed_says_so_to_who_asks() -> None:
    connection = Connection("127.0.0.1:1")
    connection.close()
    with pytest.raises(RemoteError, match="was closed"):
        connection.call("Echo", protocol.EchoRequest(), timeout=1.0)


def test_a_refused_connection_fails_long_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("microtome.remote.connection.monotonic", lambda: clock[0])
    monkeypatch.setattr("microtome.remote.connection.sleep", lambda s: clock.append(clock.pop() + s))
    connection = Connection("127.0.0.1:1")
    with pytest.raises(
        RemoteError, match=r"127.0.0.1:1 cannot be reached: connection refused: nothing listens there\."
    ):
        connection.call("Echo", protocol.EchoRequest(), timeout=60.0)
    connection.close()
    assert clock[0] < 2.0


def test_a_name_of_the_server_means_that_its_certificate_is_looked_at() -> None:
    def stream(requests: Iterator[Any], _: Any) -> Iterator[bytes]:
        yield from ()

    with answering(stream) as plain:
        connection = Connection(plain.address, Security(server_name="tail.example", token="secret"))
        with pytest.raises(RemoteError, match="does not use TLS"):  # in the clear it would not know the method
            connection.call("Echo", protocol.EchoRequest(), timeout=1.0)
        connection.close()


def test_a_key_without_its_certificate_is_not_passed_over() -> None:
    with pytest.raises(BadQuery, match="expected a client certificate with its key"):
        Connection("127.0.0.1:1", Security(key="key.pem"))
