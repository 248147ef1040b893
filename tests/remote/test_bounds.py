"""What a peer can make a server hold, wait for or refuse."""

from __future__ import annotations

import logging
import threading
import urllib.request
from collections.abc import Iterator
from socket import create_connection
from time import monotonic
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2
from torch import Tensor, nn

import microtome as mt
from microtome.errors import RemoteError
from microtome.remote import protocol, security
from microtome.remote.prometheus import Metrics
from microtome.remote.server import Server
from microtome.remote.watchdog import MESSAGE_S, PART_S, WRITE_S, Watchdog
from tests.remote.attack.http2 import Line, prefixed
from tests.remote.proxy import Proxy, Weather, until
from tests.remote.small import small


@pytest.fixture
def server() -> Iterator[Server]:
    model, x = small()
    with mt.serve(model, x, listen="127.0.0.1:0", max_message="32MB") as started:
        yield started


def host(server: Server) -> tuple[str, int]:
    name, _, port = server.address.rpartition(":")
    return name, int(port)


def check_later(server: Server, later_s: float) -> None:
    """Run the check of the watchdog as if it were later."""
    service: Any = server._service
    health = type("None", (), {"checks": (), "watches": ()})()
    done = threading.Event()

    def act() -> None:
        Watchdog(service, health, service.calls._peers).check(monotonic() + later_s)
        done.set()

    server._ready.result().call_soon_threadsafe(act)
    assert done.wait(120)


def unary(server: Server, name: str, data: bytes, **options: Any) -> bytes:
    with grpc.insecure_channel(server.address) as channel:
        reply: bytes = channel.unary_unary(f"/{protocol.SERVICE}/{name}")(data, timeout=120, **options)
        return reply


