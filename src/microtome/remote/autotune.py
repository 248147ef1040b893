"""`at="auto"`: plan the cut from measurements, and move it as requests show other speeds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic, time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from microtome.errors import MicrotomeError
from microtome.plan import plan
from microtome.plan.codec_benchmark import codec_costs
from microtome.profile import profile
from microtome.remote.connection import Connection
from microtome.remote.payloads import INPUTS
from microtome.remote.request import Route
from microtome.remote.server_probe import fetch_profile, measure_link
from microtome.results.link import Link, LinkMeasurement
from microtome.results.plan import Candidate, Plan
from microtome.split.boundary.codecs import COMPRESSORS
from microtome.units import rate, seconds

if TYPE_CHECKING:
    from microtome.results.codec_costs import CodecCosts
    from microtome.results.cuts import Cuts
    from microtome.results.profile import Profile
    from microtome.results.requests import RequestRecord
    from microtome.split.splitter import Splitter

log = logging.getLogger("microtome.remote")

#: The weight of a new observation in the moving averages.
_SMOOTHING = 0.25
#: The relative gain that another route must promise, and in how many consecutive checks, before the cut moves.
_MIN_GAIN, _MIN_CHECKS = 0.1, 3
#: The gain over this device alone from which the server is used at first: plans are not more precise than this.
_MIN_FIRST_GAIN = 0.05
#: Requests between two checks, and seconds after which the link is measured again if no request crosses it.
_CHECK_EVERY, _IDLE_S = 8, 10.0
#: Bytes of a request from which its time shows the bandwidth.
_MIN_BANDWIDTH_BYTES = 32 << 10
#: Seconds of a planned run from which the ratio to the measured time is meaningful.
_MIN_RUN_S = 1e-4
#: The codecs without loss, tried if the user names none.
LOSSLESS = ("raw", *sorted(COMPRESSORS))
#: Seconds to wait for the profile of the server.
_PROFILE_TIMEOUT_S = 120.0
_HERE = Route(None, "raw")


class RouteChange(NamedTuple):
    """A change of the route.

    Attributes:
        when: Seconds since the epoch.
        before: The previous route; None at the beginning.
        after: The new route.
        why: The reason in words.
    """

    when: float
    before: Route | None
    after: Route
    why: str


@dataclass
class Speeds:
    """Moving averages of the speed of both devices and of the link.

    Attributes:
        edge: The time of this device relative to its profile; `cloud`: the same of the server.
    """

    bytes_per_s: float
    rtt_s: float
    edge: float = 1.0
    cloud: float = 1.0

    def latency_s(self, candidate: Candidate) -> float:
        """Return the latency of a candidate of the plan at these speeds."""
        link = Link(8 * self.bytes_per_s, rtt=self.rtt_s)
        total = 0.0
        for step in candidate.steps:
            if step.what == "send":
                total += link.seconds(candidate.sent_bytes[0])
            elif step.what == "back":
                total += link.seconds(candidate.back_bytes)
            else:
                total += step.seconds * (self.edge if step.where == "edge" else self.cloud)
        return total


class Autotuner:
    """Choose the route of requests from a plan, and again from observed speeds.

    Attributes:
        plan: The plan that it began with.
        history: The changes of the route.
        route: The current route.
        warm_up: Called with a new route before the first request takes it.
    """

    def __init__(self, plan: Plan, link: LinkMeasurement, connection: Connection, codecs: Sequence[str]) -> None:
        self.plan = plan
        self.history: list[RouteChange] = []
        self.warm_up: Callable[[Route], None] = lambda route: None
        self._connection = connection
        self._speeds = Speeds(link.up_bytes_per_s, link.rtt_s)
        self._candidates: dict[Route, Candidate] = {}
        for candidate in plan.candidates:  # the best first
            route = route_of(candidate)
            if candidate.refused is None and (route.at is None or route.codec in codecs):
                self._candidates.setdefault(route, candidate)
        self._lock = threading.Lock()
        self._observed = 0
        self._consecutive = 0
        self._is_moving = False
        self._is_probing = False
        self._last_crossing = monotonic()
        self._threads: list[threading.Thread] = []
        self.route = self._first_route()
        latency = seconds(self._candidates[self.route].latency_s)
        bandwidth, rtt = rate(link.link.bytes_per_s), seconds(link.link.rtt_s)
        self._add_change(None, f"planned: {latency} a request over {bandwidth}, rtt {rtt}")

    def _first_route(self) -> Route:
        """Return the fastest route, or this device alone if that is nearly as fast."""
        latencies = {route: candidate.latency_s for route, candidate in self._candidates.items()}
        best = min(latencies, key=lambda route: latencies[route])
        if _HERE in latencies and latencies[best] > (1 - _MIN_FIRST_GAIN) * latencies[_HERE]:
            return _HERE
        return best

    def best_layer_route(self) -> Route:
        """Return the fastest route that cuts at a layer, or runs the whole model here."""
        latencies = {route: one.latency_s for route, one in self._candidates.items() if route.at != INPUTS}
        return min(latencies, key=lambda route: latencies[route], default=_HERE)

    def observe(self, record: RequestRecord) -> None:
        """Update the speeds from a request; move the cut if another has been better for a while."""
        with self._lock:
            self._update_speeds(record)
            self._observed += 1
            if self._observed % _CHECK_EVERY == 0 and not self._is_moving:
                self._check()
            is_idle = record.at is None and monotonic() - self._last_crossing > _IDLE_S and not self._is_probing
            if is_idle:
                self._is_probing = True
        if is_idle:
            self._start_thread("microtome-probe", self._probe)

    def close(self) -> None:
        """Wait for background threads, which end soon after the connection is closed."""
        for thread in self._threads:
            thread.join()

    def local_tail_s(self, at: str) -> float:
        """Return the seconds of the tail of a cut on this device."""
        whole, head = self._candidates.get(_HERE), self._candidates.get(Route(at, self.route.codec))
        if whole is None or head is None:
            return 0.0
        return max(whole.latency_s - head.seconds("run", where="edge"), 0.0) * self._speeds.edge

    def _start_thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _update_speeds(self, record: RequestRecord) -> None:
        candidate = self._candidates.get(_HERE if record.at is None else Route(record.at, record.codec))
        if candidate is None:
            return
        speeds = self._speeds
        planned_s = candidate.seconds("run", where="edge")
        if planned_s > _MIN_RUN_S and (record.at is None or record.where == "cloud"):
            spent_s = record.tail_s if record.at is None else record.head_s
            speeds.edge = _smooth(speeds.edge, spent_s / planned_s)
        if record.where != "cloud" or record.attempts != 1:
            return
        self._last_crossing = monotonic()
        planned_s = candidate.seconds("run", where="cloud")
        if planned_s > _MIN_RUN_S:
            # The queue of a lone request is due to other clients; otherwise to requests of this stream.
            speeds.cloud = _smooth(speeds.cloud, (record.tail_s + record.queue_s * record.alone) / planned_s)
        nbytes = record.sent_bytes + record.received_bytes
        bytes_per_s = self._connection.pop_bandwidth()
        if record.alone and nbytes >= _MIN_BANDWIDTH_BYTES:
            bytes_per_s = nbytes / max(record.wire_s - speeds.rtt_s, 1e-5)
        if bytes_per_s is not None:
            speeds.bytes_per_s = _smooth(speeds.bytes_per_s, bytes_per_s)

    @property
    def routes(self) -> list[Route]:
        """The routes over the server that it may choose."""
        return [route for route in self._candidates if route.at is not None]

    def _check(self) -> None:
        """Move to another route if it has promised a gain in enough consecutive checks."""
        latencies = {route: self._speeds.latency_s(candidate) for route, candidate in self._candidates.items()}
        best = min(latencies, key=lambda route: latencies[route])
        if best == self.route or latencies[best] > (1 - _MIN_GAIN) * latencies[self.route]:
            self._consecutive = 0
            return
        self._consecutive += 1
        if self._consecutive < _MIN_CHECKS:
            return
        self._consecutive = 0
        reason = (
            f"{seconds(latencies[best])} a request in place of {seconds(latencies[self.route])}, at "
            f"{rate(self._speeds.bytes_per_s)}: the edge has {1 / self._speeds.edge:.2f} and the cloud "
            f"{1 / self._speeds.cloud:.2f} of its speed in the profile"
        )
        self._is_moving = True
        self._start_thread("microtome-move", self._move, best, reason)

    def _move(self, route: Route, reason: str) -> None:
        """Warm both sides up for a route, then switch to it."""
        try:
            self.warm_up(route)
        except MicrotomeError as error:
            log.warning("the cut cannot be moved", extra={"to": route.at, "reason": str(error)})
        else:
            with self._lock:
                before, self.route = self.route, route
                self._add_change(before, reason)
        finally:
            self._is_moving = False

    def _probe(self) -> None:
        """Measure the link, which no request has crossed for a while."""
        try:
            link = measure_link(self._connection, timeout=5.0, max_bytes=1 << 20)
            with self._lock:
                self._speeds.bytes_per_s, self._speeds.rtt_s = link.up_bytes_per_s, link.rtt_s
        except ConnectionError:
            pass  # the server cannot be reached, so the model continues to run here
        finally:
            with self._lock:
                self._is_probing = False
                self._last_crossing = monotonic()

    def _add_change(self, before: Route | None, reason: str) -> None:
        self.history.append(RouteChange(time(), before, self.route, reason))


def autotune(splitter: Splitter, connection: Connection, codecs: Sequence[str], served: Sequence[str]) -> Autotuner:
    """Measure both devices and the link, and plan.

    Args:
        codecs: The codecs that boundaries may have.
        served: The cuts that the server serves.
    """
    # A later cut with no fewer bytes is better only if this device is the faster one; then it runs the whole model.
    cuts = replace(splitter.cuts, offered=tuple(cut for cut in splitter.cuts if cut.dominates and cut.at in served))
    devices = measure_devices(splitter, cuts, connection, codecs, repeat=5)
    link = measure_link(connection)  # last: it changes most
    return Autotuner(devices.plan(cuts, link.link, codecs), link, connection, codecs)


class DeviceMeasurements(NamedTuple):
    """The profiles of this device and of the server, and the costs of codecs on this device."""

    edge: Profile
    cloud: Profile
    costs: CodecCosts

    def plan(self, cuts: Cuts, link: Link, codecs: Sequence[str]) -> Plan:
        return plan(cuts, edge=self.edge, cloud=self.cloud, link=link, codec=codecs, costs=self.costs)


def measure_devices(
    splitter: Splitter, cuts: Cuts, connection: Connection, codecs: Sequence[str], *, repeat: int
) -> DeviceMeasurements:
    """Profile the model here, fetch the profile of the server, and measure codecs on some cuts."""
    cloud = fetch_profile(connection, splitter.num_calls, timeout=_PROFILE_TIMEOUT_S)
    with torch.no_grad():
        edge = profile(splitter.model, splitter.example, measure="time", repeat=repeat)
        costs = codec_costs(cuts, tuple(dict.fromkeys(("raw", *codecs))), model=splitter.model, inputs=splitter.example)
    return DeviceMeasurements(edge, cloud, costs)


def fastest_codec(splitter: Splitter, at: str, connection: Connection, codecs: Sequence[str]) -> str:
    """Return the codec that transfers the example's boundary fastest, encoding and decoding included."""
    no_cuts = replace(splitter.cuts, offered=())
    cuts = no_cuts if at == INPUTS else replace(no_cuts, offered=(splitter.cuts[at],))
    live = cuts.inputs if at == INPUTS else cuts[0].live
    with torch.no_grad():
        costs = codec_costs(cuts, codecs, model=splitter.model, inputs=splitter.example)
    link = measure_link(connection).link

    def transfer_s(codec: str) -> float:
        cost = costs.of(live, codec)
        return cost.encode_s + link.seconds(cost.nbytes) + cost.decode_s

    return min(codecs, key=transfer_s)


def route_of(candidate: Candidate) -> Route:
    """Return the route of a candidate of a plan over two devices."""
    return Route(candidate.at[0] or INPUTS, candidate.codecs[0]) if candidate.at else _HERE


def _smooth(average: float, observed: float) -> float:
    return (1 - _SMOOTHING) * average + _SMOOTHING * observed
