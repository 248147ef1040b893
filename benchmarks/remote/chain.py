"""A chain of three processes: the rate of a stream compared with its slowest stage, and the latency that a hop adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import Any

import microtome as mt
from benchmarks.remote.models import build
from benchmarks.remote.network import LOOPBACK, Network
from benchmarks.remote.pipeline import interval
from benchmarks.remote.processes import job, microtome
from benchmarks.report import Target
from benchmarks.timing import lower_quartile

MODEL, INPUTS = "torchvision:resnet50", "1x3x224x224"
#: The stage in the middle takes more than half of the time, so that two cores suffice for three processes.
CUTS = ("layer1.0", "layer4.0")
#: Cuts where the same number of bytes crosses.
EQUAL_CUTS = ("layer3.0", "layer3.4")


def measure(routes: dict[str, tuple[list[str], list[str]]], streams: list[str], rounds: int) -> dict[str, Any]:
    """Measure some routes, given by their servers and cuts.

    Returns:
        For each route: the seconds of each stage, those of its process to decode and encode (`codec`), and those that a
        single request takes beside the stages (`added`); for the routes to be streamed over, those from result to
        result (`interval`).
    """
    found = build(MODEL, INPUTS)
    (x,) = found.inputs.args
    seen: dict[str, dict[str, list[float]]] = {name: {} for name in routes}
    with ExitStack() as stack:
        remotes = {}
        for name, (servers, cuts) in routes.items():
            remote = mt.connect(found.model, found.inputs, servers=servers, at=cuts, codec="raw")
            remotes[name] = stack.enter_context(remote)
            remote(x)
        for _ in range(rounds):
            for _ in range(6):
                for name, remote in remotes.items():
                    remote(x)
                    sent = remote.requests[-1]
                    runs = [hop.run_s for hop in sent.hops] or [sent.tail_s]
                    codecs = [hop.decode_s + hop.encode_s for hop in sent.hops]
                    codecs = codecs or [sent.server_decode_s + sent.server_encode_s]
                    stages = {f"stage {index}": spent for index, spent in enumerate([sent.head_s, *runs])}
                    codec = {f"codec {index}": spent for index, spent in enumerate([sent.encode_s, *codecs])}
                    added_s = sent.total_s - sent.head_s - sum(runs)
                    for what, spent in {**stages, **codec, "added": added_s}.items():
                        seen[name].setdefault(what, []).append(spent)
            for name in streams:
                seen[name].setdefault("interval", []).append(interval(remotes[name].stream(repeat(x, 20))))
    return {name: {what: lower_quartile(spent) for what, spent in each.items()} for name, each in seen.items()}


def measure_routes(
    cuts: Mapping[str, Sequence[str]], rounds: int, *, single: Sequence[str] = (), streams: Sequence[str] | None = None
) -> dict[str, dict[str, float]]:
    """Measure, with three processes: two servers at each of these pairs of cuts, by the client and forwarded.

    Args:
        single: Cuts at which one server is measured, too.
        streams: The names of the pairs to stream over; None: all.
    """
    with (
        microtome(LOOPBACK, MODEL, INPUTS) as first,
        microtome(LOOPBACK, MODEL, INPUTS) as second,
        microtome(LOOPBACK, MODEL, INPUTS, "--forward", second) as forwards,
    ):
        routes: dict[str, Any] = {_one_server(at): ([second], [at]) for at in single}
        streamed = []
        for name, pair in cuts.items():
            both = {name: ([first, second], list(pair)), f"{name}, forwarded": ([forwards, second], list(pair))}
            routes |= both
            streamed += list(both) if streams is None or name in streams else []
        options = {"routes": routes, "streams": streamed, "rounds": rounds}
        result: dict[str, dict[str, float]] = job(LOOPBACK, "benchmarks.remote.chain:measure", options)
        return result


def _one_server(at: str) -> str:
    return f"one server at {at}"


def run(network: Network) -> list[Target]:
    pairs = {"two servers": CUTS, "two servers, equal bytes": EQUAL_CUTS}
    cuts = [*CUTS, *EQUAL_CUTS]
    routes = measure_routes(pairs, rounds=5, single=cuts, streams=["two servers"])
    return [
        target
        for name, pair in pairs.items()
        for route in (name, f"{name}, forwarded")
        for target in _targets(route, pair, routes)
    ]


def _targets(route: str, cuts: Sequence[str], routes: Mapping[str, Mapping[str, float]]) -> Iterator[Target]:
    seconds, (first, second) = routes[route], cuts
    if "interval" in seconds:
        slowest = max(spent for what, spent in seconds.items() if what.startswith("stage"))
        name = f"resnet50 over {route}: time from result to result / slowest stage"
        yield Target(name, seconds["interval"] / slowest, 1 / 0.85)
    alone = {at: routes[_one_server(at)]["added"] for at in cuts}
    listed = ", ".join(f"{what} {1e3 * spent:.2f}" for what, spent in seconds.items())
    added = ", ".join(f"{1e3 * spent:.2f} at {at}" for at, spent in alone.items())
    yield Target(
        f"resnet50 over {route}: latency of the second hop / of one server at the same cut",
        (seconds["added"] - alone[first]) / alone[second],
        1.0,
        note=f"resnet50 at {' and '.join(cuts)} over {route}, milliseconds: {listed}; one server adds {added}",
    )
