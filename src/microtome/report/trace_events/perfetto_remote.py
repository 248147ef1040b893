"""Requests over several devices for Perfetto: a process for each device, arrows for what crosses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

from microtome.errors import BadQuery
from microtome.report.requests import place
from microtome.report.trace_events.chrome import ChromeEvents, Lane
from microtome.results.plan import Candidate, Plan
from microtome.results.requests import RequestLog, RequestRecord
from microtome.results.sweep import CutTiming, Sweep

_HALVES = "the clocks of two machines are not compared: half of what the wire took is drawn before, half behind"
_IN_TURN = "the parts of a request are drawn one after the other from its beginning; what is left is at its end"


@dataclass(frozen=True)
class Leg:
    """A part of a request.

    Attributes:
        where: The index of the device that does it; of a transfer, of the one that sends.
        to: The index of the device that a transfer goes to; None: it is none.
    """

    what: str
    where: int
    seconds: float
    to: int | None = None


@dataclass(frozen=True)
class Request:
    """A request with its parts in their order.

    Attributes:
        began_s: When it began.
        total_s: How long it took, if longer than its parts.
    """

    name: str
    began_s: float
    legs: tuple[Leg, ...]
    total_s: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)


def of_run(ran: RequestLog) -> str:
    """Every request of a run."""
    if any(isnan(sent.began) for sent in ran.requests):
        raise BadQuery("this run is from a file that does not say when its requests began: run it again")
    first = min((sent.began for sent in ran.requests), default=0.0)
    requests = [_request(sent, f"request {at}", sent.began - first) for at, sent in enumerate(ran.requests)]
    devices = [f"edge, {ran.model}", f"cloud, {ran.server} ({ran.device})"]
    return draw(devices, requests, model=ran.model, how=f"{_IN_TURN}; {_HALVES}")


def of_sweep(sweep: Sweep) -> str:
    """A request at each cut, of the medians, one after the other."""
    requests = _in_turn(_median_request(row) for row in sweep.measured)
    devices = [f"edge, {sweep.model}", f"cloud, {sweep.server} ({sweep.device})"]
    return draw(devices, requests, model=sweep.model, how=f"medians of {sweep.repeat} requests; {_HALVES}")


def of_plan(plan: Plan) -> str:
    """The winner, and behind it the whole model on one device, as planned."""
    shown = [plan.winner, *(one for one in plan.baselines if one is not plan.winner)]
    requests = _in_turn(_planned(plan, one) for one in shown)
    return draw(list(plan.devices), requests, model=plan.model, how="as planned, one way after the other")


def draw(devices: Sequence[str], requests: Iterable[Request], **about: Any) -> str:
    """Chrome trace JSON. Requests that overlap are drawn under each other."""
    events = ChromeEvents()
    lanes = [_Lanes(events, name) for name in devices]
    for request in requests:
        _draw(events, lanes, request)
    return events.dump(**about)


class _Lanes:
    """The lanes of a device: what overlaps is in different ones."""

    def __init__(self, events: ChromeEvents, name: str) -> None:
        self._events = events
        self.pid = events.process(name)
        self._lanes: list[tuple[Lane, int]] = []

    def take(self, begin_ns: int, end_ns: int) -> Lane:
        """One that is free from a time on."""
        for at, (lane, until) in enumerate(self._lanes):
            if until <= begin_ns:
                self._lanes[at] = lane, end_ns
                return lane
        lane = self._events.lane(self.pid, f"lane {len(self._lanes) + 1}")
        self._lanes.append((lane, end_ns))
        return lane


def _draw(events: ChromeEvents, lanes: Sequence[_Lanes], request: Request) -> None:
    spans = list(_spans(request))
    begin = round(request.began_s * 1e9)
    end = max(begin + round(request.total_s * 1e9), spans[-1][2] if spans else begin)
    taken = {0: lanes[0].take(begin, end)}
    for device in {leg.where for leg, _, _ in spans} - {0}:
        there = [(start, stop) for leg, start, stop in spans if leg.where == device]
        taken[device] = lanes[device].take(there[0][0], there[-1][1])
    events.slice(taken[0], request.name, begin, end, **request.about)
    for at, (leg, start, stop) in enumerate(spans):
        events.slice(taken[leg.where], leg.what, start, stop)
        if leg.to is None:
            continue
        after = spans[at + 1][0].where if at + 1 < len(spans) else None
        if after == leg.to:
            events.arrow(leg.what, taken[leg.where], start, taken[leg.to], stop)
        elif after is None and leg.to == 0:  # an arrow ends at the slice that began last there: it needs one of its own
            reached = min(stop, end - 1)
            events.slice(taken[0], "result", reached, end)
            events.arrow(leg.what, taken[leg.where], start, taken[0], reached)


def _spans(request: Request) -> Iterator[tuple[Leg, int, int]]:
    """The parts that take time, with when they begin and end."""
    at = request.began_s
    for leg in request.legs:
        start, at = at, at + max(leg.seconds, 0.0)
        if round(at * 1e9) > round(start * 1e9):
            yield leg, round(start * 1e9), round(at * 1e9)


def _request(sent: RequestRecord, name: str, began_s: float) -> Request:
    if sent.where == "cloud":
        legs = _there_and_back(sent, sent.server_decode_s, sent.server_encode_s)
    else:
        waited = sent.total_s - sent.head_s - sent.encode_s - sent.tail_s
        legs = [Leg("head", 0, sent.head_s), Leg("encode", 0, sent.encode_s)]
        legs += [Leg("wait", 0, waited if sent.attempts else 0.0), Leg("tail", 0, sent.tail_s)]
    about = {"cut": place(sent.at, sent.codec), "sent_bytes": sent.sent_bytes, "received_bytes": sent.received_bytes}
    about |= {"attempts": sent.attempts} | ({"reason": sent.reason} if sent.reason else {})
    return Request(name, began_s, tuple(legs), sent.total_s, about)


def _median_request(row: CutTiming) -> Request:
    if row.at is None:
        legs = [Leg("head", 0, row.head_s), Leg("tail", 0, row.tail_s)]
    else:
        legs = _there_and_back(row, row.codec_there_s, 0.0)
    about = {"sent_bytes": row.sent_bytes, "received_bytes": row.received_bytes, "planned_s": row.planned_s}
    return Request(place(row.at, row.codec), 0.0, tuple(legs), row.total_s, about)


def _there_and_back(timed: RequestRecord | CutTiming, decode_there_s: float, encode_there_s: float) -> list[Leg]:
    return [
        Leg("head", 0, timed.head_s),
        Leg("encode", 0, timed.encode_s),
        Leg("send", 0, timed.wire_s / 2, to=1),
        Leg("queue", 1, timed.queue_s),
        Leg("decode", 1, decode_there_s),
        Leg("tail", 1, timed.tail_s),
        Leg("encode", 1, encode_there_s),
        Leg("back", 1, timed.wire_s / 2, to=0),
        Leg("decode", 0, timed.decode_s),
    ]


def _planned(plan: Plan, one: Candidate) -> Request:
    devices = list(plan.devices)
    legs = []
    for step in one.steps:
        at = devices.index(step.where)
        if step.what == "send":
            legs.append(Leg("send", at - 1, step.seconds, to=at))
        elif step.what == "back":
            legs.append(Leg("back", at, step.seconds, to=at - 1))
        else:
            legs.append(Leg(step.what, at, step.seconds))
    about = {"sent_bytes": sum(one.sent_bytes), "energy_j": one.energy_j}
    return Request(one.name, 0.0, tuple(legs), one.latency_s, about)


def _in_turn(requests: Iterable[Request]) -> Iterator[Request]:
    """One after the other, a tenth of a request between."""
    at = 0.0
    for request in requests:
        took = max(request.total_s, sum(leg.seconds for leg in request.legs))
        yield Request(request.name, at, request.legs, request.total_s, request.about)
        at += 1.1 * took
