"""Timing for comparisons: contestants take turns, so that a slow phase of the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager


def interleave(
    work: Callable[[], object], contestants: Mapping[str, Callable[[], AbstractContextManager[object]]], rounds: int
) -> dict[str, float]:
    """Return the median time of the work inside each contestant's context, in seconds, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, context in contestants.items():
            with context():
                work()  # the first pass in a fresh context is not measured
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
    after: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Run contestants in turns and return the time of each in seconds, after a warm-up.

    Args:
        clock: With one thread, processor time is less noisy on a machine that others use.
        of: The statistic over the rounds; low by default, since noise only adds.
        after: Called after each run, untimed.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, run in contestants.items():
            start = clock()
            run()
            seconds = clock() - start
            after()
            if round_:
                times[name].append(seconds)
    return {name: of(taken) for name, taken in times.items()}
