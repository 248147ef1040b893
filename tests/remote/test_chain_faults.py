"""Chains whose servers die, hang or are late, and whose lines break: no answer is wrong, and none is lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import RemoteError
from microtome.remote.client import Remote
from microtome.remote.connection import Connection
from microtome.remote.message import Message
from microtome.remote.server import Server
from microtome.remote.server_pool import ServerPool
from microtome.results.requests import RequestRecord
from tests.marks import slow
from tests.remote.chains import connected, servers_of, serving
from tests.remote.process import ServerProcess
from tests.remote.proxy import Proxy, Weather, until
from tests.remote.slow import Gate, Slow, asking
from tests.remote.small import small

SLOW = "tests.remote.slow:Slow", "--input", "1x8"


@pytest.fixture(scope="module")
def resnet() -> tuple[nn.Module, Tensor]:
    return small()


@pytest.fixture(scope="module")
def pair(resnet: tuple[nn.Module, Tensor]) -> Iterator[list[Server]]:
    with servers_of(*resnet, 2) as servers:
        yield servers


def counted(server: Server, name: str, **labels: str) -> float:
    return server.metrics.registry.get_sample_value(f"microtome_{name}_total", labels) or 0.0


def test_only_the_stages_that_are_left_run_here_if_a_server_dies() -> None:
    model = Slow().eval()
    with ServerProcess(*SLOW) as first, ServerProcess(*SLOW) as second, Gate() as gate:
        servers = first.address, second.address
        options = {"at": ["head", "wait"], "fallback": "local"}
        with connected(model, asking(), *servers, **options) as remote, ThreadPoolExecutor(1) as threads:
            x = asking(gate)
            second.hang()
            answer = threads.submit(remote, x)
            gate.open()  # which the first server waits for
            until(lambda: bool(remote._chain.pools[1].connections[0]._pending))
            second.kill()
            assert answer.result(60).equal(model(x))
            record = remote.requests[-1]
            assert record.where == "edge"
            assert second.address in (record.reason or "")
            assert [hop.server for hop in record.hops] == [first.address]  # its stage did not run here
            x = asking()
            assert remote(x).equal(model(x))
            assert remote.requests[-1].hops == ()  # the chain is known to be broken
        with pytest.raises(RemoteError, match=f"{second.address} cannot be reached"):
            connected(model, asking(), *servers, timeout=1, **options)


@torch.no_grad()
def test_a_fallback_leaves_time_before_the_deadline_for_all_stages_of_servers(
    resnet: tuple[nn.Module, Tensor], pair: list[Server]
) -> None:
    servers = [server.address for server in pair]
    with connected(*resnet, *servers, fallback="local", deadline=60) as remote:
        assert remote._fallback_s("stem") > 0


@pytest.mark.parametrize("is_forwarded", [False, True])
@pytest.mark.parametrize("stage", ["second", *slow("first")])
def test_a_deadline_holds_at_every_server(stage: str, is_forwarded: bool) -> None:
    model = Slow().eval()
    cuts = ["head", "wait"] if stage == "first" else ["(input)", "head"]
    with (
        serving(model, asking()) as second,
        serving(model, asking(), forward=second.address if is_forwarded else ()) as first,
        Gate() as gate,
        ThreadPoolExecutor(1) as threads,
        connected(model, asking(), first.address, second.address, at=cuts, deadline=2.0) as remote,
    ):
        busy = first if stage == "first" else second
        answer = threads.submit(next, remote.stream([asking(gate), asking()], window=2))
        until(lambda: busy.metrics.queue._value.get() == 2)
        came = perf_counter()
        with pytest.raises(RemoteError, match="did not answer in 2 s") as raised:
            answer.result(60)
        assert raised.value.kind == "DEADLINE"
        until(lambda: perf_counter() - came > 2.0)
        gate.open()
        until(lambda: counted(busy, "errors", kind="DEADLINE") == 1)  # the one that waited is not computed
        remote.options = replace(remote.options, deadline_s=None)
        x = asking()
        assert remote(x).equal(model(x))
        assert (len(remote.requests[-1].hops), remote.requests[-1].attempts) == (2, 1)
        until(remote._chain.is_idle)


@pytest.mark.parametrize("is_forwarded", [False, True])
def test_a_server_that_misses_a_deadline_has_no_requests_until_it_answers(is_forwarded: bool) -> None:
    model = Slow().eval()
    with (
        serving(model, asking()) as one,
        serving(model, asking()) as other,
        serving(model, asking(), forward=[one.address, other.address] if is_forwarded else ()) as first,
        Gate() as gate,
        connected(
            model, asking(), first.address, [one.address, other.address], at=["(input)", "head"], deadline=1.0
        ) as remote,
    ):
        with pytest.raises(RemoteError, match="did not answer in 1 s"):
            remote(asking(gate))
        remote.options = replace(remote.options, deadline_s=60.0)
        hangs = one if one.metrics.queue._value.get() else other
        for _ in range(6):
            x = asking()
            assert remote(x).equal(model(x))
            assert remote.requests[-1].hops[1].server != hangs.address
        gate.open()
        until(lambda: remote(x).equal(model(x)) and remote.requests[-1].hops[1].server == hangs.address)


# -- lines that break --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_forwarded", [False, True])
def test_a_line_to_the_second_server_that_breaks_costs_no_answer(is_forwarded: bool) -> None:
    model = Slow().eval()
    with (
        serving(model, asking()) as second,
        Proxy(second.address) as line,
        serving(model, asking(), forward=line.address if is_forwarded else ()) as first,
        Gate() as gate,
        ThreadPoolExecutor(1) as threads,
        connected(model, asking(), first.address, line.address, at=["(input)", "head"]) as remote,
    ):
        for _ in range(3):
            gate.close()
            x = asking(gate)
            answer = threads.submit(remote, x)
            until(lambda: second.metrics.queue._value.get() == 1)
            line.cut()
            gate.open()
            assert answer.result(60).equal(model(x))
            record = remote.requests[-1]
            assert [hop.server for hop in record.hops] == [first.address, line.address]
            assert (record.attempts > 1) is not is_forwarded  # the client sent it again, or the first server did
            until(lambda: second.metrics.queue._value.get() == 0)
        assert line.made > 3


@pytest.mark.parametrize("is_forwarded", [False, True])
@pytest.mark.parametrize("place", [0, 60, 500, 2000, 65_000, 150_000])
def test_a_line_to_the_second_server_that_is_cut_anywhere_costs_no_answer(place: int, is_forwarded: bool) -> None:
    model = Slow().eval()
    given = [asking(rows=2000) for _ in range(4)]  # 64 kB each
    armed, cut = threading.Event(), list[Weather]()

    def cut_two(_: int) -> tuple[Weather, Weather]:
        if not armed.is_set() or len(cut) == 2:
            return Weather(), Weather()
        cut.append(Weather(cut_after=place))
        return cut[-1], Weather()

    with (
        serving(model, asking()) as second,
        Proxy(second.address, cut_two) as line,
        serving(model, asking(), forward=line.address if is_forwarded else ()) as first,
        connected(model, asking(), first.address, line.address, at=["(input)", "head"]) as remote,
    ):
        armed.set()
        line.cut()
        for x in given:
            assert remote(x).equal(model(x))
        assert [sent.where for sent in remote.requests] == ["cloud"] * 4
        assert [len(sent.hops) for sent in remote.requests] == [2] * 4
    assert cut
    assert cut[0].passed >= place


# -- servers of one stage ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_servers_of_one_stage_are_used_in_turn_and_one_that_dies_is_left_out_until_it_is_back(
    resnet: tuple[nn.Module, Tensor], pair: list[Server]
) -> None:
    model, x = resnet

    def answering(remote: Remote, requests: int = 8) -> set[str]:
        answered = set()
        for _ in range(requests):
            assert remote(x).equal(model(x))
            answered.add(remote.requests[-1].hops[0].server)
        return answered

    dying = serving(model, x)
    port = dying.address
    with connected(model, x, [port, pair[0].address], pair[1].address) as remote:
        assert answering(remote) == {port, pair[0].address}
        dying.stop(0)
        assert answering(remote) == {pair[0].address}
        with mt.serve(model, x, listen=port):
            pool = remote._chain.pools[0]
            until(lambda: all(connection.down_reason is None for connection in pool.connections))
            assert answering(remote) == {port, pair[0].address}


@pytest.fixture
def failovers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The servers whose requests others have taken, in the order of the requests."""
    found: list[str] = []
    fail_over = ServerPool._fail_over

    def count(pool: ServerPool, message: Message, failed: list[Connection], *arguments: Any) -> bool:
        is_taken = fail_over(pool, message, failed, *arguments)
        found.extend([failed[-1].address] if is_taken else [])
        return is_taken

    monkeypatch.setattr(ServerPool, "_fail_over", count)
    return found


