"""`sweep`: measure the latency of each cut with a server, and compare it with the plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from typing import Any

from torch import nn

from microtome.addresses import INPUT
from microtome.devices.machine import environment
from microtome.devices.meters import metered, pick
from microtome.engine.argument_names import describe_arguments
from microtome.engine.pytree import accelerators_in
from microtome.errors import BadFile, BadQuery, MicrotomeError, NoMatch, RemoteError, SensorFailed, Unsupported
from microtome.remote.autotune import measure_devices, route_of
from microtome.remote.chain import Chain
from microtome.remote.client import Remote
from microtome.remote.connection import Connection
from microtome.remote.handshake import handshake
from microtome.remote.local_model import LocalModel
from microtome.remote.payloads import INPUTS
from microtome.remote.request import Route
from microtome.remote.security import Security
from microtome.remote.server_pool import ServerPool
from microtome.remote.server_probe import measure_link
from microtome.results.cuts import Cut
from microtome.results.link import LinkMeasurement
from microtome.results.requests import RequestRecord
from microtome.results.sweep import CutTiming, Sweep
from microtome.split.boundary.codecs import parse_codec
from microtome.split.splitter import Splitter
from microtome.split.stage import Stage
from microtome.units import some

#: Seconds over which the energy of each cut is measured.
_ENERGY_S = 0.5

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
    """Measure the latency of each cut, and of no cut, with a server.

    Args:
        model: The model that the server has, in eval mode.
        inputs: The inputs of a request.
        server: The address of the server, such as `"host:7070"`.
        cuts: `"all"`; `"dominating"`, those that send less than all before them; or addresses. `"(input)"` and no
            cut are measured in any case. A server of one stage is measured at its cut.
        repeat: The number of requests at each cut. The cuts take turns, so that all are measured under the same load.
        codec: The codec of the boundary.
        security: TLS and token of the connection.
        any_torch: Allow another version of torch on the server.
        timeout: Seconds to wait for the server when connecting.
        progress: Called with a description, the number of steps that are done, and the number of all steps.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> with mt.serve(model, x, listen="127.0.0.1:0") as server:
    ...     result = sweep(model, x, server.address, ["layer1"], repeat=3)
    >>> [row.name for row in result]
    ['(input)', 'layer1', 'all here']
    >>> result["layer1"].sent_bytes > result["layer1"].received_bytes
    True
    """
    if not isinstance(repeat, int) or repeat < 1:
        raise BadQuery(f"expected a repeat of 1 or more requests at each cut, got {repeat!r}")
    parse_codec(codec)
    progress = progress or (lambda step, done, total: None)
    local = LocalModel(model, inputs)
    splitter = local.splitter
    if splitter is None or not local.is_whole:
        raise Unsupported("a sweep needs the whole model on this side: a stage has one cut")
    chosen = _choose(splitter, cuts)
    with closing(Connection(server, security)) as connection:
        hello = handshake(connection, local, timeout, any_torch=any_torch)
        link = measure_link(connection, max_bytes=min(8 << 20, hello.max_message))
        chosen = _keep_served(chosen, splitter, hello.cuts, server, has_addresses=cuts not in ("all", "dominating"))
        routes = [Route(at, codec) for at in (INPUTS, *(cut.at for cut in chosen)) if at in hello.cuts]
        chain = Chain([ServerPool([connection])])
        remotes = {route: Remote(local, chain, route) for route in (*routes, Route(None, "raw"))}
        experiment = _Experiment(remotes, splitter)
        experiment.measure(repeat, progress)
        joules, energy = experiment.measure_energy(progress)
        progress("planning", 0, 1)
        planned, no_plan = _plan(splitter, chosen, connection, link, codec)
    rows = (replace(row, energy_j=joules.get(route), planned_s=planned.get(route)) for route, row in experiment.rows())
    return Sweep(
        model=type(splitter.model).__name__,
        inputs=describe_arguments(splitter.model, splitter.example),
        server=server,
        device=hello.device,
        codec=codec,
        repeat=repeat,
        link=link,
        rows=tuple(rows),
        energy=energy,
        no_plan=no_plan,
        environment=environment(accelerators_in((splitter.example.args, splitter.example.kwargs))),
    )


def _choose(splitter: Splitter, cuts: str | Sequence[str]) -> list[Cut]:
    if cuts == "all":
        return list(splitter.cuts)
    if cuts == "dominating":
        return [cut for cut in splitter.cuts if cut.dominates]
    addresses = [cuts] if isinstance(cuts, str) else list(cuts)
    if not addresses or not all(isinstance(address, str) and address for address in addresses):
        raise BadQuery(f"expected cuts of 'all', 'dominating', or addresses, got {cuts!r:.200}")
    addresses = [address for address in addresses if address != INPUT]  # measured in any case
    return sorted({cut.index: cut for cut in map(splitter.cut, addresses)}.values(), key=lambda cut: cut.index)


def _keep_served(
    chosen: Sequence[Cut], splitter: Splitter, served: Collection[str], server: str, *, has_addresses: bool
) -> list[Cut]:
    """Return the chosen cuts that a server has; of a server of one stage, its cut if none was chosen by address."""
    kept = [cut for cut in chosen if cut.at in served]
    if kept or not chosen:
        return kept
    if has_addresses:
        expected, got = ([repr(at or INPUT) for at in addresses] for addresses in (served, [cut.at for cut in chosen]))
        raise RemoteError(f"{server} serves the cuts {some(expected, 5)}, and none of {some(got, 5)}", "NO_CUT")
    return [cut for cut in splitter.cuts if cut.at in served]


class _Experiment:
    """Requests along several routes, which take turns."""

    def __init__(self, remotes: dict[Route, Remote], splitter: Splitter) -> None:
        self._inputs = splitter.example
        self._remotes = remotes
        self._failures: dict[Route, str] = {}
        self._records: dict[Route, list[RequestRecord]] = {route: [] for route in remotes}

    def measure(self, repeat: int, progress: Progress) -> None:
        """Send a warm-up request along each route, then `repeat` rounds that count."""
        order, shuffler = list(self._remotes), random.Random(0)
        for number in range(repeat + 1):
            step = f"round {number} of {repeat}" if number else "getting ready"
            for index, route in enumerate(order):
                name = CutTiming(route.at, route.codec).name
                progress(f"{step}, {name}", index + number * len(order), (repeat + 1) * len(order))
                self._request(route, is_warm_up=number == 0)
            shuffler.shuffle(order)
        if len(self._failures) == len(self._remotes):
            raise RemoteError(f"nothing could be measured: {next(iter(self._failures.values()))}", "UNKNOWN")

    def _request(self, route: Route, *, is_warm_up: bool) -> None:
        if route in self._failures:
            return
        try:
            self._run(route)
        except MicrotomeError as error:
            if isinstance(error, RemoteError) and error.kind in ("UNREACHABLE", "REFUSED"):
                raise
            self._failures[route] = str(error)
        else:
            if not is_warm_up:
                self._records[route].append(self._remotes[route].requests[-1])

    def _run(self, route: Route, repeat: int = 1) -> None:
        for _ in range(repeat):
            self._remotes[route](*self._inputs.args, **self._inputs.kwargs)

    def measure_energy(self, progress: Progress) -> tuple[dict[Route, float], str]:
        """Return the joules of this device per request along each route, and the meter; or why there is none."""
        routes = [route for route in self._remotes if route not in self._failures]
        joules: dict[Route, float] = {}
        try:
            with pick(None, accelerators_in((self._inputs.args, self._inputs.kwargs))) as meter:
                for index, route in enumerate(routes):
                    progress("energy", index, len(routes))
                    parts = metered(meter, partial(self._run, route), seconds=_ENERGY_S, parts=3)
                    joules[route] = sum(part.joules for part in parts) / sum(part.runs for part in parts)
                return joules, f"{meter.what}, requests one after the other"
        except SensorFailed as error:
            return joules, str(error)

    def rows(self) -> Iterator[tuple[Route, CutTiming]]:
        for route, records in self._records.items():
            failure = self._failures.get(route)
            yield (
                route,
                _summarize(route, records) if failure is None else CutTiming(route.at, route.codec, failed=failure),
            )


def _summarize(route: Route, records: Sequence[RequestRecord]) -> CutTiming:
    def middle(*fields: str) -> float:
        return median(sum(getattr(record, field) for field in fields) for record in records)

    total = [record.total_s for record in records]
    q1, _, q3 = quantiles(total, method="inclusive") if len(total) > 1 else total * 3
    is_here = route.at is None  # the whole model is then in `tail_s`
    return CutTiming(
        at=route.at,
        codec=route.codec,
        head_s=middle("head_s", "tail_s") if is_here else middle("head_s"),
        encode_s=middle("encode_s"),
        wire_s=middle("wire_s"),
        queue_s=middle("queue_s"),
        tail_s=0.0 if is_here else middle("tail_s"),
        codec_there_s=middle("server_decode_s", "server_encode_s"),
        decode_s=middle("decode_s"),
        total_s=median(total),
        total_q1_s=q1,
        total_q3_s=q3,
        sent_bytes=round(middle("sent_bytes")),
        received_bytes=round(middle("received_bytes")),
    )


def _plan(
    splitter: Splitter, chosen: Sequence[Cut], connection: Connection, link: LinkMeasurement, codec: str
) -> tuple[dict[Route, float], str]:
    """Return the planned latency of each route; or none, and why there is no plan."""
    cuts = replace(splitter.cuts, offered=tuple(chosen))
    try:
        plan = measure_devices(splitter, cuts, connection, (codec,), repeat=10).plan(cuts, link.link, (codec,))
    except (RemoteError, BadFile, BadQuery, NoMatch, Unsupported) as error:
        return {}, str(error)
    return {route_of(candidate): candidate.latency_s for candidate in plan if candidate.refused is None}, ""
