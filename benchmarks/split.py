"""Overhead of splitting: head and tail compared with the plain forward, and listing cuts compared with a trace.

All in processor time of one thread, the least of several rounds.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from time import process_time

import torch
from torch import nn

import microtome as mt
from benchmarks.report import Target
from benchmarks.timing import take_turns
from microtome import zoo
from microtome.split.splitter import Splitter

MODELS = {"resnet50": "1x3x224x224", "vit_b_16": "1x3x224x224"}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(zoo.import_torchvision().models, name)(weights=None)
    return model.eval()


class Counter:
    """Counts the forwards of modules with plain hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[str] = []
        self._handles = [
            module.register_forward_pre_hook(lambda _, __, path=path: self.seen.append(path))
            for path, module in model.named_modules()
        ]

    def stop(self) -> list[str]:
        for handle in self._handles:
            handle.remove()
        return self.seen


def stages(name: str) -> list[Target]:
    model, x = build(name), torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        splitter = Splitter(model, x)
        ratios, notes, again = [], [], 0
        for cut in splitter.cuts[::5]:
            both = splitter.at(cut)
            head, tail = both
            took = take_turns({"plain": partial(model, x), "split": partial(both, x)}, 9, min, clock=process_time)
            ratios.append(took["split"] / took["plain"])
            notes.append(f"{cut.at} {ratios[-1]:.3f}")
            boundary = head(x)
            counter = Counter(model)
            tail(boundary)
            done = {step.path for step in tail.begins.skipped} if tail.begins else set()
            again += len(done & set(counter.stop()) - _run_later(splitter, cut.index))
    worst = max(zip(ratios, notes, strict=True))
    return [
        Target(f"{name}: head + tail / plain, median of {len(ratios)} cuts", median(ratios), 1.03),
        Target(f"{name}: head + tail / plain, the worst cut", worst[0], 1.05, note=f"{name}: worst is {worst[1]}"),
        Target(f"{name}: skipped modules that run in the tail", again, 0),
    ]


def _run_later(splitter: Splitter, index: int) -> set[str]:
    """Return the paths of modules that run again after a cut."""
    return {cut.at.partition("#")[0] for cut in splitter.cuts if cut.index > index}


def listing() -> list[Target]:
    model, x = build("resnet50"), torch.randn(1, 3, 224, 224)
    took = take_turns(
        {"trace": lambda: mt.trace(model, x), "cuts": lambda: mt.cuts(model, x)}, 15, min, clock=process_time
    )
    note = f"resnet50: trace {1e3 * took['trace']:.0f} ms, cuts {1e3 * took['cuts']:.0f} ms"
    floor = "beside the trace, cuts record the structure and the attributes of each call, and price 182 cuts"
    return [Target("resnet50: all cuts / a trace", took["cuts"] / took["trace"], 1.3, note=note, floor=floor)]


def run() -> list[Target]:
    torch.set_num_threads(1)
    return [*listing(), *(target for name in MODELS for target in stages(name))]
