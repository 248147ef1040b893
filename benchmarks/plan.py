"""The time of planning, and the accuracy of planned times of heads, compared with runs that stop there."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

import microtome as mt
from benchmarks.report import Target
from benchmarks.trace import torchvision_model
from microtome.plan.codec_benchmark import codec_costs
from microtome.split.cuts.cuts import cuts as find_cuts

CODECS = ("raw", "zstd")


@torch.no_grad()
def run() -> list[Target]:
    torch.set_num_threads(1)
    return [*planning(), *heads()]


def planning() -> list[Target]:
    """Plan a model of 500 calls on two devices and on three."""
    model, x = torchvision_model("resnet152"), torch.randn(1, 3, 224, 224)
    cuts = find_cuts(model, x)
    profile = mt.profile(model, x, measure="time", repeat=3, budget_s=1)
    link, costs = mt.Link("20Mbps", rtt="15ms"), codec_costs(cuts, CODECS)
    two: dict[str, Any] = {"edge": profile, "cloud": profile, "link": link, "costs": costs}
    three: dict[str, Any] = {"devices": [profile] * 3, "links": [link] * 2, "costs": costs}
    targets = []
    for name, options in {
        "2 devices": two,
        "2 devices, raw and zstd": {**two, "codec": CODECS},
        "3 devices": three,
        "3 devices, raw and zstd": {**three, "codec": CODECS},
        "3 devices, throughput": {**three, "objective": "throughput"},
    }.items():
        times = []
        for _ in range(7):
            began = perf_counter()
            plan = mt.plan(cuts, **options)
            times.append(perf_counter() - began)
        note = f"{name}: {len(profile)} calls, {len(cuts)} cuts, {len(plan)} candidates"
        targets.append(Target(f"resnet152, {name}: a plan, ms, the least of 7", 1e3 * min(times), 300, note=note))
    plan = mt.plan(cuts, **two)
    began = perf_counter()
    spans = plan.over_bandwidths()
    note = f"{len(spans)} cuts win at one bandwidth or another"
    targets.append(Target("resnet152: over_bandwidths, ms", 1e3 * (perf_counter() - began), 300, note=note))
    return targets


class _Reached(BaseException):
    """The end of the head."""


def heads() -> list[Target]:
    """Compare the planned fraction of the run up to every 30th call with that of runs that stop there.

    Runs that stop and complete runs take turns, so that drift of the machine affects both.
    """
    targets = []
    for name in ("resnet50", "vit_b_16"):
        model, x = torchvision_model(name), torch.randn(1, 3, 224, 224)
        addresses = [cut.at for cut in find_cuts(model, x)][10::30]
        profile = mt.profile(model, x, measure="time", repeat=15, budget_s=20)
        whole, ends = profile.total.elapsed_s or 1.0, {row.address: row.elapsed_s or 0.0 for row in profile}
        off, off_by_sums = [], []
        for address in addresses:
            real = median(stopped(model, x, address) / stopped(model, x, "") for _ in range(7))
            off.append(abs(ends[address] / whole - real))
            off_by_sums.append(abs(sum_until(profile, ends[address]) / whole - real))
        note = (
            f"{name}: {len(addresses)} heads, at most off by {max(off):.3f}; layer by layer {median(off_by_sums):.3f}"
        )
        planned = f"{name}: planned part of the time that a head takes, off that of a run by"
        targets.append(Target(planned, median(off), 0.02, note=note))
    return targets


def stopped(model: nn.Module, x: torch.Tensor, address: str) -> float:
    """Time a run up to the end of a call, with one hook of torch and without microtome."""
    path, _, index = address.partition("#")
    left = [int(index or 0)]

    def stop(*_: object) -> None:
        if not left[0]:
            raise _Reached
        left[0] -= 1

    handle = model.get_submodule(path).register_forward_hook(stop)
    began = perf_counter()
    try:
        model(x)
    except _Reached:
        return perf_counter() - began
    finally:
        handle.remove()
    raise AssertionError(f"{address} was not reached")


def sum_until(profile: mt.Profile, end: float) -> float:
    """Add up the times of the layers that have ended by then."""
    return sum(row.time_s or 0.0 for row in profile if row.height == 1 and (row.elapsed_s or 0.0) <= end)