class Load:
    """Clients that stream requests and compare outputs with those of the model, until they are stopped."""

    def __init__(self, *servers: Any) -> None:
        self._servers = servers
        self._model, self._x = small()
        self._images = [torch.randn(1 + number % 2, 3, 32, 32) for number in range(12)]
        self._expected = [self._model(image) for image in self._images]
        self.stop = threading.Event()
        self.answered = 0
        self.remotes: list[Remote] = []
        self._changed = threading.Condition()

    def run(self, seed: int) -> list[RequestRecord]:
        order = random.Random(seed)
        with torch.no_grad(), connected(self._model, self._x, *self._servers) as remote:
            self.remotes.append(remote)
            while not self.stop.is_set():
                chosen = [order.randrange(len(self._images)) for _ in range(10)]
                images = [self._images[one] for one in chosen]
                for index, output in zip(chosen, remote.stream(images), strict=True):
                    assert output.equal(self._expected[index])
                    with self._changed:
                        self.answered += 1
                        self._changed.notify_all()
            return list(remote.requests)

    def wait_for_more(self, count: int) -> None:
        """Wait until so many more requests are answered."""
        with self._changed:
            most = self.answered + count
            assert self._changed.wait_for(lambda: self.answered >= most, timeout=120)

    def connections(self) -> list[Connection]:
        return [one for remote in self.remotes for pool in remote._chain.pools for one in pool.connections]


