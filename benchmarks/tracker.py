"""The cost of tracking per module call, compared with torch's ModuleTracker and an empty pair of hooks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

import microtome as mt
from benchmarks.report import Target
from benchmarks.timing import interleave

MODULES = 2_000


class Forward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Both(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


@contextmanager
def empty_hooks(model: nn.Sequential) -> Iterator[None]:
    handles = [m.register_forward_pre_hook(lambda *_: None) for m in model]
    handles += [m.register_forward_hook(lambda *_: None) for m in model]
    yield
    for handle in handles:
        handle.remove()


def microseconds(work: Any, contestants: Any, rounds: int) -> dict[str, float]:
    """Return the added time per module call."""
    times = interleave(work, {"plain": nullcontext, **contestants}, rounds)
    return {name: (value - times["plain"]) / MODULES * 1e6 for name, value in times.items()}


def ignore(call: mt.Call, phase: str) -> None:
    pass


def run() -> list[Target]:
    torch.set_num_threads(1)
    chain = nn.Sequential(*(Forward() for _ in range(MODULES)))
    x = torch.ones(1)
    other = nn.ReLU()
    forward = microseconds(
        torch.no_grad()(lambda: chain(x)),
        {
            "empty hook pair": partial(empty_hooks, chain),
            "ModuleTracker": ModuleTracker,
            "mt.track": lambda: mt.track(chain),
            "mt.track, whole process": mt.track,
            "mt.track of another model": lambda: mt.track(other),
        },
        rounds=15,
    )
    graph = nn.Sequential(*(Both() for _ in range(MODULES)))
    leaf = torch.ones(1, requires_grad=True)
    both = microseconds(
        lambda: graph(leaf).sum().backward(),
        {
            "ModuleTracker": ModuleTracker,
            "mt.track": lambda: mt.track(graph),
            "mt.track with callbacks": lambda: mt.track(graph, on_enter=ignore),
        },
        rounds=9,
    )
    tracked, watched = forward["mt.track"], both["mt.track"]
    return [
        Target("forward, mt.track / ModuleTracker", tracked / forward["ModuleTracker"], 1 / 4, forward),
        Target("forward, mt.track / empty hook pair", tracked / forward["empty hook pair"], 2.5, forward),
        Target(
            "forward, mt.track() / ModuleTracker",
            forward["mt.track, whole process"] / forward["ModuleTracker"],
            1 / 4,
            {},
        ),
        Target("forward + backward, mt.track / ModuleTracker", watched / both["ModuleTracker"], 1 / 15, both),
        Target("the last 3,000 of 10,000 steps in one `with` / steps 501 to 3,500", flatness(), 1.1, {}),
    ]


def flatness() -> float:
    """Return the time of the last of 10,000 steps divided by that of the first, after a warm-up."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    x = torch.ones(1, 4)
    blocks = []
    with mt.track(model):
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(500):
                model(x).sum().backward()
            blocks.append(time.perf_counter() - start)
    return min(blocks[-6:]) / min(blocks[1:7])
