"""A plan: every candidate with its terms, and the one that was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from microtome.addresses import find_address
from microtome.errors import BadQuery
from microtome.files.reading import File
from microtome.results.base import Result, write
from microtome.results.link import Link
from microtome.results.rendering import render

Objective = Literal["latency", "energy", "throughput"]
What = Literal["run", "encode", "send", "decode", "back"]


class LatencyTerm(NamedTuple):
    """One term of a latency.

    Attributes:
        what: `"run"`, `"encode"` and `"decode"` are of a device; `"send"` and `"back"` of a link: the boundary to the
            next device, and the result back.
        where: The name of the device; of a link, that of the device on its far side.
    """

    what: What
    where: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One placement of a model on devices, and its costs.

    Attributes:
        name: A description.
        at: For each link that is crossed, the address of the cut; None: the inputs cross, before anything ran.
        codecs: The codec for each of those links.
        steps: The terms in order. They sum up to the latency.
        sent_bytes: Bytes that are sent over each link.
        back_bytes: Bytes of the result, which comes back over each.
        memory_bytes: Of each device, the parameters of its stage and the peak of its other tensors.
        latency_s: Seconds from the inputs on the first device to the result there.
        slowest_s: Seconds of the slowest device or link: the interval between the results of a pipeline.
        late_s: Seconds that jitter adds to the latency at most.
        energy_j: Joules of the devices that count; None: not known.
        is_baseline: Whether it is the whole model on one device, which is always listed.
        refused: The reason why it cannot be chosen; None: it can.
    """

    name: str
    at: tuple[str | None, ...]
    codecs: tuple[str, ...]
    steps: tuple[LatencyTerm, ...]
    sent_bytes: tuple[int, ...]
    back_bytes: int
    memory_bytes: tuple[int, ...]
    latency_s: float
    slowest_s: float
    late_s: float
    energy_j: float | None
    is_baseline: bool = False
    refused: str | None = None

    @property
    def throughput_per_s(self) -> float:
        """Passes per second of a pipeline."""
        return 1 / self.slowest_s if self.slowest_s else float("inf")

    def seconds(self, *what: What, where: str | None = None) -> float:
        """The sum of the steps of these kinds; with `where`, of one device."""
        return sum(step.seconds for step in self.steps if step.what in what and where in (None, step.where))

    def score(self, objective: Objective) -> float | None:
        """The value that the objective minimizes."""
        return {"latency": self.latency_s, "throughput": self.slowest_s, "energy": self.energy_j}[objective]

    def rank(self, objective: Objective) -> tuple[float, float]:
        """A sort key: the objective, then the latency."""
        score = self.score(objective)
        return (float("inf") if score is None else score, self.latency_s)


class Span(NamedTuple):
    """The bandwidths in which one candidate is the best.

    Attributes:
        from_bytes_per_s: From here on.
        until_bytes_per_s: To here; infinity for the last.
    """

    from_bytes_per_s: float
    until_bytes_per_s: float
    candidate: Candidate


@dataclass(frozen=True)
class Plan(Result):
    """The best cut, its cost, and the costs of the other candidates.

    Attributes:
        model: The class of the model.
        inputs: The inputs of the profiles.
        objective: The quantity that is minimized.
        devices: The devices in the order of the chain, with descriptions.
        links: The link from each device to the next.
        candidates: Those that can be chosen, the best first; then those that are refused.
        chosen: The index of the winner.
        strategy: The name of the strategy that chose it; empty: the objective did.
        limits: The most memory of devices, in bytes, by their names.
        codec_costs: The source of the costs of codecs.
        energy_of: The devices whose joules count; empty: none are known.
        notes: Assumptions, and what was left out.
    """

    kind: ClassVar[str] = "plan"
    schema: ClassVar[int] = 1

    model: str
    inputs: str
    objective: Objective
    devices: dict[str, str]
    links: tuple[Link, ...]
    candidates: tuple[Candidate, ...]
    chosen: int
    strategy: str
    limits: dict[str, int]
    codec_costs: str
    energy_of: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def winner(self) -> Candidate:
        return self.candidates[self.chosen]

    @property
    def at(self) -> str | tuple[str, ...] | None:
        """The cut as `microtome.split` takes it: an address, several for several stages, None for no cut."""
        addresses = tuple(dict.fromkeys(at for at in self.winner.at if at is not None))
        return addresses if len(addresses) > 1 else addresses[0] if addresses else None

    @property
    def baselines(self) -> tuple[Candidate, ...]:
        """The whole model on one device."""
        return tuple(candidate for candidate in self.candidates if candidate.is_baseline)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, at: str) -> Candidate:
        """The best candidate that cuts at an address, or that has this name."""
        if not isinstance(at, str):
            raise BadQuery(f"candidates are found by where they cut, such as 'layer2.0', got {at!r}")
        cuts = dict.fromkeys(name for candidate in self.candidates for name in candidate.at if name is not None)
        if not any(at == candidate.name for candidate in self.candidates):
            at = find_address(at, cuts)
        return next(candidate for candidate in self.candidates if at in candidate.at or at == candidate.name)

    def over_bandwidths(self) -> tuple[Span, ...]:
        """The best candidate for each range of bandwidths, all else as it is: exact, from 0 to infinity.

        Of the same two devices and the same link but for its bandwidth.
        """
        from microtome.results.bandwidth_curve import spans

        if len(self.links) != 1:
            raise BadQuery(f"bandwidths are compared over one link, and this plan has {len(self.links)}")
        able = [candidate for candidate in self.candidates if candidate.refused is None]
        return spans(able, self.objective, self.links[0])

    def table(self) -> str:
        """The candidates as a table, with a chart."""
        return str(self)

    def to_perfetto(self, file: File | None = None) -> str:
        """Export Chrome trace JSON, a process per device and arrows for transfers; written to the file if named."""
        return write(render("perfetto_remote.of_plan", self), file)

    def check(self) -> None:
        if not 0 <= self.chosen < len(self.candidates):
            raise ValueError(f"its winner is candidate {self.chosen} of {len(self.candidates)}")
        if self.winner.refused is not None:
            raise ValueError(f"its winner is refused: {self.winner.refused:.80}")
        if len(self.links) != len(self.devices) - 1:
            raise ValueError(f"expected a link between each two devices, got {len(self.links)} for {len(self.devices)}")
        for candidate in self.candidates:
            if len(candidate.memory_bytes) != len(self.devices):
                raise ValueError(f"expected the memory of each device of {candidate.name!r:.80}")
            if (least := min((*(step.seconds for step in candidate.steps), *candidate.sent_bytes), default=0)) < 0:
                raise ValueError(f"expected seconds and bytes from 0 on of {candidate.name!r:.80}, got {least}")
        named = {step.where for candidate in self.candidates for step in candidate.steps} | {*self.limits}
        if foreign := named - self.devices.keys():
            raise ValueError(f"expected devices of {', '.join(self.devices)}, got {min(foreign)!r:.80}")

    def __repr__(self) -> str:
        return f"<Plan for {self.model}: {self.winner.name}, of {len(self.candidates)} candidates>"
