"""Requests over several devices as Chrome trace JSON: a process for each device, arrows for transfers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any, NamedTuple

from microtome.addresses import INPUT
from microtome.errors import BadQuery
from microtome.report.requests import place
from microtome.report.trace_events.chrome import ChromeEvents, Lane
from microtome.results.plan import Candidate, Plan
from microtome.results.requests import RequestLog, RequestRecord
from microtome.results.sweep import CutTiming, Sweep
from microtome.units import plural

_HALVES = "the clocks of two machines are not compared: half of what the wire took is drawn before, half behind"
_IN_TURN = "the parts of a request are drawn one after the other from its beginning; what is left is at its end"


class Phase(NamedTuple):
    """A phase of a request.

    Attributes:
        device: The index of the device that runs it; of a transfer, of the sender.
        target: The index of the device that a transfer goes to; None: it is not a transfer.
    """

    name: str
    device: int
    seconds: float
    target: int | None = None


@dataclass(frozen=True)
class Request:
    """A request with its phases in order.

    Attributes:
        total_s: Its duration, if longer than its phases.
        arguments: What Perfetto shows of it when it is selected.
    """

    name: str
    phases: Sequence[Phase]
    total_s: float
    arguments: dict[str, Any] = field(default_factory=dict)
    began_s: float = 0.0


def log_trace(log: RequestLog) -> str:
    """Export every request of a log."""
    if any(isnan(sent.began) for sent in log.requests):
        raise BadQuery("this run is from a file that does not say when its requests began: run it again")
    first = min((sent.began for sent in log.requests), default=0.0)
    requests = [_logged(sent, f"request {index}", sent.began - first) for index, sent in enumerate(log.requests)]
    devices = _chain(log) or _edge_and_cloud(log)
    return _trace(devices, requests, model=log.model, how=f"{_IN_TURN}; {_HALVES}")


def sweep_trace(sweep: Sweep) -> str:
    """Export a request at each cut, of the medians, one after the other."""
    requests = _one_after_another(map(_median, sweep.measured))
    how = f"medians of {plural(sweep.repeat, 'request')}; {_HALVES}"
    return _trace(_edge_and_cloud(sweep), requests, model=sweep.model, how=how)


def plan_trace(plan: Plan) -> str:
    """Export the winner, and after it the whole model on one device, as planned."""
    candidates = [plan.winner, *(one for one in plan.baselines if one is not plan.winner)]
    requests = _one_after_another(_planned(plan, candidate) for candidate in candidates)
    return _trace(list(plan.devices), requests, model=plan.model, how="as planned, one way after the other")


# -- requests of results -----------------------------------------------------------------------------------------------


def _edge_and_cloud(result: RequestLog | Sweep) -> list[str]:
    return [f"edge, {result.model}", f"cloud, {result.server} ({result.device})"]


def _chain(log: RequestLog) -> list[str]:
    """Name this device and that of each stage of a chain; an empty list: there was one server."""
    servers: dict[str, dict[str, None]] = {}
    for sent in log.requests:
        for hop in sent.hops:
            servers.setdefault(hop.at, {})[hop.server] = None
    stages = [f"from {at or INPUT}, {', '.join(several)}" for at, several in servers.items()]
    return [f"edge, {log.model}", *stages] if stages else []


def _logged(sent: RequestRecord, name: str, began_s: float) -> Request:
    if sent.where == "cloud" and sent.hops:
        phases = _over_chain(sent)
    elif sent.where == "cloud":
        phases = _round_trip(sent, sent.server_decode_s, sent.server_encode_s)
    else:
        waited = sent.total_s - sent.head_s - sent.encode_s - sent.tail_s
        phases = [Phase("head", 0, sent.head_s), Phase("encode", 0, sent.encode_s)]
        phases += [Phase("wait", 0, waited if sent.attempts else 0.0), Phase("tail", 0, sent.tail_s)]
    arguments = {
        "cut": place(sent.at, sent.codec, sent.later),
        "sent_bytes": sent.sent_bytes,
        "received_bytes": sent.received_bytes,
        "attempts": sent.attempts,
    }
    arguments |= {"reason": sent.reason} if sent.reason else {}
    return Request(name, phases, sent.total_s, arguments, began_s)


def _median(row: CutTiming) -> Request:
    if row.at is None:
        phases = [Phase("head", 0, row.head_s), Phase("tail", 0, row.tail_s)]
    else:
        phases = _round_trip(row, row.codec_there_s, 0.0)
    arguments = {"sent_bytes": row.sent_bytes, "received_bytes": row.received_bytes, "planned_s": row.planned_s}
    return Request(place(row.at, row.codec), phases, row.total_s, arguments)


def _round_trip(timed: RequestRecord | CutTiming, server_decode_s: float, server_encode_s: float) -> list[Phase]:
    return [
        Phase("head", 0, timed.head_s),
        Phase("encode", 0, timed.encode_s),
        Phase("send", 0, timed.wire_s / 2, target=1),
        Phase("queue", 1, timed.queue_s),
        Phase("decode", 1, server_decode_s),
        Phase("tail", 1, timed.tail_s),
        Phase("encode", 1, server_encode_s),
        Phase("back", 1, timed.wire_s / 2, target=0),
        Phase("decode", 0, timed.decode_s),
    ]


def _over_chain(sent: RequestRecord) -> list[Phase]:
    """The phases of a request over several servers; the time of the wire is divided equally among its transfers."""
    wire_s = sent.wire_s / (len(sent.hops) + 1)
    phases = [Phase("head", 0, sent.head_s), Phase("encode", 0, sent.encode_s)]
    for device, hop in enumerate(sent.hops, 1):
        phases += [
            Phase("send", device - 1, wire_s, target=device),
            Phase("queue", device, hop.queue_s),
            Phase("decode", device, hop.decode_s),
            Phase("stage", device, hop.run_s),
            Phase("encode", device, hop.encode_s),
        ]
    back = Phase("back", len(sent.hops), wire_s, target=0)
    return [*phases, back, Phase("decode", 0, sent.decode_s), Phase("last stage", 0, sent.last_s)]


def _planned(plan: Plan, candidate: Candidate) -> Request:
    devices = list(plan.devices)
    phases = []
    for what, where, seconds in candidate.steps:
        device = devices.index(where)
        if what == "send":
            phases.append(Phase("send", device - 1, seconds, target=device))
        elif what == "back":
            phases.append(Phase("back", device, seconds, target=device - 1))
        else:
            phases.append(Phase(what, device, seconds))
    arguments = {"sent_bytes": sum(candidate.sent_bytes), "energy_j": candidate.energy_j}
    return Request(candidate.name, phases, candidate.latency_s, arguments)


def _one_after_another(requests: Iterable[Request]) -> Iterator[Request]:
    """Place requests in turn, a tenth of a request between them."""
    began_s = 0.0
    for request in requests:
        yield replace(request, began_s=began_s)
        began_s += 1.1 * max(request.total_s, sum(phase.seconds for phase in request.phases))


# -- events ------------------------------------------------------------------------------------------------------------


class _Lanes:
    """The lanes of a device: requests that overlap are in different ones."""

    def __init__(self, events: ChromeEvents, name: str) -> None:
        self._events = events
        self._pid = events.process(name)
        self._lanes: list[tuple[Lane, int]] = []

    def allocate(self, begin_ns: int, end_ns: int) -> Lane:
        """Return a lane that is free for that time."""
        for index, (lane, busy_until) in enumerate(self._lanes):
            if busy_until <= begin_ns:
                self._lanes[index] = lane, end_ns
                return lane
        lane = self._events.lane(self._pid, f"lane {len(self._lanes) + 1}")
        self._lanes.append((lane, end_ns))
        return lane


def _trace(devices: Sequence[str], requests: Iterable[Request], **metadata: Any) -> str:
    """Return Chrome trace JSON. Requests that overlap are drawn under each other."""
    events = ChromeEvents()
    lanes = [_Lanes(events, name) for name in devices]
    for request in requests:
        _add(events, lanes, request)
    return events.dump(**metadata)


def _add(events: ChromeEvents, lanes: Sequence[_Lanes], request: Request) -> None:
    spans = list(_spans(request))
    begin = round(request.began_s * 1e9)
    end = max(begin + round(request.total_s * 1e9), spans[-1][2] if spans else begin)
    lane_of = {0: lanes[0].allocate(begin, end)}
    for device in {phase.device for phase, _, _ in spans} - {0}:
        busy = [(start, stop) for phase, start, stop in spans if phase.device == device]
        lane_of[device] = lanes[device].allocate(busy[0][0], busy[-1][1])
    events.slice(lane_of[0], request.name, begin, end, **request.arguments)
    for index, (phase, start, stop) in enumerate(spans):
        events.slice(lane_of[phase.device], phase.name, start, stop)
        if phase.target is None:
            continue
        after = spans[index + 1][0].device if index + 1 < len(spans) else None
        if after == phase.target:
            events.arrow(phase.name, lane_of[phase.device], start, lane_of[phase.target], stop)
        elif after is None and phase.target == 0:  # an arrow ends at the slice that began last: it needs its own
            reached = min(stop, end - 1)
            events.slice(lane_of[0], "result", reached, end)
            events.arrow(phase.name, lane_of[phase.device], start, lane_of[0], reached)


def _spans(request: Request) -> Iterator[tuple[Phase, int, int]]:
    """Yield the phases that take time, with the nanoseconds at which they begin and end."""
    at_s = request.began_s
    for phase in request.phases:
        start, at_s = at_s, at_s + max(phase.seconds, 0.0)
        if round(at_s * 1e9) > round(start * 1e9):
            yield phase, round(start * 1e9), round(at_s * 1e9)
