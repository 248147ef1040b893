"""Servers that die, hang and are slow, and lines that break: an answer is right, or there is a clear error."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

import microtome as mt
from microtome.errors import MicrotomeError, RemoteError
from microtome.inputs import Inputs
from microtome.remote import protocol
from microtome.remote.client import Remote
from microtome.remote.request import RemoteRequest
from microtome.remote.server import Server
from tests.remote.process import ServerProcess
from tests.remote.proxy import Pair, Proxy, Weather, until
from tests.remote.slow import Gate, Slow, asking

SLOW = "tests.remote.slow:Slow", "--input", "1x8"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A process that is killed, hung and starved; each test leaves it running."""
    with ServerProcess(*SLOW) as started:
        yield started


@pytest.fixture
def here() -> Iterator[Server]:
    """One in this process, whose figures can be read."""
    with mt.serve(Slow().eval(), asking(), listen="127.0.0.1:0") as started:
        yield started


def connected(address: str, **options: Any) -> Remote:
    options = {"at": "head", "fallback": None, "codec": "raw", **options}
    return mt.connect(Slow().eval(), asking(), address, **options)


@torch.no_grad()
def truth(x: Tensor) -> Tensor:
    """What the model returns, without waiting for it."""
    out: Tensor = Slow().tail(x + 1)
    return out


