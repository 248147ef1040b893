"""How the time of a trace, a profile and the list of cuts grows with the depth and the width of a model.

The exponent is the slope of a line through the logarithms of size and processor time: 1 is linear growth. The fixed
part of a call, which would lower it, is taken off: the time of a model of size 1.

At the cut after the nth of several layers whose outputs the enclosing module adds, n outputs cross, since both sides
run its code: a table of these cuts has n²/2 entries, so that its time is compared with their number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from time import process_time

import torch
from torch import Tensor, nn

import microtome as mt
from benchmarks.report import Target

DEPTHS = (10, 30, 100, 300, 1000)
WIDTHS = (10, 30, 100, 300, 1000)


class Block(nn.Module):
    """A residual block, so that cuts inside it have two values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.relu(self.linear(x))


class Parallel(nn.Module):
    """Branches that take the same input, and whose outputs are added one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(width))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for branch in self.branches:
            total = total + branch(x)
        return total


def chain(depth: int) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(depth))).eval()


VERBS: dict[str, Callable[[nn.Module, Tensor], object]] = {"trace": mt.trace, "profile": mt.profile, "cuts": mt.cuts}


def least(run: Callable[[], object], rounds: int) -> float:
    """The least processor time of several runs, after a warm-up."""
    times = []
    for _ in range(rounds + 1):
        begin = process_time()
        run()
        times.append(process_time() - begin)
    return min(times[1:])


def exponent(sizes: tuple[int, ...], times: list[float]) -> float:
    """The slope of a line through the logarithms."""
    line = statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, times)])
    return line.slope


def growth(
    name: str, build: Callable[[int], nn.Module], sizes: tuple[int, ...], *, by_entries: bool = False
) -> list[Target]:
    """Fit an exponent for each verb.

    Args:
        by_entries: Compare the time of the list of cuts with the number of values that cross them.
    """
    x = torch.randn(2, 8)
    smallest, models = build(1), {size: build(size) for size in sizes}
    targets = []
    for verb, run in VERBS.items():
        fixed = least(partial(run, smallest, x), 15)
        taken = [least(partial(run, models[size], x), 5 if size < 300 else 3) for size in sizes]
        shown = ", ".join(f"{size}: {1e3 * seconds:.0f}" for size, seconds in zip(sizes, taken, strict=True))
        note = f"{verb}, {name}, milliseconds: 1: {1e3 * fixed:.1f}, {shown}"
        label, xs = f"{verb}, {name} {sizes[0]} to {sizes[-1]:,}: exponent", sizes
        if verb == "cuts" and by_entries:
            xs = tuple(sum(len(cut.live) for cut in mt.cuts(models[size], x)) for size in sizes)
            label += " of the time by values that cross"
            note += f"; values: {', '.join(map(str, xs))}"
        slope = exponent(xs, [seconds - fixed for seconds in taken])
        targets.append(Target(label, slope, 1.1, note=note))
    return targets


def large() -> Target:
    """Use a model of 2,000 blocks, 6,001 modules."""
    model, x = chain(2000), torch.randn(2, 8)
    uses: dict[str, Callable[[], object]] = {verb: partial(run, model, x) for verb, run in VERBS.items()}
    uses |= {"extract": lambda: mt.extract(model, x, "1500"), "split": lambda: mt.split(model, x, at="1000.relu")}
    times = {verb: least(run, 1) for verb, run in uses.items()}
    shown = ", ".join(f"{verb} {seconds:.2f} s" for verb, seconds in times.items())
    return Target(
        "2,000 residual blocks: the slowest of these, s", max(times.values()), 10, note=f"2,000 blocks: {shown}"
    )


@torch.no_grad()
def run() -> list[Target]:
    torch.set_num_threads(1)
    return [
        *growth("residual blocks", chain, DEPTHS),
        *growth("parallel layers", Parallel, WIDTHS, by_entries=True),
        large(),
    ]
