"""A plan: every candidate with its terms, the one that was chosen, and the best one for every bandwidth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from microtome.addresses import find_address
from microtome.errors import BadQuery
from microtome.files.reading import File
from microtome.results.base import Result, render, write
from microtome.results.link import Link
from microtome.units import plural
from microtome.units import seconds as write_seconds

Objective = Literal["latency", "energy", "throughput", "training"]
Schedule = Literal["gpipe", "1f1b"]
TermKind = Literal["run", "encode", "send", "decode", "back", "backward"]


class LatencyTerm(NamedTuple):
    """One term of a latency.

    Attributes:
        what: `"run"`, `"encode"`, `"decode"` and `"backward"` are of a device; `"send"` and `"back"` of a link: the
            boundary to the next device, and the result back, or in training the gradients.
        where: The name of the device; of a link, that of the device on its far side.
    """

    what: TermKind
    where: str
    seconds: float


class TrainingStage(NamedTuple):
    """A stage of a model in training on one device.

    Attributes:
        device: The name of the device.
        forward_s: Seconds of a micro-batch; `backward_s`: of its backward.
        param_bytes: Bytes of the parameters; `gradient_bytes`: of their gradients; `optimizer_bytes`: of the state that
            the optimizer keeps.
        activation_bytes: Bytes that are kept for the backward of one micro-batch, with what crosses to it and from it.
        in_flight: The most micro-batches that wait for their backward at once.
    """

    device: str
    forward_s: float
    backward_s: float
    param_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    in_flight: int

    @property
    def memory_bytes(self) -> int:
        lasting = self.param_bytes + self.gradient_bytes + self.optimizer_bytes
        return lasting + self.in_flight * self.activation_bytes


class TrainingStep(NamedTuple):
    """A step of training: the forward and the backward of all its micro-batches.

    Attributes:
        step_s: Seconds of the step under the schedule, without the loss and the optimizer.
        bubble: The fraction of the step for which the devices with a stage are idle, their mean.
        stages: The stages in order.
        returned_bytes: Bytes of gradients that return over each link for a micro-batch.
    """

    step_s: float
    bubble: float
    stages: tuple[TrainingStage, ...]
    returned_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, repr=False)
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
        is_baseline: Whether it is the whole model on one device, which every plan has.
        refused: The reason why it cannot be chosen; None: it can.
        first_token_s: Of an answer of a language model: seconds to the first token; `token_s`: for each further one.
        training: The step of training; `steps`, `latency_s` and `slowest_s` are then of one micro-batch, forward and
            backward.
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
    first_token_s: float | None = None
    token_s: float | None = None
    training: TrainingStep | None = None

    def __repr__(self) -> str:
        return f"<Candidate {self.name!r}, {'refused' if self.refused else write_seconds(self.latency_s)}>"

    @property
    def throughput_per_s(self) -> float:
        """Passes per second of a pipeline."""
        return 1 / self.slowest_s if self.slowest_s else inf

    def seconds(self, *kinds: TermKind, where: str | None = None) -> float:
        """Return the sum of the steps of these kinds, with `where` those of one device."""
        return sum(step.seconds for step in self.steps if step.what in kinds and where in (None, step.where))

    def score(self, objective: Objective) -> float | None:
        """Return the value that the objective minimizes."""
        if objective == "training":
            return None if self.training is None else self.training.step_s
        return {"latency": self.latency_s, "throughput": self.slowest_s, "energy": self.energy_j}[objective]

    def rank(self, objective: Objective) -> tuple[float, float]:
        """Return a sort key: the objective, then the latency."""
        score = self.score(objective)
        return (inf if score is None else score, self.latency_s)


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
class Plan(Result, kind="plan"):
    """The best cut, its cost, and the costs of the other candidates.

    Attributes:
        model: The class of the model.
        name: The name of the model on the command line; None if it was run from Python.
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
        tokens: The tokens of the prompt and of the answer, all of which a candidate's costs cover; None: one pass.
        micro_batches: Of training: those of a step, each of the inputs of the profiles; `schedule`: their order.
    """

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
    name: str | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    tokens: tuple[int, int] | None = None
    micro_batches: int | None = None
    schedule: Schedule | None = None

    @property
    def title(self) -> str:
        """The name of the model, or else its class."""
        return self.name or self.model

    @property
    def winner(self) -> Candidate:
        return self.candidates[self.chosen]

    @property
    def at(self) -> str | tuple[str, ...] | None:
        """The cut as `microtome.split` takes it: an address, several for several stages, None for no cut.

        Without a cut, `sole_device` runs the model.
        """
        addresses = tuple(dict.fromkeys(at for at in self.winner.at if at is not None))
        return addresses if len(addresses) > 1 else addresses[0] if addresses else None

    @property
    def sole_device(self) -> str | None:
        """The device that runs the whole model, such as `"edge"` or `"cloud"`; None: the model is cut."""
        return None if self.at is not None else tuple(self.devices)[len(self.winner.at)]

    @property
    def baselines(self) -> tuple[Candidate, ...]:
        """The whole model on one device."""
        return tuple(candidate for candidate in self.candidates if candidate.is_baseline)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, at: str) -> Candidate:
        """Return the best candidate that cuts at an address, or the one with this name."""
        if not isinstance(at, str):
            raise BadQuery(f"expected the address of a cut, such as 'layer2.0', got {at!r}")
        cuts = dict.fromkeys(name for candidate in self.candidates for name in candidate.at if name is not None)
        if not any(at == candidate.name for candidate in self.candidates):
            at = find_address(at, cuts, self.aliases)
        return next(candidate for candidate in self.candidates if at in candidate.at or at == candidate.name)

    def over_bandwidths(self) -> tuple[Span, ...]:
        """Return the best candidate for each range of bandwidths from 0 to infinity, all else equal."""
        if self.objective == "training":
            raise BadQuery("expected a plan of single passes to compare bandwidths, got one of training")
        if len(self.links) != 1:
            raise BadQuery(f"expected a plan with one link to compare bandwidths, got {len(self.links)} links")
        able = [candidate for candidate in self.candidates if candidate.refused is None]
        return _spans(able, self.objective, self.links[0], 1 if self.tokens is None else self.tokens[1])

    def show(self, *, sort: str | None = None, top: int | None = None, columns: Iterable[str] = ()) -> None:
        """Print the table; in a notebook, display it.

        Args:
            sort: Order by `"latency"`, `"throughput"`, `"energy"` or `"sent"`, the best first; None: by the objective.
            top: Show the best so many candidates; None: also the winner and the whole model on one device.
            columns: Show these columns, such as `["latency", "sent"]`.
        """
        render("formats.show", self, "plan.CandidateSelection", sort=sort, top=top, columns=columns)

    def table(self) -> str:
        """Return the candidates as a table, with a chart."""
        return str(self)

    def to_perfetto(self, file: File | None = None) -> str:
        """Export Chrome trace JSON, a process per device and arrows for transfers, to the file or as text."""
        return write(render("trace_events.requests.plan_trace", self), file)

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
            if (candidate.training is None) == (self.objective == "training"):
                raise ValueError(f"expected a step of training in plans of training alone, at {candidate.name!r:.80}")
            if (least := min((*(step.seconds for step in candidate.steps), *candidate.sent_bytes), default=0)) < 0:
                raise ValueError(f"expected seconds and bytes from 0 on of {candidate.name!r:.80}, got {least}")
        if (self.objective == "training") != (self.micro_batches is not None and self.schedule is not None):
            raise ValueError("expected micro-batches and a schedule of training")
        named = {step.where for candidate in self.candidates for step in candidate.steps} | {*self.limits}
        named |= {stage.device for one in self.candidates if one.training for stage in one.training.stages}
        if foreign := named - self.devices.keys():
            raise ValueError(f"expected devices of {', '.join(self.devices)}, got {min(foreign)!r:.80}")

    def __repr__(self) -> str:
        return f"<Plan for {self.model}: {self.winner.name}, of {plural(len(self.candidates), 'candidate')}>"


# -- the best candidate for every bandwidth ----------------------------------------------------------------------------
#
# At `x` seconds a byte, the latency of a candidate is a line, `fixed + nbytes * x`, and the slowest step of a pipeline
# is the greater of a constant and a line through 0, `max(fixed, nbytes * x)`. Going from the slowest link to the
# fastest, the next winner is the first whose curve crosses the winner's, so nothing is sampled.


class _Curve(NamedTuple):
    """The time of a candidate over the bandwidth: a fixed part, and the bytes that cross the link."""

    fixed: float
    nbytes: int
    candidate: Candidate


def _spans(candidates: Sequence[Candidate], objective: Objective, link: Link, round_trips: int) -> tuple[Span, ...]:
    """Return the bandwidths of each winner, in order."""
    if objective == "energy":  # a byte takes the same energy on a slow link
        return (Span(0.0, inf, min(candidates, key=lambda candidate: candidate.rank("energy"))),)
    delay_s = round_trips * link.rtt_s
    curves = [_latency(one, delay_s) if objective == "latency" else _slowest(one) for one in candidates]
    winner = min(curves, key=lambda curve: (curve.nbytes, curve.fixed))
    bandwidth = 0.0
    spans: list[Span] = []
    while True:
        crossings = [(_crossing(winner, curve, objective), curve) for curve in curves]
        ahead = [(max(at, bandwidth), curve.fixed, curve) for at, curve in crossings if at is not None]
        if not ahead:
            return (*spans, Span(bandwidth, inf, winner.candidate))
        at, _, next_winner = min(ahead, key=lambda crossing: crossing[:2])
        if at > bandwidth:
            spans.append(Span(bandwidth, at, winner.candidate))
        winner, bandwidth = next_winner, at


def _latency(candidate: Candidate, delay_s: float) -> _Curve:
    """Return the curve of all steps; of those of the link, only the delay is fixed."""
    crossed = len(candidate.sent_bytes)
    busy = candidate.seconds("run", "encode", "decode")
    nbytes = sum(candidate.sent_bytes) + crossed * candidate.back_bytes
    return _Curve(busy + crossed * delay_s, nbytes, candidate)


def _slowest(candidate: Candidate) -> _Curve:
    """Return the curve of the slowest device, and of the larger of request and result: a link is full duplex."""
    devices = {step.where for step in candidate.steps}
    busy = max(candidate.seconds("run", "encode", "decode", where=where) for where in devices)
    crossing = max((*candidate.sent_bytes, candidate.back_bytes)) if candidate.sent_bytes else 0
    return _Curve(busy, crossing, candidate)


def _crossing(winner: _Curve, other: _Curve, objective: Objective) -> float | None:
    """Return the bandwidth above which the other is better; None: never on a faster link.

    One that sends no more bytes and was not better on a slower link will not be; one that sends more can be.
    """
    if other.fixed >= winner.fixed or other.nbytes <= winner.nbytes:
        return None
    if objective == "latency":
        return (other.nbytes - winner.nbytes) / (winner.fixed - other.fixed)
    return other.nbytes / winner.fixed
