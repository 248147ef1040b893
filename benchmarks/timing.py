"""Timing for comparisons: contestants take turns, so that a slow moment of the machine falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager


def interleave(
    work: Callable[[], object], contestants: Mapping[str, Callable[[], AbstractContextManager[object]]], rounds: int
) -> dict[str, float]:
    """Seconds that the work takes inside each contestant's context: the median over the rounds, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, context in contestants.items():
            with context():
                work()  # the first pass in a fresh context is not what is compared
                start = time.perf_counter()
                work()
                if round_:
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def lower_quartile(times: list[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


def take_turns(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    of: Callable[[list[float]], float] = lower_quartile,
) -> dict[str, float]:
    """Seconds of each over the rounds, after a warm-up.

    Args:
        of: What is taken of the rounds: low, since noise only adds and others may have the machine.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: of(taken) for name, taken in times.items()}
