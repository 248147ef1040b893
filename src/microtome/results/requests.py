"""The record of a run of many requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from math import isnan, nan
from time import perf_counter
from typing import Any, NamedTuple, Self

import torch

from microtome.files.reading import File
from microtome.results.base import Result, render, write

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
#: The phases of a request that ran on the edge alone.
_HERE = ("head", "encode", "total")


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
class RequestRecord:
    """The outcome of a request and the time of each phase.

    Attributes:
        at: The cut; None: all of it ran here. `""`: the inputs were sent.
        where: `"cloud"` or `"edge"`: where it ended; `"nowhere"`: it failed.
        head_s: Seconds of each part; `wire_s` is what neither side can account for.
        tail_s: Of the tail, wherever it ran.
        sent_bytes: With the envelope.
        attempts: How often it was sent.
        reason: Why it ended on the edge though it was sent, or was to be; or why it failed.
        alone: Whether no other request of this client was on its way.
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
    total_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    attempts: int = 0
    reason: str | None = None
    alone: bool = False
    began: float = field(default_factory=perf_counter, repr=False)


@dataclass(frozen=True)
class RequestLog(Result, kind="run"):
    """Many requests to a server, one after the other.

    Attributes:
        model: The class of the model.
        server: Its address.
        device: The device of the server.
        window: The most requests in flight.
        wall_s: Seconds from the first request to the last answer.
        samples: The number of samples in the requests.
        requests: A record of each.
        moves: When the cut moved, and why.
        energy_j: Joules of this device over that time; None: not measured.
        energy: The meter that measured it; or why there was none.
    """

    model: str
    server: str
    device: str
    window: int
    wall_s: float
    samples: int
    requests: tuple[RequestRecord, ...]
    moves: tuple[CutMove, ...] = ()
    energy_j: float | None = None
    energy: str = ""

    @property
    def rate_per_s(self) -> float:
        """Requests per second."""
        return len(self.requests) / self.wall_s if self.wall_s else 0.0

    @property
    def on_edge(self) -> tuple[RequestRecord, ...]:
        """Requests that ran on the edge alone."""
        return tuple(sent for sent in self.requests if sent.where == "edge")

    @property
    def reasons(self) -> dict[str, int]:
        """The reasons why requests ran on the edge alone, with how many."""
        return dict(Counter(sent.reason for sent in self.on_edge if sent.reason is not None).most_common())

    @property
    def energy_per_request_j(self) -> float | None:
        return None if self.energy_j is None or not self.requests else self.energy_j / len(self.requests)

    def phases(self) -> dict[str, Percentiles | None]:
        """Seconds of each phase of a request; the phases of the server are of the requests that it answered."""
        cloud = [sent for sent in self.requests if sent.where == "cloud"]
        found = {
            name: _middle(sum(getattr(sent, part) for part in parts) for sent in several)
            for name, parts in PHASES.items()
            for several in (self.requests if name in _HERE else cloud,)
        }
        here = _middle(sent.tail_s for sent in self.on_edge)
        if here is not None:
            found = {**found, "tail here": here, "total": found["total"]}
        return {name: found[name] for name in sorted(found, key=lambda name: name == "total")}

    def sizes(self) -> dict[str, Percentiles | None]:
        """Bytes that were sent and received, of the requests that the server answered."""
        cloud = [sent for sent in self.requests if sent.where == "cloud"]
        return {
            "sent": _middle(sent.sent_bytes for sent in cloud),
            "received": _middle(sent.received_bytes for sent in cloud),
        }

    def to_perfetto(self, file: File | None = None) -> str:
        """Export Chrome trace JSON, edge and cloud with arrows for transfers; written to the file if one is named."""
        return write(render("trace_events.requests.log_trace", self), file)

    def as_dict(self) -> dict[str, Any]:
        data = super().as_dict()
        first = min((sent.began for sent in self.requests), default=0.0)
        data["requests"] = [record(sent) | _began(sent, first) for sent in self.requests]
        data["summary"] = {
            "requests": len(self.requests),
            "rate_per_s": self.rate_per_s,
            "seconds": {name: middle and middle._asdict() for name, middle in self.phases().items()},
            "bytes": {name: middle and middle._asdict() for name, middle in self.sizes().items()},
            "on_edge": len(self.on_edge),
            "reasons": self.reasons,
            "energy_per_request_j": self.energy_per_request_j,
        }
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        requests = [one | {"began": one.get("began_s", nan)} for one in data["requests"]]  # older files do not say when
        return super().from_dict(data | {"requests": requests})

    def check(self) -> None:
        if not self.requests and self.samples:
            raise ValueError(f"expected no samples without requests, got {self.samples}")

    def __repr__(self) -> str:
        edge = f"{len(self.on_edge)} on the edge"
        return f"<RequestLog of {self.model} at {self.server}: {len(self.requests)} requests, {edge}>"


def record(sent: RequestRecord) -> dict[str, Any]:
    """A request as a dict, without the time when it began."""
    return {name: value for name, value in asdict(sent).items() if name != "began"}


def _began(sent: RequestRecord, first: float) -> dict[str, float]:
    return {} if isnan(sent.began) else {"began_s": sent.began - first}


def moved(history: Iterable[Any]) -> tuple[CutMove, ...]:
    """The moves of `Remote.history`, for a file."""
    return tuple(CutMove(move.when, move.after.at, move.after.codec, move.why) for move in history)


def _middle(values: Iterable[float]) -> Percentiles | None:
    """None where there are no values."""
    table = torch.tensor([float(value) for value in values], dtype=torch.float64)
    if not len(table):
        return None
    median, p95 = torch.quantile(table, torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
    return Percentiles(median, p95)
