"""A chain of three processes: the rate of a stream compared with its slowest stage, and the latency that a hop adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def measure_routes(cuts: Mapping[str, Sequence[str]], rounds: int) -> dict[str, dict[str, float]]:
    """Measure, with three processes: one server, and two servers at each of these pairs of cuts, also forwarded."""
    with (
        microtome(LOOPBACK, MODEL, INPUTS) as first,
        microtome(LOOPBACK, MODEL, INPUTS) as second,
        microtome(LOOPBACK, MODEL, INPUTS, "--forward", second) as forwards,
    ):
        routes: dict[str, Any] = {"one server": ([first], list(CUTS[:1]))}
        for name, pair in cuts.items():
            routes[name] = [first, second], list(pair)
            routes[f"{name}, forwarded"] = [forwards, second], list(pair)
        options = {"routes": routes, "streams": list(routes), "rounds": rounds}
        result: dict[str, dict[str, float]] = job(LOOPBACK, "benchmarks.remote.chain:measure", options)
        return result


def run(network: Network) -> list[Target]:
    routes = measure_routes({"two servers": CUTS}, rounds=5)
    first = routes["one server"]["added"]
    targets = []
    for name in list(routes)[1:]:
        seconds = routes[name]
        slowest = max(spent for what, spent in seconds.items() if what.startswith("stage"))
        listed = ", ".join(f"{what} {1e3 * spent:.2f}" for what, spent in seconds.items())
        targets += [
            Target(
                f"resnet50 over {name}: time from result to result / slowest stage",
                seconds["interval"] / slowest,
                1 / 0.85,
                note=f"resnet50 at {' and '.join(CUTS)} over {name}, milliseconds: {listed}",
            ),
            Target(
                f"resnet50 over {name}: latency of the second hop / of the first", seconds["added"] / first - 1, 1.0
            ),
        ]
    return targets
