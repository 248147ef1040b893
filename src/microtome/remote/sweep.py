"""`sweep`: what each cut takes, measured on a server, beside what a plan says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from microtome.devices.machine import environment
from microtome.devices.meters import metered, pick
from microtome.engine.pytree import accelerators_in
from microtome.errors import BadFile, BadQuery, MicrotomeError, NoMatch, RemoteError, SensorFailed, Unsupported
from microtome.inputs import Inputs
from microtome.plan import plan
from microtome.plan.codec_benchmark import codec_costs
from microtome.profile import profile
from microtome.remote.autotune import Route, way_of
from microtome.remote.client import Remote
from microtome.remote.connection import Connection, Security
from microtome.remote.link_probe import probe
from microtome.remote.local_model import LocalModel, shake_hands
from microtome.remote.payloads import INPUTS
from microtome.remote.replies import ask_profile
from microtome.results.cuts import Cut
from microtome.results.link import LinkMeasurement
from microtome.results.requests import RequestRecord
from microtome.results.sweep import CutTiming, Sweep
from microtome.split.codecs import parse_codec
from microtome.split.splitter import Splitter
from microtome.split.stage import Stage

#: Seconds of each cut that energy is measured over, and to wait for the profile of the server.
_ENERGY_S, _PROFILE_S = 0.5, 120.0

Progress = Callable[[str, int, int], None]


def sweep(
    model: nn.Module | Stage,
    inputs: Any,
    server: str,
    cuts: str | Sequence[str] = "dominating",
    *,
    repeat: int = 10,
    codec: str = "raw",
    security: Security | None = None,
    any_torch: bool = False,
    timeout: float = 10.0,
    progress: Progress | None = None,
) -> Sweep:
    """Measure what each cut takes, with no cut at all beside it, on a server and the way there.

    Args:
        model: The model that the server has, in eval.
        inputs: The inputs of a request.
        server: Its address, such as `"host:7070"`.
        cuts: `"all"`; `"dominating"`, those that send less than all before them; or addresses.
        repeat: How many requests are measured at each. The cuts take turns, so that all see the same of what changes.
        codec: How what crosses is encoded.
        any_torch: Go on though the other side has another version of torch.
        timeout: Seconds to wait for the server at first.
        progress: Told what is being done, how many steps of it are done, and how many there are to be.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> with mt.serve(model, x, listen="127.0.0.1:0") as server:
    ...     found = sweep(model, x, server.address, ["layer1"], repeat=3)
    >>> [row.name for row in found]
    ['all there', 'layer1', 'all here']
    >>> found["layer1"].sent_bytes > found["layer1"].received_bytes
    True
    """
    if not isinstance(repeat, int) or repeat < 1:
        raise BadQuery(f"repeat is how many requests are measured at each cut, got {repeat!r}")
    parse_codec(codec)
    tell = progress or (lambda step, done, whole: None)
    parts = LocalModel(model, inputs)
    splitter = parts.splitter
    if splitter is None or not parts.is_whole:
        raise Unsupported("a sweep needs the whole model on this side: a stage has one cut")
    chosen = _chosen(splitter, cuts)
    with closing(Connection(server, security)) as connection:
        told = shake_hands(connection, parts, timeout, any_torch=any_torch)
        link = probe(connection, most=min(8 << 20, told.max_message))
        ways = [Route(at, codec) for at in (INPUTS, *(cut.at for cut in chosen)) if at in told.cuts]
        experiment = _Experiment(parts, connection, told, [*ways, Route(None, "raw")])
        experiment.measure(repeat, tell)
        joules, energy = experiment.energy(tell)
        tell("planning", 0, 1)
        planned, no_plan = _planned(splitter, chosen, connection, link, codec)
    rows = tuple(replace(row, energy_j=joules.get(way), planned_s=planned.get(way)) for way, row in experiment.rows())
    return Sweep(
        model=type(splitter.model).__name__,
        inputs=repr(splitter.example),
        server=server,
        device=told.device,
        codec=codec,
        repeat=repeat,
        link=link,
        rows=rows,
        energy=energy,
        no_plan=no_plan,
        environment=environment(accelerators_in((splitter.example.args, splitter.example.kwargs))),
    )


def _chosen(splitter: Splitter, cuts: str | Sequence[str]) -> list[Cut]:
    if cuts == "all":
        return list(splitter.cuts)
    if cuts == "dominating":
        return [cut for cut in splitter.cuts if cut.dominates]
    named = [cuts] if isinstance(cuts, str) else list(cuts)
    if not named or not all(isinstance(one, str) and one for one in named):
        raise BadQuery(f"a sweep is over 'all' cuts, the 'dominating' ones, or addresses, got {cuts!r:.200}")
    found = {cut.index: cut for cut in map(splitter.cut, named)}
    return [found[index] for index in sorted(found)]


class _Experiment:
    """Requests at several cuts, taken in turns."""

    def __init__(self, parts: LocalModel, connection: Connection, told: Any, ways: Sequence[Route]) -> None:
        assert parts.splitter is not None
        self._given: Inputs = parts.splitter.example
        self._remotes = {way: Remote(parts, connection, told, way, None, None) for way in ways}
        self._failed: dict[Route, str] = {}
        self._sent: dict[Route, list[RequestRecord]] = {way: [] for way in ways}

    def measure(self, repeat: int, tell: Progress) -> None:
        """A round in which both sides make what they keep, then those that count."""
        order, turn = list(self._remotes), random.Random(0)
        for at in range(repeat + 1):
            for done, way in enumerate(order):
                step = f"round {at} of {repeat}" if at else "getting ready"
                tell(
                    f"{step}, {way.at or ('all here' if way.at is None else 'all there')}",
                    done + at * len(order),
                    (repeat + 1) * len(order),
                )
                self._request(way, counts=at > 0)
            turn.shuffle(order)
        if all(way in self._failed for way in self._remotes):
            raise RemoteError(f"nothing could be measured: {next(iter(self._failed.values()))}", "UNKNOWN")

    def _request(self, way: Route, *, counts: bool) -> None:
        if way in self._failed:
            return
        remote = self._remotes[way]
        try:
            remote(*self._given.args, **self._given.kwargs)
        except MicrotomeError as error:
            if isinstance(error, RemoteError) and error.kind in ("UNREACHABLE", "REFUSED"):
                raise
            self._failed[way] = str(error)
        else:
            if counts:
                self._sent[way].append(remote.requests[-1])

    def energy(self, tell: Progress) -> tuple[dict[Route, float], str]:
        """Joules of this device for a request at each cut, and what measured them; or why nothing did."""
        able = [way for way in self._remotes if way not in self._failed]
        found: dict[Route, float] = {}
        try:
            with pick(None, accelerators_in((self._given.args, self._given.kwargs))) as meter:
                for done, way in enumerate(able):
                    tell("energy", done, len(able))
                    ran = metered(meter, lambda times, way=way: self._again(way, times), seconds=_ENERGY_S, parts=3)  # type: ignore[misc]
                    found[way] = sum(part.joules for part in ran) / sum(part.runs for part in ran)
                return found, f"{meter.what}, requests one after the other"
        except SensorFailed as error:
            return found, str(error)

    def _again(self, way: Route, times: int) -> None:
        for _ in range(times):
            self._remotes[way](*self._given.args, **self._given.kwargs)

    def rows(self) -> Iterator[tuple[Route, CutTiming]]:
        for way, sent in self._sent.items():
            failed = self._failed.get(way)
            yield way, CutTiming(way.at, way.codec, failed=failed) if failed is not None else _timed(way, sent)


def _timed(way: Route, sent: Sequence[RequestRecord]) -> CutTiming:
    def middle(*names: str) -> float:
        return median(sum(getattr(one, name) for name in names) for one in sent)

    total = [one.total_s for one in sent]
    q1, _, q3 = quantiles(total, method="inclusive") if len(total) > 1 else total * 3
    here = way.at is None  # what ran is then in `tail_s`
    return CutTiming(
        at=way.at,
        codec=way.codec,
        head_s=middle("head_s", "tail_s") if here else middle("head_s"),
        encode_s=middle("encode_s"),
        wire_s=middle("wire_s"),
        queue_s=middle("queue_s"),
        tail_s=0.0 if here else middle("tail_s"),
        codec_there_s=middle("server_decode_s", "server_encode_s"),
        decode_s=middle("decode_s"),
        total_s=median(total),
        total_q1_s=q1,
        total_q3_s=q3,
        sent_bytes=round(middle("sent_bytes")),
        received_bytes=round(middle("received_bytes")),
    )


def _planned(
    splitter: Splitter, chosen: Sequence[Cut], connection: Connection, link: LinkMeasurement, codec: str
) -> tuple[dict[Route, float], str]:
    """Plan over the same cuts: the seconds of each way, or why there is no plan."""
    cuts = replace(splitter.cuts, offered=tuple(chosen))
    try:
        cloud = ask_profile(connection, splitter.num_calls, timeout=_PROFILE_S)
        with torch.no_grad():
            edge = profile(splitter.model, splitter.example, measure="time", repeat=10)
            costs = codec_costs(cuts, tuple({"raw", codec}), model=splitter.model, inputs=splitter.example)
        found = plan(cuts, edge=edge, cloud=cloud, link=link.link, codec=codec, costs=costs)
    except (RemoteError, BadFile, BadQuery, NoMatch, Unsupported) as error:
        return {}, str(error)
    return {way_of(candidate): candidate.latency_s for candidate in found if candidate.refused is None}, ""
