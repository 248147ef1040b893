"""Throughput of a stream of requests compared with its slowest step, at the cut where that is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from time import perf_counter
from typing import Any

import torch

import microtome as mt
from benchmarks.remote.models import build
from benchmarks.remote.network import LOOPBACK, Host, Network
from benchmarks.remote.peers import Plain
from benchmarks.remote.processes import job, microtome, peers
from benchmarks.report import Target
from benchmarks.timing import lower_quartile

MODEL, INPUTS = "torchvision:resnet50", "1x3x224x224"
CUTS = ("maxpool", "layer2", "layer3.0", "layer3.1", "layer3.2", "layer3.3", "layer3", "layer4.0", "layer4")


class Steps:
    """The time of each step of a request at one cut, in seconds, when no other step runs."""

    def __init__(self, remote: Any, socket: Plain, x: torch.Tensor) -> None:
        self.remote, self._socket, self._x = remote, socket, x
        self._seen: dict[str, list[float]] = {"head": [], "wire": [], "tail": []}
        remote(x)  # the server builds the tail

    def measure(self, times: int) -> None:
        for _ in range(times):
            self.remote(self._x)
            sent = self.remote.requests[-1]
            start = perf_counter()
            self._socket.exchange(bytes(sent.sent_bytes), sent.received_bytes)
            self._seen["wire"].append(perf_counter() - start)
            self._seen["head"].append(sent.head_s)
            self._seen["tail"].append(sent.tail_s)

    @property
    def seconds(self) -> dict[str, float]:
        return {name: lower_quartile(seen) for name, seen in self._seen.items()}


def measure(server: str, plain: str, rounds: int, count: int) -> dict[str, Any]:
    found, socket = build(MODEL, INPUTS), Plain(plain)
    (x,) = found.inputs.args
    remotes = [mt.connect(found.model, found.inputs, server, at=at, codec="raw") for at in CUTS]
    steps = [Steps(remote, socket, x) for remote in remotes]
    for one in steps:
        one.measure(3)
    best = min(steps, key=lambda one: max(one.seconds.values()))
    between, beside = [], []
    for _ in range(rounds):
        best.measure(4)
        between.append(interval(best.remote.stream(repeat(x, count))))
        beside += list(best.remote.requests)[-count // 2 :]
    for remote in remotes:
        remote.close()
    streaming = {
        "head": lower_quartile([sent.head_s for sent in beside]),
        "tail": lower_quartile([sent.tail_s for sent in beside]),
    }
    return {"at": best.remote.at, "steps": best.seconds, "streaming": streaming, "each": lower_quartile(between)}


def interval(results: Iterator[Any]) -> float:
    """Return the seconds between results, without the latency of the first."""
    next(results)
    start = perf_counter()
    count = sum(1 for _ in results)
    return (perf_counter() - start) / count


def run(network: Network) -> list[Target]:
    network.limit(1e8)
    places = {"loopback": (LOOPBACK, LOOPBACK), "100 Mbit/s": (network.edge, network.cloud)}
    return [_target(link, edge, cloud) for link, (edge, cloud) in places.items()]


def _target(link: str, edge: Host, cloud: Host) -> Target:
    with microtome(cloud, MODEL, INPUTS) as server, peers(cloud) as (_, plain):
        got = job(
            edge, "benchmarks.remote.pipeline:measure", {"server": server, "plain": plain, "rounds": 5, "count": 25}
        )
    listed = {
        what: ", ".join(f"{name} {1e3 * spent:.1f}" for name, spent in got[what].items())
        for what in ("steps", "streaming")
    }
    slowest = max(got["steps"].values())
    note = (
        f"{link}: resnet50 at {got['at']}, milliseconds: {listed['steps']}, each alone; {1e3 * got['each']:.1f} from "
        f"result to result, where {listed['streaming']}"
    )
    return Target(
        f"{link}: time from result to result / slowest of head, wire and tail",
        got["each"] / slowest,
        1 / 0.85,
        note=note,
    )
