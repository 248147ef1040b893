"""`at="auto"`: where to cut, from what both devices and the link between them were seen to do, as they do it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic, time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from microtome.errors import BadQuery, MicrotomeError
from microtome.plan import plan
from microtome.plan.codec_benchmark import codec_costs
from microtome.profile import profile
from microtome.remote.connection import Connection
from microtome.remote.link_probe import probe
from microtome.remote.payloads import INPUTS
from microtome.remote.replies import ask_profile
from microtome.results.link import Link, LinkMeasurement
from microtome.results.plan import Candidate, Plan
from microtome.units import rate, seconds

if TYPE_CHECKING:
    from microtome.results.requests import RequestRecord
    from microtome.split.splitter import Splitter

log = logging.getLogger("microtome.remote")

#: How much of what was known a new observation replaces.
_LEARN = 0.25
#: A move must promise so much less than what is now, so often in a row.
_GAIN, _TIMES = 0.1, 3
#: The gain over the edge alone from which the cloud is used at first: no plan is more precise than this.
_WORTH = 0.05
#: Requests between two looks, and seconds after which the link is measured again where no request crosses it.
_EVERY, _IDLE_S = 8, 10.0
#: Bytes from which a request tells how fast the link is.
_TELLING = 32 << 10
#: Codecs that lose nothing, tried where the user names none.
LOSSLESS = ("raw", "lz4", "zstd")


class Route(NamedTuple):
    """The route of requests: the cut, and the codec.

    Attributes:
        at: None: it is not cut, and runs here. `""`: the inputs are sent.
    """

    at: str | None
    codec: str


class RouteChange(NamedTuple):
    """A change of the cut.

    Attributes:
        when: Seconds since the epoch.
        before: How requests went; None at the beginning.
        after: How they go now.
        why: In words.
    """

    when: float
    before: Route | None
    after: Route
    why: str


@dataclass
class Speeds:
    """Current estimates for the two devices and the link.

    Attributes:
        edge: How many times as long as its profile says the edge takes; `cloud` is the same of the server.
        bytes_per_s: Of the link.
    """

    bytes_per_s: float
    rtt_s: float
    edge: float = 1.0
    cloud: float = 1.0

    def latency_s(self, candidate: Candidate) -> float:
        """Seconds of a request by a candidate at these speeds."""
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
    """Chooses where to cut, and chooses again as requests show what the devices and the link do.

    Attributes:
        plan: The plan that it began with.
        history: When the cut moved, and why.
        rehearse: Has both sides ready for another way.
    """

    def __init__(self, found: Plan, measured: LinkMeasurement, connection: Connection, codecs: Sequence[str]) -> None:
        self.plan = found
        self.history: list[RouteChange] = []
        self.rehearse: Callable[[Route], None] = lambda way: None
        self._connection = connection
        self._speeds = Speeds(measured.up_bytes_per_s, measured.rtt_s)
        ways = {way_of(one): one for one in reversed(found.candidates) if one.refused is None}
        self._able = {way: one for way, one in ways.items() if way.at is None or way.codec in codecs}
        self._lock = threading.Lock()
        self._seen = 0
        self._in_a_row = 0
        self._moving = False
        self._threads: list[threading.Thread] = []
        self._crossed = monotonic()
        self._probing = False
        self.way = self._first()
        self._note(None, f"planned: {seconds(self._able[self.way].latency_s)} a request over {measured.link!r}")

    def _first(self) -> Route:
        """The quickest; the edge alone if it is nearly that."""
        spent = {way: candidate.latency_s for way, candidate in self._able.items()}
        best, alone = min(spent, key=lambda way: spent[way]), Route(None, "raw")
        return alone if alone in spent and spent[best] > (1 - _WORTH) * spent[alone] else best

    def saw(self, sent: RequestRecord) -> None:
        """Learn from a request; move if another cut has been the better one for a while."""
        with self._lock:
            self._learn(sent)
            self._seen += 1
            if self._seen % _EVERY == 0 and not self._moving:
                self._look()
            idle = sent.at is None and monotonic() - self._crossed > _IDLE_S and not self._probing
            if idle:
                self._probing = True
        if idle:
            self._start("microtome-probe", self._probe)

    def close(self) -> None:
        """Wait for what it does beside: the connection is closed, so that ends soon."""
        for thread in self._threads:
            thread.join()

    def _start(self, name: str, work: Callable[..., None], *args: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, args=args, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def rest_s(self, at: str) -> float:
        """Seconds that the edge takes for what comes after a cut."""
        whole, head = self._able.get(Route(None, "raw")), self._able.get(Route(at, self.way.codec))
        if whole is None or head is None:
            return 0.0
        return max(whole.latency_s - head.seconds("run", where="edge"), 0.0) * self._speeds.edge

    def _learn(self, sent: RequestRecord) -> None:
        candidate = self._able.get(Route(sent.at, sent.codec if sent.at is not None else "raw"))
        if candidate is None:
            return
        speeds = self._speeds
        expected = candidate.seconds("run", where="edge")
        if expected > 1e-4 and (sent.at is None or sent.where == "cloud"):
            spent = sent.tail_s if sent.at is None else sent.head_s
            speeds.edge = _nearer(speeds.edge, spent / expected)
        if sent.where != "cloud" or sent.attempts != 1:
            return
        self._crossed = monotonic()
        expected = candidate.seconds("run", where="cloud")
        if expected > 1e-4:
            # Behind others of the same stream it waits by itself; alone, for those of other clients.
            speeds.cloud = _nearer(speeds.cloud, (sent.tail_s + sent.queue_s * sent.alone) / expected)
        crossed = sent.sent_bytes + sent.received_bytes
        seen = self._connection.sending_rate()
        if sent.alone and crossed >= _TELLING:
            seen = crossed / max(sent.wire_s - speeds.rtt_s, 1e-5)
        if seen is not None:
            speeds.bytes_per_s = _nearer(speeds.bytes_per_s, seen)

    def _look(self) -> None:
        best = min(self._able, key=lambda way: self._speeds.latency_s(self._able[way]))
        there, here = (self._speeds.latency_s(self._able[way]) for way in (best, self.way))
        if best == self.way or there > (1 - _GAIN) * here:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row < _TIMES:
            return
        self._in_a_row = 0
        why = (
            f"{seconds(there)} a request in place of {seconds(here)}, at {rate(self._speeds.bytes_per_s)}: the edge "
            f"has {1 / self._speeds.edge:.2f} and the cloud {1 / self._speeds.cloud:.2f} of its speed in the profile"
        )
        self._moving = True
        self._start("microtome-move", self._move, best, why)

    def _move(self, best: Route, why: str) -> None:
        """Have both sides ready for another cut, and then go there."""
        try:
            self.rehearse(best)
        except MicrotomeError as error:
            log.warning("the cut cannot be moved", extra={"to": best.at, "reason": str(error)})
        else:
            with self._lock:
                before, self.way = self.way, best
                self._note(before, why)
        finally:
            self._moving = False

    def _probe(self) -> None:
        """Measure the link, which no request has crossed for a while."""
        try:
            measured = probe(self._connection, timeout=5.0, most=1 << 20)
            with self._lock:
                self._speeds.bytes_per_s, self._speeds.rtt_s = measured.up_bytes_per_s, measured.rtt_s
        except ConnectionError:
            pass  # as long as it cannot be reached, all runs here
        finally:
            with self._lock:
                self._probing = False
                self._crossed = monotonic()

    def _note(self, before: Route | None, why: str) -> None:
        self.history.append(RouteChange(time(), before, self.way, why))


def tuned(splitter: Splitter, connection: Connection, codecs: Sequence[str], served: Sequence[str]) -> Autotuner:
    """Measure what a plan needs, plan, and be ready to plan again.

    Args:
        codecs: How what crosses may be encoded.
        served: The cuts that the server has.
    """
    if INPUTS not in served:
        raise BadQuery(f"{connection.address} serves one cut alone: say at={served[0]!r}")
    model, given = splitter.model, splitter.example
    # A later cut with no fewer bytes can only be better where the edge is the faster of the two; then it takes all.
    cuts = replace(splitter.cuts, offered=tuple(cut for cut in splitter.cuts if cut.dominates and cut.at in served))
    with torch.no_grad():
        edge = profile(model, given, measure="time", repeat=5)
        costs = codec_costs(cuts, tuple(dict.fromkeys(("raw", *codecs))), model=model, inputs=given)
    cloud = ask_profile(connection, splitter.num_calls, timeout=120.0)
    measured = probe(connection)
    found = plan(cuts, edge=edge, cloud=cloud, link=measured.link, codec=codecs, costs=costs)
    return Autotuner(found, measured, connection, codecs)


def best_codec(splitter: Splitter, at: str, connection: Connection, codecs: Sequence[str]) -> str:
    """With which codec the example is there soonest."""
    inputs = replace(splitter.cuts, offered=())
    cuts = inputs if at == INPUTS else replace(inputs, offered=(splitter.cuts[at],))
    live = cuts.inputs if at == INPUTS else cuts[0].live
    with torch.no_grad():
        costs = codec_costs(cuts, codecs, model=splitter.model, inputs=splitter.example)
    link = probe(connection).link
    spent = {codec: costs.of(live, codec) for codec in codecs}
    return min(
        spent, key=lambda codec: spent[codec].encode_s + link.seconds(spent[codec].nbytes) + spent[codec].decode_s
    )


def way_of(candidate: Candidate) -> Route:
    """Return the route for a candidate of a plan over two devices."""
    if not candidate.at:
        return Route(None, "raw")
    return Route(candidate.at[0] or INPUTS, candidate.codecs[0])


def _nearer(known: float, seen: float) -> float:
    return (1 - _LEARN) * known + _LEARN * seen