def in_background(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Begin something in a thread; ask for what it returns, or raises."""
    threads = ThreadPoolExecutor(1)
    future = threads.submit(call, *args)
    threads.shutdown(wait=False)
    return lambda: future.result(300)


def alive(proxy: Proxy) -> Pair:
    """The open connection through a proxy; wait for one where the client is still reconnecting."""
    found: list[Pair] = []

    def is_connected() -> bool:
        found[:] = [pair for pair in reversed(proxy.pairs) if not pair.ended.is_set()]
        return bool(found)

    until(is_connected)
    return found[0]


def counted(server: Server, name: str, **labels: str) -> float:
    return server.metrics.registry.get_sample_value(f"microtome_{name}_total", labels) or 0.0


# -- the server dies ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_of_a_tensor_and_started_again_answers(server: ServerProcess) -> None:
    x = asking(rows=100_000)
    with Proxy(server.address) as proxy, connected(proxy.address, deadline=60.0) as remote:
        pair = alive(proxy)
        before = pair.up.passed
        pair.up.bytes_per_s = 8e6
        answer = in_background(remote, x)
        until(lambda: pair.up.passed - before > x.nbytes // 4)
        server.kill()
        assert pair.up.passed - before < x.nbytes
        server.start()
        assert answer().equal(truth(x))
        assert remote.requests[-1].attempts > 1
        assert (remote.requests[-1].where, len(remote.requests)) == ("cloud", 1)


@pytest.mark.slow
def test_a_server_that_is_killed_with_requests_at_every_point_answers_each_once_when_it_is_back() -> None:
    """Of four clients: one request has not arrived, one has in part, one is computed, one has half of its reply."""
    killed = threading.Event()
    with Gate() as gate, ServerProcess(*SLOW, "--concurrency", "2") as server, ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server.address)) for _ in range(4)]
        # Until a deadline, and for 15 s without one, requests are sent again: starting a server may take longer.
        remotes = [stack.enter_context(connected(proxy.address, deadline=300.0)) for proxy in proxies]
        given = [asking(), asking(rows=100_000), asking(gate), asking(rows=1000)]
        unsent, partial, computed, replied = map(alive, proxies)

        def kill(_: int, data: bytes) -> bytes:
            if len(data) < 1000 or killed.is_set():  # what HTTP/2 says beside a reply is shorter
                return data
            server.kill()
            killed.set()
            return data[: len(data) // 2]

        unsent.up.pass_on.clear()
        half, all_ = partial.up.passed + given[1].nbytes // 2, computed.up.passed + given[2].nbytes
        partial.up.bytes_per_s = 20e6
        answers = [in_background(remote, x) for remote, x in zip(remotes[:3], given, strict=False)]
        until(lambda: partial.up.passed > half)
        partial.up.pass_on.clear()
        until(lambda: computed.up.passed > all_)
        replied.down.corrupt = kill
        answers.append(in_background(remotes[3], given[3]))
        assert killed.wait(300)
        gate.open()
        server.start()
        for remote, x, answer in zip(remotes, given, answers, strict=True):
            assert answer().equal(truth(x))
            assert [sent.where for sent in remote.requests] == ["cloud"]
            assert remote.requests[0].attempts > 1
            assert remote._chain.is_idle()


def test_where_the_edge_can_finish_it_does_while_the_server_is_away(server: ServerProcess) -> None:
    gate = Gate()
    x = asking(gate)
    with gate, connected(server.address, fallback="local") as remote:
        assert remote(asking()) is not None
        answer = in_background(remote, x)
        until(lambda: not remote._chain.is_idle())
        server.kill()
        gate.open()
        assert answer().equal(truth(x))
        assert remote.requests[-1].where == "edge"
        assert server.address in (remote.requests[-1].reason or "")
        other = asking()
        assert remote(other).equal(truth(other))  # now it is known to be down
        assert (remote.requests[-1].where, remote.requests[-1].attempts) == ("edge", 0)
        server.start()
        until(lambda: remote._chain.down_reason is None)
        assert remote(other).equal(truth(other))
        assert remote.requests[-1].where == "cloud"


def test_a_server_that_does_not_come_back_is_an_error_where_the_edge_cannot_finish() -> None:
    server = mt.serve(Slow().eval(), asking(), listen="127.0.0.1:0")
    with connected(server.address, deadline=1.0) as remote:
        server.stop()
        with pytest.raises(RemoteError, match=f"{server.address} did not answer in 1 s") as caught:
            remote(asking())
    assert caught.value.kind == "DEADLINE"


def test_a_server_that_comes_back_with_other_weights_is_not_believed() -> None:
    server = mt.serve(Slow().eval(), asking(), listen="127.0.0.1:0")
    with connected(server.address) as remote:
        remote(asking())
        server.stop()
        other = Slow().eval()
        with torch.no_grad():
            other.tail.bias.add_(1)
        with (
            mt.serve(other, asking(), listen=server.address),
            pytest.raises(RemoteError, match="expected a boundary of Slow with the fingerprint") as caught,
        ):
            remote(asking())
    assert caught.value.kind == "WRONG_MODEL"


# -- the server hangs, or is slow --------------------------------------------------------------------------------------


def test_when_the_server_hangs_the_edge_finishes_before_the_deadline(server: ServerProcess) -> None:
    with connected(server.address, deadline=0.5, fallback="local") as remote:
        server.hang()
        try:
            for _ in range(3):
                x = asking()
                assert remote(x).equal(truth(x))
                assert remote.requests[-1].where == "edge"
        finally:
            server.go_on()
        remote.options = replace(remote.options, deadline_s=None)

        def comes_from_the_cloud() -> bool:
            x = asking()
            assert remote(x).equal(truth(x))
            return remote.requests[-1].where == "cloud"

        until(comes_from_the_cloud)


def test_when_the_server_hangs_and_the_edge_cannot_finish_the_deadline_is_an_error(server: ServerProcess) -> None:
    with connected(server.address, deadline=0.3) as remote:
        server.hang()
        try:
            with pytest.raises(RemoteError, match="did not answer in 0.3 s") as caught:
                remote(asking())
            assert caught.value.kind == "DEADLINE"
        finally:
            server.go_on()
    with connected(server.address) as remote:
        x = asking()
        assert remote(x).equal(truth(x))


def begun(remote: Remote, x: Tensor) -> RemoteRequest:
    """Send a request; `Connection.cancel` then cancels it, as a deadline does."""
    return remote._send(remote._start(Inputs(x)))


def test_an_answer_that_comes_too_late_is_nobodys(here: Server) -> None:
    with Gate() as gate, connected(here.address) as remote:
        late = begun(remote, asking(gate))
        until(lambda: here.metrics.queue._value.get() == 1)
        remote._chain.cancel(late)
        gate.open()
        until(lambda: counted(here, "requests", cut="head") == 2)  # the warm-up, and that one
        for _ in range(5):
            x = asking()
            assert remote(x).equal(truth(x))
        assert not late.reply.done()
        assert remote._chain.pools[0].connections[0].reconnects == 0


def test_a_request_whose_client_has_given_up_is_not_computed(here: Server) -> None:
    with Gate() as gate, connected(here.address) as busy, grpc.insecure_channel(here.address) as channel:
        x = asking(gate)
        answer = in_background(busy, x)
        until(lambda: here.metrics.queue._value.get() == 1)
        late = protocol.Request.FromString(request("late", asking()))
        late.timeout_s = 1e-3
        run = channel.unary_unary(f"/{protocol.SERVICE}/Run", response_deserializer=protocol.Reply.FromString)
        reply = run.future(late.SerializeToString(), timeout=300)
        until(lambda: here.metrics.queue._value.get() == 2)
        came = perf_counter()
        until(lambda: perf_counter() - came > late.timeout_s)
        gate.open()
        assert answer().equal(truth(x))
        error = reply.result().error
        assert protocol.KINDS[error.kind] == "DEADLINE"
        assert "its deadline has passed" in error.message
    assert counted(here, "errors", kind="DEADLINE") == 1
    until(lambda: counted(here, "requests", cut="head") == 2)  # the warm-up, and the one that waited


def test_the_server_bears_the_pings_of_a_client_that_waits_for_a_long_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "microtome.remote.server._MIN_PING_INTERVAL_MS", 0
    )  # a client pings every 10 s, this one at once

    def frame(kind: int, data: bytes) -> bytes:
        return len(data).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + data

    settings, ping, goaway = 4, 6, 7
    with mt.serve(Slow().eval(), asking(), listen="127.0.0.1:0") as server:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as line, line.makefile("rb") as replies:
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings, b""))
            for _ in range(12):
                line.sendall(frame(ping, b"microtom"))
                kind = None
                while kind != ping:
                    head = replies.read(9)
                    kind, data = head[3], replies.read(int.from_bytes(head[:3], "big"))
                    assert kind != goaway, data


def test_over_a_slow_line_the_edge_finishes_in_time(server: ServerProcess) -> None:
    slow = Weather(bytes_per_s=20_000)
    with (
        Proxy(server.address) as proxy,
        connected(proxy.address, deadline=0.5, fallback="local") as remote,
    ):
        alive(proxy).up.bytes_per_s = slow.bytes_per_s
        x = asking(rows=4000)  # 128 kB: some 6 s
        assert remote(x).equal(truth(x))
        assert remote.requests[-1].where == "edge"


def test_a_line_with_a_long_way_changes_no_answer(server: ServerProcess) -> None:
    def far(_: int) -> tuple[Weather, Weather]:
        return Weather(delay_s=0.01), Weather(delay_s=0.01)

    given = [asking(rows=1 + index) for index in range(20)]
    with Proxy(server.address, far) as proxy, connected(proxy.address) as remote:
        got = list(remote.stream(given, window=6))
    assert all(one.equal(truth(x)) for one, x in zip(got, given, strict=True))
    assert all(sent.wire_s >= 0.02 for sent in remote.requests)


# -- the line breaks ---------------------------------------------------------------------------------------------------

# A connection opens with some hundred bytes, then comes the handshake, the warm-up, and requests of 64 kB each.
PLACES = [0, 9, 24, 60, 100, 200, 500, 800, 1400, 2000, 20_000, 65_000, 70_000, 150_000]


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("place", PLACES)
def test_a_line_that_is_cut_anywhere_costs_no_answer(here: Server, direction: str, place: int) -> None:
    def cut_first(number: int) -> tuple[Weather, Weather]:
        bad = Weather(cut_after=place if number == 0 else None)
        return (bad, Weather()) if direction == "up" else (Weather(), bad)

    given = [asking(rows=2000) for _ in range(4)]
    with Proxy(here.address, cut_first) as proxy, connected(proxy.address) as remote:
        for x in given:
            assert remote(x).equal(truth(x))
        assert [sent.where for sent in remote.requests] == ["cloud"] * 4
        assert proxy.made > 1 or direction == "down"


def test_a_line_that_breaks_again_and_again_costs_no_answer_of_a_stream(server: ServerProcess) -> None:
    def breaking(number: int) -> tuple[Weather, Weather]:
        return Weather(cut_after=3000 + 40_000 * (number % 5)), Weather()

    given = [asking(rows=1 + index % 300) for index in range(200)]
    with Proxy(server.address) as proxy, connected(proxy.address) as remote:
        proxy.weather = breaking
        proxy.cut()
        got = list(remote.stream(given, window=4))
        assert proxy.made > 5
    assert len(got) == len(given)
    assert all(one.equal(truth(x)) for one, x in zip(got, given, strict=True))
    assert [sent.where for sent in remote.requests] == ["cloud"] * len(given)


def test_half_a_message_is_not_computed(here: Server) -> None:
    x = asking(rows=10_000)
    with Proxy(here.address) as proxy, connected(proxy.address) as remote:
        pair = alive(proxy)
        pair.up.cut_after = pair.up.passed + x.nbytes // 2
        assert remote(x).equal(truth(x))
        assert remote.requests[-1].attempts == 2
    until(lambda: counted(here, "requests", cut="head") == 2)  # the warm-up, and the second attempt
    assert sum(counted(here, "errors", kind=kind) for kind in protocol.KINDS) == 0


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_line_that_changes_bytes_gives_no_wrong_answer(here: Server, direction: str) -> None:
    x = asking(rows=40)
    with Proxy(here.address) as proxy, connected(proxy.address, deadline=0.3) as remote:
        for place in range(0, 240, 15):
            until(lambda: remote._chain.down_reason is None)
            weather = getattr(alive(proxy), direction)
            weather.corrupt = _flipping(weather.passed + place, 1 << place % 8)
            try:
                assert remote(x).equal(truth(x)), place
            except MicrotomeError:
                proxy.cut()  # where the length of a frame is wrong, both sides wait for the rest
                until(lambda: remote._chain.down_reason is not None)
        weather.corrupt = None
        until(lambda: remote._chain.down_reason is None)
        remote.options = replace(remote.options, deadline_s=None)
        assert remote(x).equal(truth(x))


def _flipping(place: int, bit: int) -> Callable[[int, bytes], bytes]:
    def flip(begins: int, data: bytes) -> bytes:
        at = place - begins
        if not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]

    return flip


def test_a_damaged_id_is_found_and_the_request_sent_again(here: Server) -> None:
    """The id stands in front: where it is damaged, the reply is one to a request that nobody made."""
    x = asking()
    with Proxy(here.address) as proxy, connected(proxy.address) as remote:
        damaged = threading.Event()

        def damage(_: int, data: bytes) -> bytes:
            at = data.find(b"\x0a\x20")  # field 1, of 32 bytes
            if at < 0 or damaged.is_set():
                return data
            damaged.set()
            return data[: at + 2] + b"x" + data[at + 3 :]

        alive(proxy).up.corrupt = damage
        assert remote(x).equal(truth(x))
        assert damaged.is_set()
        assert remote.requests[-1].attempts == 2


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_message_over_the_limit_is_refused_by_both_sides() -> None:
    def run(nbytes: int) -> Any:
        call = channel.unary_unary(f"/{protocol.SERVICE}/Run", response_deserializer=protocol.Reply.FromString)
        return call(protocol.Request(id="1", boundary=bytes(nbytes)).SerializeToString(), timeout=120)

    big, small = asking(rows=4000), asking(rows=10)  # 128 kB
    with mt.serve(Slow().eval(), asking(), listen="127.0.0.1:0", max_message="100KB") as server:
        with connected(server.address) as remote:
            with pytest.raises(RemoteError, match="KiB cross at 'head', and .* accepts 97.7 KiB") as caught:
                remote(big)
            assert caught.value.kind == "TOO_LARGE"
            assert remote(small).equal(truth(small))
        with grpc.insecure_channel(server.address) as channel:
            reply = run(100_001)
            assert protocol.KINDS[reply.error.kind] == "TOO_LARGE"
            assert reply.error.message == "expected at most 97.7 KiB, got 97.7 KiB"
            with pytest.raises(grpc.RpcError) as refused:
                run(200_000)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        with connected(server.address) as remote:
            assert remote(small).equal(truth(small))


def test_a_request_for_which_memory_is_short_is_refused_and_the_next_is_served(server: ServerProcess) -> None:
    with connected(server.address) as remote:
        server.limit_memory(200 << 20)
        try:
            for _ in range(3):
                with pytest.raises(RemoteError, match="could not answer: .*can't allocate memory") as caught:
                    remote(asking(megabytes=1000))
                assert caught.value.kind == "OUT_OF_MEMORY"
                x = asking()
                assert remote(x).equal(truth(x))
            given = [asking(), asking(megabytes=1000), asking()]
            with connected(server.address, fallback="local") as other:
                got = list(other.stream(given))
            assert all(one.equal(truth(x)) for one, x in zip(got, given, strict=True))
            assert [sent.where for sent in other.requests] == ["cloud", "edge", "cloud"]
        finally:
            server.limit_memory(None)
        x = asking(megabytes=1000)
        assert remote(x).equal(truth(x))


# -- clients -----------------------------------------------------------------------------------------------------------


def streamed(channel: grpc.Channel, requests: Any) -> Any:
    method = channel.stream_stream(f"/{protocol.SERVICE}/Stream", response_deserializer=protocol.Reply.FromString)
    return method(iter(requests.get, None))


def request(id_: str, x: Tensor) -> bytes:
    head, _ = mt.split(Slow().eval(), asking(), at="head")
    data: bytes = protocol.Request(id=id_, boundary=head(x).to_bytes()).SerializeToString()
    return data


def test_what_a_client_asked_that_is_gone_is_not_computed(here: Server) -> None:
    sent: SimpleQueue[bytes | None] = SimpleQueue()
    gate = Gate()
    with gate, grpc.insecure_channel(here.address) as channel:
        call = streamed(channel, sent)
        for number in range(10):
            sent.put(request(str(number), asking(gate)))
        until(lambda: here.metrics.queue._value.get() == 10)
        call.cancel()
        sent.put(None)
        until(lambda: here.metrics.streams._value.get() == 0)
    until(lambda: here.metrics.queue._value.get() == 0)
    with connected(here.address) as remote:
        x = asking()
        assert remote(x).equal(truth(x))
    assert counted(here, "requests", cut="head") <= 1 + 2  # what was being computed; the warm-up, and this one
    until(lambda: here.metrics.streams._value.get() == 0)  # nobody waits for a stream's end


def test_clients_at_different_cuts_at_once_over_bad_lines(server: ServerProcess) -> None:
    def ask(at: str) -> bool:
        def breaking(number: int) -> tuple[Weather, Weather]:
            return Weather(cut_after=5000 + 20_000 * number), Weather(delay_s=0.001)

        given = [asking(rows=1 + index) for index in range(60)]
        with Proxy(server.address, breaking) as proxy, connected(proxy.address, at=at) as remote:
            return all(remote(x).equal(truth(x)) for x in given)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, ["", "head", "wait", "tail"])) == [True] * 4


# -- the server ends ---------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def test_what_was_taken_before_sigterm_is_answered_and_the_exit_code_is_0() -> None:
    port = free_port()

    def queued() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as reply:
            return b"\nmicrotome_queue 8.0" in reply.read()

    sent: SimpleQueue[bytes | None] = SimpleQueue()
    gate = Gate()
    given = {str(number): asking(gate) for number in range(8)}
    with gate, ServerProcess(*SLOW, "--metrics", f":{port}", "--grace", "300") as server:
        with grpc.insecure_channel(server.address) as channel:
            replies = streamed(channel, sent)
            for id_, x in given.items():
                sent.put(request(id_, x))
            until(queued)
            server.terminate()
            gate.open()
            got = {reply.id: reply for reply in replies}
            assert replies.code() == grpc.StatusCode.OK
            sent.put(None)
        assert server.end() == 0
        assert [json.loads(line)["event"] for line in server.stderr.splitlines()] == []
    assert sorted(got) == sorted(given)
    for id_, x in given.items():
        (output,) = mt.Boundary.from_bytes(got[id_].output).tensors.values()
        assert output.equal(truth(x))


@pytest.mark.slow
def test_sigterm_under_load_loses_nothing_and_a_second_server_goes_on() -> None:
    answered, failed = [], []

    def ask(remote: Remote) -> None:
        for _ in range(60):
            x = asking()
            try:
                assert remote(x).equal(truth(x))
                answered.append(1)
            except RemoteError as error:
                failed.append(error)

    with ServerProcess(*SLOW) as server:
        remotes = [connected(server.address, deadline=60.0) for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            done = [threads.submit(ask, remote) for remote in remotes]
            until(lambda: len(answered) > 40)
            server.terminate()
            assert server.end() == 0
            server.start()
            for one in done:
                one.result(300)
        for remote in remotes:
            remote.close()
    assert (len(answered), failed) == (240, [])


def test_a_server_that_is_stopped_ends_after_its_grace_whatever_runs(here: Server) -> None:
    with Gate() as gate, connected(here.address, deadline=1.5) as remote:
        answer = in_background(remote, asking(gate))
        until(lambda: here.metrics.queue._value.get() == 1)
        here.stop(grace=0.1)
        assert here.wait(0)
        with pytest.raises(RemoteError, match="did not answer in 1.5 s"):
            answer()
