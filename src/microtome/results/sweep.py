"""A sweep: the measured times of each cut between this device and a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from microtome.addresses import INPUT, find_address
from microtome.files.reading import File
from microtome.results.base import Result, render, write
from microtome.results.link import LinkMeasurement
from microtome.units import plural


@dataclass(frozen=True)
class CutTiming:
    """Median times of requests at one cut.

    Attributes:
        at: The cut; `""`: the inputs were sent, and all ran on the server; None: all ran here.
        wire_s: Seconds that neither side accounts for: the link both ways, and gRPC.
        queue_s: Seconds until the server began.
        codec_there_s: Seconds of the server to decode the request and encode the reply.
        total_q1_s: The first quartile of the total; `total_q3_s` is the third.
        energy_j: Joules of this device for a request; None: not measured.
        planned_s: Seconds by the plan; None: it has none.
        failed: The reason why it could not be measured; all numbers are then 0.
    """

    at: str | None
    codec: str
    head_s: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    queue_s: float = 0.0
    tail_s: float = 0.0
    codec_there_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    total_q1_s: float = 0.0
    total_q3_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    energy_j: float | None = None
    planned_s: float | None = None
    failed: str | None = None

    @property
    def name(self) -> str:
        return "all here" if self.at is None else self.at or INPUT

    @property
    def between_s(self) -> float:
        """The seconds of codecs, wire and queue."""
        return max(self.total_s - self.head_s - self.tail_s, 0.0)


@dataclass(frozen=True)
class Sweep(Result, kind="sweep"):
    """Times of each cut between this device and a server, beside those of a plan.

    Attributes:
        model: The class of the model.
        name: The name of the model on the command line; None if it was run from Python.
        inputs: The inputs of a request.
        server: Its address.
        device: Where it computes.
        codec: The codec of the boundaries.
        repeat: The number of requests at each cut, taken in turns.
        link: The measured link.
        rows: The input sent, the cuts in the order of the run, all here.
        energy: The meter of this device's energy; or why there was none.
        no_plan: Why there is no plan; empty: there is one.
        environment: This machine.
    """

    model: str
    inputs: str
    server: str
    device: str
    codec: str
    repeat: int
    link: LinkMeasurement
    rows: tuple[CutTiming, ...]
    energy: str
    no_plan: str
    environment: dict[str, str]
    name: str | None = None

    @property
    def title(self) -> str:
        """The name of the model, or else its class."""
        return self.name or self.model

    @property
    def measured(self) -> tuple[CutTiming, ...]:
        """The cuts that could be measured."""
        return tuple(row for row in self.rows if row.failed is None)

    @property
    def best(self) -> CutTiming:
        """The fastest cut."""
        return min(self.measured, key=lambda row: row.total_s)

    @property
    def planned(self) -> CutTiming | None:
        """The fastest cut by the plan."""
        known = [row for row in self.measured if row.planned_s is not None]
        return min(known, key=lambda row: row.planned_s or 0.0) if known else None

    @property
    def tied(self) -> tuple[CutTiming, ...]:
        """Others within the noise of the best, the fastest first: the middle halves of their requests overlap."""
        best = self.best
        tied = (row for row in self.measured if row is not best and row.total_q1_s <= best.total_q3_s)
        return tuple(sorted(tied, key=lambda row: row.total_s))

    def __iter__(self) -> Iterator[CutTiming]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: str | None) -> CutTiming:
        """Return the row of a cut, or of this name; `""`: the input was sent; None: all ran here."""
        known: dict[str | None, CutTiming] = {name: row for row in self.rows for name in (row.name, row.at)}
        return known[at] if at in known else known[find_address(at, [name for name in known if name])]

    def to_html(self, file: File | None = None) -> str:
        """Export one self-contained HTML page, to the file or as text."""
        return write(render("html.sweep.html", self), file)

    def to_perfetto(self, file: File | None = None) -> str:
        """Export Chrome trace JSON, a request at each cut over edge and cloud, to the file or as text."""
        return write(render("trace_events.requests.sweep_trace", self), file)

    def check(self) -> None:
        if not self.measured:
            raise ValueError("expected a measured cut, got none")
        if took := [row.total_s for row in self.measured if row.total_s <= 0]:
            raise ValueError(f"expected requests that take time, got {took[0]} s")

    def __repr__(self) -> str:
        ways = plural(len(self.rows), "way")
        return f"<Sweep of {self.model} at {self.server}: {ways}, the best is {self.best.name}>"
