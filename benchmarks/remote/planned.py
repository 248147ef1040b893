"""The cut that `at="auto"` finds, compared with the measured best, at bandwidths from 1 to 1000 Mbit/s."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import microtome as mt
from benchmarks.remote.models import build
from benchmarks.remote.network import Network
from benchmarks.remote.processes import job, microtome
from benchmarks.report import Target
from benchmarks.timing import lower_quartile
from microtome.remote.client import Remote
from microtome.remote.request import Route

MODELS, INPUTS = ("resnet50", "vit_b_16"), "1x3x224x224"
MBITS = (1, 10, 100, 1000)
EDGE_ONLY, CLOUD_ONLY = "edge only", "cloud only"
#: Cuts to measure in addition to the dominating ones.
OTHERS = {"resnet50": ("layer1", "layer2", "layer3"), "vit_b_16": ("encoder.layers.encoder_layer_5", "encoder")}
#: After this many rounds, cuts slower than the best by this factor are dropped.
TRIALS, HOPELESS = 3, 1.25


class Contest:
    """Routes, measured in turns.

    Cuts whose bytes alone take longer on the link than the best request are skipped: some would take minutes.
    """

    def __init__(self, ways: dict[str, Remote], wire_s: dict[str, float], x: Any) -> None:
        self._ways, self._wire_s, self._x = ways, wire_s, x
        self.times: dict[str, list[float]] = {name: [] for name in ways}
        self.skipped: list[str] = []

    def run(self, rounds: int, always: set[str]) -> dict[str, float]:
        for name in sorted(self._ways, key=lambda name: self._wire_s[name]):
            least = min((min(times) for times in self.times.values() if times), default=float("inf"))
            if self._wire_s[name] > least:
                self.skipped.append(name)
            else:
                self._turn(name)  # the server builds the tail
                self._turn(name)
                del self.times[name][0]
        able = [name for name in self._ways if name not in self.skipped]
        for round_ in range(rounds):
            if round_ == TRIALS:
                least = min(min(self.times[name]) for name in able)
                able = [name for name in able if name in always or min(self.times[name]) < HOPELESS * least]
            for name in able:
                self._turn(name)
        return {name: lower_quartile(times) for name, times in self.times.items() if name not in self.skipped}

    def _turn(self, name: str) -> None:
        start = perf_counter()
        self._ways[name](self._x)
        self.times[name].append(perf_counter() - start)


def measure(server: str, model: str, mbits: float, rounds: int) -> dict[str, Any]:
    found = build(f"torchvision:{model}", INPUTS)
    with mt.connect(found.model, found.inputs, server, at="auto", codec="raw") as auto:
        cuts = mt.cuts(found.model, found.inputs)
        planned = _name(auto.at)
        addresses = {EDGE_ONLY: None, CLOUD_ONLY: "", planned: auto.at}
        addresses |= {cut.at: cut.at for cut in cuts if cut.dominates or cut.at in OTHERS[model]}
        nbytes = {cut.at: cut.nbytes for cut in cuts} | {EDGE_ONLY: 0, CLOUD_ONLY: cuts.input_bytes}
        ways = {name: Remote(auto._local, auto._chain, Route(at, "raw")) for name, at in addresses.items()}
        contest = Contest(ways, {name: nbytes[name] * 8e-6 / mbits for name in ways}, found.inputs.args[0])
        took = contest.run(rounds, {planned, EDGE_ONLY, CLOUD_ONLY})
        assert auto.plan is not None
        said = auto.plan.winner.latency_s
    return {"planned": planned, "took": took, "skipped": contest.skipped, "said": said}


def _name(at: str | None) -> str:
    return EDGE_ONLY if at is None else at or CLOUD_ONLY


def run(network: Network) -> list[Target]:
    return [target for model in MODELS for target in _targets(network, model)]


def _targets(network: Network, model: str) -> list[Target]:
    targets = []
    with microtome(network.cloud, f"torchvision:{model}", INPUTS, threads=2) as server:
        for mbits in MBITS:
            network.limit(mbits * 1e6)
            given = {"server": server, "model": model, "mbits": mbits, "rounds": 12}
            got = job(network.edge, "benchmarks.remote.planned:measure", given)
            took, planned = got["took"], got["planned"]
            mine, best = took[planned], min(took, key=lambda name: took[name])
            whole = min(took[name] for name in (EDGE_ONLY, CLOUD_ONLY) if name in took)
            listed = ", ".join(
                f"{name} {1e3 * took[name]:.1f}" for name in sorted(took, key=lambda name: took[name])[:6]
            )
            skipped = f"; {len(got['skipped'])} cannot be as quick for their bytes alone" if got["skipped"] else ""
            said = f"planned {planned}, {1e3 * got['said']:.1f}"
            note = f"{model} at {mbits} Mbit/s, milliseconds: {listed}{skipped}; {said}"
            targets += [
                Target(f"{model}, {mbits} Mbit/s: planned / best measured ({best})", mine / took[best], 1.1, note=note),
                Target(f"{model}, {mbits} Mbit/s: planned / better of edge only and cloud only", mine / whole, 1.05),
            ]
    return targets