def hang(victim: ServerProcess, connections: Callable[[], list[Connection]]) -> None:
    """Stop a server, and wait until it has a request that it cannot have answered before."""

    def pending() -> set[str]:
        return {name for one in connections() if one.address == victim.address for name in [*one._pending]}

    victim.hang()
    before = pending()
    until(lambda: bool(pending() - before))


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("killed", ["of the first stage", "of the last stage", "of the last stage, forwarded"])
@torch.no_grad()
def test_a_killed_server_of_two_loses_no_request_of_four_clients(killed: str, failovers: list[str]) -> None:
    model, x = small()
    with ServerProcess() as a, ServerProcess() as b:
        both = [a.address, b.address]
        victims = [a, b] if killed == "of the first stage" else [a]
        with (
            serving(model, x, forward=both if "forwarded" in killed else ()) as other,
            ThreadPoolExecutor(4) as threads,
        ):
            assert other._service is not None
            forwarder = other._service._forwarder
            load = Load(both, other.address) if killed == "of the first stage" else Load(other.address, both)
            clients = [threads.submit(load.run, seed) for seed in range(4)]
            try:
                for victim in victims:
                    load.wait_for_more(40)
                    before = failovers.count(victim.address)
                    hang(victim, lambda: [*load.connections(), *forwarder._connections.values()])
                    victim.kill()
                    load.wait_for_more(40)
                    assert failovers.count(victim.address) > before  # those that were on their way there
                    if victim is not victims[-1]:
                        victim.start()
            finally:
                load.stop.set()
            records = [record for client in clients for record in client.result(120)]
    assert {record.where for record in records} == {"cloud"}
    assert {len(record.hops) for record in records} == {2}
    if "forwarded" in killed:
        assert any(record.received_bytes < 1000 for record in records)  # not through the client
    else:
        assert any(record.attempts > 1 for record in records)
