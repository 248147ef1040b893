"""`at="auto"`: the cut that is planned, and when it moves."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import microtome as mt
from microtome.errors import RemoteError
from microtome.remote import autotune
from microtome.remote.autotune import Autotuner, route_of
from microtome.remote.connection import Connection
from microtome.remote.request import Route
from microtome.remote.server_probe import measure_link
from microtome.results.link import LinkMeasurement
from microtome.results.requests import RequestRecord
from tests.plan import synthetic
from tests.remote.small import small

RTT = 0.01
CUTS = synthetic.cuts([8_000_000, 4_000_000, 1_000_000, 400_000, 40_000], inputs=6_000_000)
EDGE, CLOUD = (synthetic.profile([seconds] * 5, inputs=6_000_000) for seconds in (1.0, 0.1))
FAST, SLOW = 1e9, 5e5


@pytest.fixture
def connection() -> Iterator[Connection]:
    found = Connection("127.0.0.1:1")  # nobody is asked
    yield found
    found.close()


def tuner(connection: Connection, bytes_per_s: float) -> Autotuner:
    measured = LinkMeasurement(RTT, 0.0, bytes_per_s, bytes_per_s)
    plan = mt.plan(CUTS, edge=EDGE, cloud=CLOUD, link=measured.link, costs=synthetic.costs(CUTS))
    return Autotuner(plan, measured, connection, ["raw"])


def best_at(bytes_per_s: float) -> Route:
    link = LinkMeasurement(RTT, 0.0, bytes_per_s, bytes_per_s).link
    plan = mt.plan(CUTS, edge=EDGE, cloud=CLOUD, link=link, costs=synthetic.costs(CUTS))
    return next(route_of(one) for one in plan.candidates if "raw" in route_of(one))


def request(tuned: Autotuner, bytes_per_s: float, edge: float = 1.0) -> RequestRecord:
    """The record of a request over a link of this speed, on an edge that is slower by a factor."""
    route = tuned.route
    candidate = next(one for one in tuned.plan.candidates if route_of(one) == route)
    head_s = edge * candidate.seconds("run", where="edge")
    if route.at is None:
        return RequestRecord(None, where="edge", tail_s=head_s)
    nbytes = candidate.sent_bytes[0]
    tail_s, wire_s = candidate.seconds("run", where="cloud"), RTT + nbytes / bytes_per_s
    return RequestRecord(
        *route[:2], head_s=head_s, tail_s=tail_s, wire_s=wire_s, sent_bytes=nbytes, attempts=1, alone=True
    )


def show(tuned: Autotuner, sent: RequestRecord) -> None:
    """A request is over; and so is the move that it may have brought about."""
    tuned.observe(sent)
    for thread in threading.enumerate():
        if thread.name == "microtome-move":
            thread.join()


def test_it_begins_where_the_plan_says(connection: Connection) -> None:
    tuned = tuner(connection, FAST)
    assert tuned.route == best_at(FAST) == Route("", "raw")
    assert [(move.before, move.after) for move in tuned.history] == [(None, tuned.route)]


@pytest.mark.parametrize(("gain", "at"), [(0.04, None), (0.06, "")])
def test_nothing_crosses_for_little(connection: Connection, gain: float, at: str | None) -> None:
    cuts, edge = synthetic.cuts([8_000_000], inputs=1000), synthetic.profile([1.0], inputs=1000)
    measured = LinkMeasurement(1e-6, 0.0, FAST, FAST)
    cloud = synthetic.profile([1.0 - gain], inputs=1000)
    plan = mt.plan(cuts, edge=edge, cloud=cloud, link=measured.link, costs=synthetic.costs(cuts))
    assert plan.winner.latency_s == pytest.approx(1.0 - gain, rel=1e-3)
    assert Autotuner(plan, measured, connection, ["raw"]).route == Route(at, "raw")


def test_a_slow_link_moves_the_cut_to_where_a_plan_has_it(connection: Connection) -> None:
    tuned = tuner(connection, FAST)
    for _ in range(200):
        show(tuned, request(tuned, SLOW))
    assert tuned.route == best_at(SLOW) != best_at(FAST)
    last = tuned.history[-1]
    assert last.after == tuned.route
    assert "a request in place of" in last.why


def test_a_moment_moves_nothing(connection: Connection) -> None:
    tuned = tuner(connection, FAST)
    for number in range(200):
        show(tuned, request(tuned, SLOW if number % 20 == 0 else FAST))
    assert len(tuned.history) == 1


def test_it_does_not_go_to_and_fro_between_two_that_are_as_good(connection: Connection) -> None:
    tuned = tuner(connection, FAST)
    for number in range(400):  # the link changes by a tenth all the time
        show(tuned, request(tuned, SLOW * (0.9 if number % 2 else 1.1)))
    assert len(tuned.history) <= 3
    assert tuned.history[-1].after == best_at(SLOW)


def test_a_slow_edge_hands_over_earlier(connection: Connection) -> None:
    tuned = tuner(connection, SLOW)
    before = tuned.route
    for _ in range(300):
        show(tuned, request(tuned, SLOW, edge=20.0))
    cuts = [None, *(cut.at for cut in reversed(list(CUTS))), ""]
    assert cuts.index(tuned.route.at) > cuts.index(before.at)


def test_a_request_that_was_sent_twice_tells_nothing_of_the_link(connection: Connection) -> None:
    tuned = tuner(connection, FAST)
    for _ in range(100):
        show(tuned, replace(request(tuned, SLOW), attempts=2))
    assert len(tuned.history) == 1


def test_auto_against_a_real_server_is_exact_and_says_why() -> None:
    model, x = small()
    with mt.serve(model, x, listen="127.0.0.1:0") as server, mt.connect(model, x, server.address) as remote:
        assert remote.plan is not None
        assert remote.route in map(route_of, remote.plan.candidates)
        assert re.fullmatch(r"planned: [\d.]+ \w+ a request over [\d.]+ \w+bps, rtt [\d.]+ \w+", remote.history[0].why)
        with torch.no_grad():
            for rows in (1, 2, 5):
                given = torch.randn(rows, *x.shape[1:])
                assert remote(given).equal(model(given))


def test_a_request_that_failed_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small()
    learned: list[RequestRecord] = []
    monkeypatch.setattr(Autotuner, "observe", lambda self, sent: learned.append(sent))

    def fails(*_: object) -> object:
        raise ValueError("not today")

    with mt.serve(model, x, listen="127.0.0.1:0") as server, mt.connect(model, x, server.address) as remote:
        assert isinstance(remote._autotuner, Autotuner)
        remote._autotuner.route = Route("", "raw")
        remote(x)
        monkeypatch.setattr(server.served, "compute", fails)
        with pytest.raises(RemoteError, match="not today"):
            remote(x)
        assert [len(learned), len(remote.requests)] == [1, 2]


def test_the_link_is_measured_both_ways() -> None:
    model, x = small()
    with mt.serve(model, x, listen="127.0.0.1:0") as server:
        connection = Connection(server.address)
        found = measure_link(connection)
        connection.close()
    assert found.rtt_s > 0
    assert found.up_bytes_per_s > 0
    assert found.down_bytes_per_s > 0
    assert found.link.rtt_s == found.rtt_s


def test_the_bandwidth_of_short_messages_is_at_most_what_pings_resolve() -> None:
    model, x = small()
    with mt.serve(model, x, listen="127.0.0.1:0", max_message="20KB") as server:
        connection = Connection(server.address)
        for _ in range(5):
            found = measure_link(connection, max_bytes=20_000)
            assert max(found.up_bytes_per_s, found.down_bytes_per_s) * found.jitter_s < 17e3
        connection.close()


def test_the_link_is_measured_after_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def log_calls(name: str) -> None:
        function = getattr(autotune, name)

        def logged(*args: Any, **options: Any) -> Any:
            order.append(name)
            return function(*args, **options)

        monkeypatch.setattr(autotune, name, logged)

    for name in ("profile", "codec_costs", "fetch_profile", "measure_link"):
        log_calls(name)
    model, x = small()
    with mt.serve(model, x, listen="127.0.0.1:0") as server, mt.connect(model, x, server.address):
        assert sorted(order) == ["codec_costs", "fetch_profile", "measure_link", "profile"]
        assert order[-1] == "measure_link"
