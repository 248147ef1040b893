"""A log of requests to a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from math import isnan, nan
from time import perf_counter
from typing import Any, NamedTuple, Self

import torch

from microtome.addresses import INPUT
from microtome.files.reading import File
from microtome.results.base import Result, render, write
from microtome.units import plural

#: The phases of a request in order, and the fields of `RequestRecord` that each is the sum of.
PHASES: dict[str, tuple[str, ...]] = {
    "head": ("head_s",),
    "encode": ("encode_s",),
    "wire": ("wire_s",),
    "queue": ("queue_s",),
    "tail": ("tail_s",),
    "codec there": ("server_decode_s", "server_encode_s"),
    "decode": ("decode_s",),
    "total": ("total_s",),
}
#: The end of the year 9999, in seconds since the epoch: `datetime` has no later time.
_MAX_WHEN_S = 253_402_300_800.0
#: The phases of every request.
_ALWAYS = ("head", "total")


class Percentiles(NamedTuple):
    """The median and the 95th percentile."""

    median: float
    p95: float


class CutMove(NamedTuple):
    """A move of the cut.

    Attributes:
        when_s: Seconds since the epoch.
        at: The new cut; None: none, all runs here.
        codec: The new codec.
    """

    when_s: float
    at: str | None
    codec: str
    why: str


@dataclass(frozen=True)
class HopRecord:
    """The seconds that a request spent at one server of a chain.

    Attributes:
        server: Its address.
        at: The cut where its stage begins; `""`: it takes the inputs.
        queue_s: Seconds that the request waited there.
        run_s: Seconds of the stage; `decode_s`, `encode_s`: of what crosses its beginning and its end.
    """

    server: str
    at: str
    decode_s: float
    queue_s: float
    run_s: float
    encode_s: float


@dataclass(frozen=True)
class RequestRecord:
    """The outcome of a request and the time of each phase.

    Attributes:
        at: The first cut; None: all of it ran here. `""`: the inputs were sent.
        later: The further cuts of a chain, in order.
        where: `"cloud"` or `"edge"`: where it ended; `"nowhere"`: it failed.
        head_s: Seconds of each phase; `wire_s` is what neither side accounts for.
        tail_s: Seconds of the tail, wherever it ran; of a chain, the sum of the stages on servers.
        last_s: Seconds of the last stage, if this device ran it after the servers.
        sent_bytes: Bytes of the request with its envelope; of a chain, all that this device sent.
        attempts: The number of times it was sent.
        reason: Why it fell back to the edge, or failed.
        alone: Whether no other request of this client was in flight.
        hops: The servers of a chain, in order; empty for one server.
    """

    at: str | None
    codec: str = "raw"
    where: str = "cloud"
    head_s: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    server_decode_s: float = 0.0
    queue_s: float = 0.0
    tail_s: float = 0.0
    server_encode_s: float = 0.0
    decode_s: float = 0.0
    last_s: float = 0.0
    total_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    attempts: int = 0
    reason: str | None = None
    alone: bool = False
    later: tuple[str, ...] = ()
    hops: tuple[HopRecord, ...] = ()
    began: float = field(default_factory=perf_counter, repr=False)


@dataclass(frozen=True)
class RequestLog(Result, kind="run"):
    """Many requests to a server, one after the other.

    Attributes:
        model: The class of the model.
        name: The name of the model on the command line; None if it was run from Python.
        server: Its address.
        device: The device of the server.
        window: The most requests in flight.
        wall_s: Seconds from the first request to the last answer.
        samples: The number of samples in the requests; None: not known.
        requests: A record of each.
        moves: The moves of the cut, with the reasons.
        energy_j: Joules of this device over that time; None: not measured.
        energy: The meter that measured it; or why there was none.
    """

    model: str
    server: str
    device: str
    window: int
    wall_s: float
    samples: int | None
    requests: tuple[RequestRecord, ...]
    moves: tuple[CutMove, ...] = ()
    energy_j: float | None = None
    energy: str = ""
    name: str | None = None

    @property
    def title(self) -> str:
        """The name of the model, or else its class."""
        return self.name or self.model

    @property
    def rate_per_s(self) -> float:
        """Requests per second."""
        return len(self.requests) / self.wall_s if self.wall_s else 0.0

    @property
    def on_edge(self) -> tuple[RequestRecord, ...]:
        """Requests that ended on the edge."""
        return tuple(sent for sent in self.requests if sent.where == "edge")

    @property
    def reasons(self) -> dict[str, int]:
        """The number of requests that ended on the edge, by the reason."""
        return dict(Counter(sent.reason for sent in self.on_edge if sent.reason is not None).most_common())

    @property
    def energy_per_request_j(self) -> float | None:
        return None if self.energy_j is None or not self.requests else self.energy_j / len(self.requests)

    def phases(self) -> dict[str, Percentiles | None]:
        """Return the seconds of each phase of a request, over the requests that had it.

        Every request has a head and a total; the time to encode is of those that were encoded, and the phases of the
        server are of those that it answered. The tail of a chain is followed by each of its stages on servers.
        """
        phases: dict[str, Percentiles | None] = {}
        encoded = [sent for sent in self.requests if sent.sent_bytes]
        for name, fields in PHASES.items():
            requests = self.requests if name in _ALWAYS else encoded if name == "encode" else self._on_cloud
            phases[name] = _percentiles(sum(getattr(sent, field) for field in fields) for sent in requests)
            if name == "tail":
                phases |= self._phases_of_hops()
        total = phases.pop("total")
        if any(sent.last_s for sent in self.requests):
            phases["last stage here"] = _percentiles(sent.last_s for sent in self._on_cloud)
        if (tail_here := _percentiles(sent.tail_s for sent in self.on_edge)) is not None:
            phases["tail here"] = tail_here
        return {**phases, "total": total}

    def _phases_of_hops(self) -> dict[str, Percentiles | None]:
        """Return the seconds of each stage of a chain that ran on a server, by the cut where it begins."""
        seconds: dict[str, list[float]] = {}
        for sent in self._on_cloud:
            for hop in sent.hops:
                seconds.setdefault(f"  from {hop.at or INPUT}", []).append(hop.run_s)
        return {name: _percentiles(values) for name, values in seconds.items()}

    def sizes(self) -> dict[str, Percentiles | None]:
        """Return the bytes that were sent and received, of the requests that the server answered."""
        return {
            "sent": _percentiles(sent.sent_bytes for sent in self._on_cloud),
            "received": _percentiles(sent.received_bytes for sent in self._on_cloud),
        }

    @property
    def _on_cloud(self) -> list[RequestRecord]:
        return [sent for sent in self.requests if sent.where == "cloud"]

    def to_perfetto(self, file: File | None = None) -> str:
        """Export Chrome trace JSON, edge and cloud with arrows for transfers, to the file or as text."""
        return write(render("trace_events.requests.log_trace", self), file)

    def as_dict(self) -> dict[str, Any]:
        data = super().as_dict()
        first = min((sent.began for sent in self.requests), default=0.0)
        data["requests"] = [
            record(sent) | ({} if isnan(sent.began) else {"began_s": sent.began - first}) for sent in self.requests
        ]
        data["summary"] = {
            "requests": len(self.requests),
            "rate_per_s": self.rate_per_s,
            "seconds": {name: one and one._asdict() for name, one in self.phases().items()},
            "bytes": {name: one and one._asdict() for name, one in self.sizes().items()},
            "on_edge": len(self.on_edge),
            "reasons": self.reasons,
            "energy_per_request_j": self.energy_per_request_j,
        }
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        requests = [sent | {"began": sent.get("began_s", nan)} for sent in data["requests"]]  # older files lack it
        return super().from_dict(data | {"requests": requests})

    def check(self) -> None:
        if not self.requests and self.samples:
            raise ValueError(f"expected no samples without requests, got {self.samples}")
        for move in self.moves:
            if not 0 <= move.when_s < _MAX_WHEN_S:
                raise ValueError(f"expected the time of a move in seconds since 1970, got {move.when_s!r:.80}")

    def __repr__(self) -> str:
        edge = f"{len(self.on_edge)} on the edge"
        return f"<RequestLog of {self.model} at {self.server}: {plural(len(self.requests), 'request')}, {edge}>"


def record(sent: RequestRecord) -> dict[str, Any]:
    """Return a request as a dict, without the time when it began."""
    return {name: value for name, value in asdict(sent).items() if name != "began"}


def cut_moves(history: Iterable[Any]) -> tuple[CutMove, ...]:
    """Return the moves of `Remote.history`, for a file."""
    return tuple(CutMove(move.when, move.after.at, move.after.codec, move.why) for move in history)


def _percentiles(values: Iterable[float]) -> Percentiles | None:
    table = torch.tensor([float(value) for value in values], dtype=torch.float64)
    if not len(table):
        return None
    median, p95 = torch.quantile(table, torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
    return Percentiles(median, p95)