@torch.no_grad()
def test_a_boundary_over_4_mib_is_sent_in_parts_and_answered(server: Server) -> None:
    model, x = small()
    large = torch.randn(400, *x.shape[1:])
    assert large.nbytes > 4 << 20
    with mt.connect(model, x, server.address, at="", codec="raw", fallback=None) as remote:
        assert remote(large).equal(model(large))
        assert remote.requests[-1].attempts == 1
    assert server._service is not None
    until(lambda: server._service.uploads.reserved == 0 and server._service.queued.reserved == 0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("several", "words"),
    [
        ([protocol.Request(id="1", size=10, boundary=b"123"), protocol.Request(id="2", boundary=b"4")], "next part"),
        ([protocol.Request(id="1", size=2, boundary=b"123")], "expected 2 more bytes of the boundary, got 3"),
        ([protocol.Request(id="1", size=9, boundary=b"123")], "expected a boundary of 9 bytes, got 3"),
        ([protocol.Request(id="1", size=9)], "expected 9 more bytes of the boundary, got 0"),
        (
            [protocol.Request(id="1", size=1 << 40, boundary=b"1")],
            "expected at most 30.5 MiB, got a boundary of 1.00 TiB",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(server: Server, several: list[Any], words: str) -> None:
    sent = iter([one.SerializeToString() for one in several])
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(f"/{protocol.SERVICE}/Stream")(sent, timeout=120))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()


def test_compressed_messages_are_refused(server: Server) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        unary(server, "Hello", bytes(1000), compression=grpc.Compression.Gzip)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_calls_that_say_nothing_make_room_for_others(server: Server) -> None:
    with Line(host(server)) as line:
        for _ in range(100):
            line.call("Hello")
        assert protocol.HelloReply.FromString(unary(server, "Hello", b"")).model == "ResNet"
        until(lambda: len(line.ended) >= 100 - 16)


def test_watchers_of_health_take_no_place_of_clients(server: Server) -> None:
    with Line(host(server)) as line:
        for _ in range(120):
            line.send(line.call("/grpc.health.v1.Health/Watch"), prefixed(b""), end=True)
        until(lambda: len(line.ended) >= 120 - 64)
        assert unary(server, "Hello", b"")


def test_a_call_without_its_message_and_a_request_without_its_next_part_are_ended(server: Server) -> None:
    part = protocol.Request(id="1", size=1000, boundary=b"1").SerializeToString()
    with Line(host(server)) as line:
        line.call("Hello")
        line.send(line.call("Stream"), prefixed(part))
        assert server._service is not None
        calls = server._service.calls
        until(lambda: len(list(calls)) == 2 and any(call.upload for call in calls))
        check_later(server, 1.0)
        assert not line.ended
        check_later(server, max(MESSAGE_S, PART_S) + 1)
        until(lambda: len(line.ended) == 2)
    assert server._service.uploads.reserved == 0


def test_who_takes_no_reply_is_disconnected(server: Server) -> None:
    echo = prefixed(protocol.EchoRequest(reply_bytes=1 << 20).SerializeToString())
    with Line(host(server), window=0) as line:
        line.send(line.call("Echo"), echo, end=True)
        assert server._service is not None
        until(lambda: any(call.write_in_progress for call in server._service.calls))  # type: ignore[union-attr]
        assert line.is_open
        check_later(server, WRITE_S + 10)
        until(lambda: not line.is_open)
    until(lambda: server._service.echoes.reserved == 0)  # type: ignore[union-attr]


class Wide(nn.Module):
    """Returns 4 MiB for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y.repeat(1, 1 << 18)


@torch.no_grad()
def test_a_slow_client_gets_a_reply_that_takes_all_room_if_nobody_else_waits() -> None:
    model, x = Wide().eval(), torch.ones(1, 4)
    slow = Weather(bytes_per_s=4 << 20)  # STUCK_S is over long before the reply is there
    with (
        mt.serve(model, x, listen="127.0.0.1:0", max_message="4MB") as started,
        Proxy(started.address, lambda _: (Weather(), slow)) as proxy,
        mt.connect(model, x, proxy.address, at="first", codec="raw", fallback=None) as remote,
    ):
        assert remote(x).equal(model(x))
        assert remote.requests[-1].attempts == 1


@torch.no_grad()
def test_the_link_to_a_server_that_takes_short_messages_is_measured() -> None:
    model, x = small()
    with (
        mt.serve(model, x, listen="127.0.0.1:0", max_message="1MB") as started,
        mt.connect(model, x, started.address, at="", codec="auto", fallback=None) as remote,
    ):
        assert remote(x).equal(model(x))


def test_a_wrong_token_is_answered_late_and_the_right_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "DELAY_S", 3600.0)
    with mt.serve(*small(), listen="127.0.0.1:0", token="right") as server, Line(host(server)) as line:
        for _ in range(security.MAX_DELAYED):
            line.call("Hello", "wrong")
        assert unary(server, "Hello", b"", metadata=(("authorization", "Bearer right"),))
        assert (line.is_open, line.ended) == (True, set())
        line.call("Hello", "wrong")
        until(lambda: not line.is_open)


def test_64_characters_of_an_id_are_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "microtome.remote"):
        unary(server, "Run", protocol.Request(id="x" * 100_000).SerializeToString())
        unary(server, "Hello", protocol.HelloRequest(torch="y" * 100_000).SerializeToString())
        until(lambda: {"failed", "hello"} <= {record.message for record in caplog.records})
    values = [value for record in caplog.records for value in vars(record).values() if isinstance(value, str)]
    assert max(map(len, values)) < 3000
    assert "x" * 64 in values


def test_a_profile_that_failed_is_not_tried_at_every_call(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail() -> str:
        tried.append(1)
        raise ValueError("no profile")

    monkeypatch.setattr(server.served, "profile", fail)
    for _ in range(3):
        with pytest.raises(grpc.RpcError, match="it cannot be profiled: ValueError: no profile"):
            unary(server, "Profile", b"")
    assert len(tried) == 1


def test_metrics_are_shown_beside_many_that_say_nothing_in_one_thread() -> None:
    shown = Metrics().listen("127.0.0.1:0")
    before = set(threading.enumerate())  # those of another server may still end
    lines = [create_connection(("127.0.0.1", shown.port)) for _ in range(200)]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{shown.port}/metrics", timeout=120) as reply:
            assert b"microtome_queue 0.0" in reply.read()
        assert set(threading.enumerate()) <= before
    finally:
        for line in lines:
            line.close()
        shown.close()


# -- a device that fails -----------------------------------------------------------------------------------------------


def status(server: Server) -> int:
    with grpc.insecure_channel(server.address) as channel:
        data = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=120)
    return int(health_pb2.HealthCheckResponse.FromString(data).status)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] == 42:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.first(x)


def test_after_a_failure_of_the_device_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Failing().eval(), torch.zeros(1, 2)
    bad = torch.full((1, 2), 42.0)
    with (
        mt.serve(model, x, listen="127.0.0.1:0") as server,
        mt.connect(model, x, server.address, at="", codec="raw", fallback=None, deadline=5.0) as remote,
    ):
        with pytest.raises(RemoteError, match="device-side assert") as caught:
            remote(bad)  # the device is well
        assert (caught.value.kind, server.failure, status(server)) == ("MODEL_FAILED", None, 1)
        monkeypatch.setattr(server.served, "device_failure", lambda: "device-side assert")
        with pytest.raises(RemoteError):
            remote(bad)
        until(lambda: status(server) == health_pb2.HealthCheckResponse.NOT_SERVING)
        assert server.failure == "device-side assert"
        with pytest.raises(grpc.RpcError, match="the device failed: device-side assert"):
            unary(server, "Hello", b"")


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x))


@pytest.mark.gpu
def test_an_index_out_of_range_on_a_gpu_ends_the_server_process() -> None:
    from tests.remote.process import ServerProcess

    with ServerProcess("tests.remote.test_bounds:Indexed", "--input", "1x3:int64", "--device", "cuda") as server:
        with grpc.insecure_channel(server.address) as channel:
            data = channel.unary_unary(f"/{protocol.SERVICE}/Hello")(b"", timeout=120)
            hello = protocol.HelloReply.FromString(data)
            facts = {"plain": [], "tensors": ["0"]}
            bad = mt.Boundary("", hello.fingerprint, {"0": torch.full((1, 3), 999)}, facts)
            request = protocol.Request(id="1", boundary=bad.to_bytes())
            reply = channel.unary_unary(f"/{protocol.SERVICE}/Run")(request.SerializeToString(), timeout=120)
            assert protocol.Reply.FromString(reply).HasField("error")
        assert server.end() == 1
        assert "the device failed" in server.stderr
