"""The energy of work that is done again and again, for long against the period of the sensor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter, sleep

from microtome.devices.meters.base import Log, Meter
from microtome.devices.meters.window import Window
from microtome.errors import SensorFailed

#: How often a counter is looked at, for when it moves.
_LOOK_S = 0.005
#: How long the work goes on between two looks at the clock.
_CHUNK_S = 0.02
#: How long the lines of an external meter may come late.
_LATE_S = 5.0
#: A counter that has not moved enough in so many times the wished seconds stands still.
_PATIENCE = 5


@dataclass(frozen=True, slots=True)
class RepeatedWork:
    """A part of the time: how often the work was done in it, and what was counted."""

    runs: float
    seconds: float
    joules: float


def metered(meter: Meter, work: Callable[[int], object], *, seconds: float, parts: int = 5) -> list[RepeatedWork]:
    """Do work for so many seconds without a pause, and say what each of several parts of that time took.

    The parts begin and end where a counter moves, and the sensor is read by a thread of its own, so that the work does
    not wait for it.

    Args:
        work: Does the work so many times, and returns when all of it is done, on devices too.

    Raises:
        SensorFailed: It could not be read, or did not move.
    """
    chunk = _chunk(work)
    done: list[tuple[float, float]] = []
    every_s = {"counter": _LOOK_S, "power": meter.every_s or _CHUNK_S, "log": None}[meter.kind]
    with Window(meter, every_s) as window:
        began = perf_counter()
        done.append((began, 0.0))
        while not window.reason:
            work(chunk)
            now = perf_counter()
            done.append((now, done[-1][1] + chunk))
            enough = isinstance(meter, Log) or sum(time >= began for time, _ in window.points) > parts
            if now - began >= seconds * (1 if enough else _PATIENCE):
                break
    if window.reason:
        raise SensorFailed(window.reason)
    cuts = _cuts(meter, window.points, (began, done[-1][0]), parts)
    if len(cuts) < parts + 1:
        raise SensorFailed(
            f"{meter.what} moved {len(window.points)} times within {done[-1][0] - began:.3g} s, too few to tell"
        )
    return [
        RepeatedWork(_at(done, end) - _at(done, start), end - start, joules)
        for (start, end), joules in zip(pairwise(cuts), _joules(meter, window.points, cuts), strict=True)
    ]


def _chunk(work: Callable[[int], object]) -> int:
    """How often the work is done in a fiftieth of a second."""
    work(1)  # what the first does more
    began, count = perf_counter(), 1
    work(1)
    while (took := perf_counter() - began) < _CHUNK_S / 4 and count < 1_000_000:
        count *= 2
        began = perf_counter()
        work(count)
    return max(round(count * _CHUNK_S / took), 1)


def _cuts(meter: Meter, points: Sequence[tuple[float, float]], whole: tuple[float, float], parts: int) -> list[float]:
    """Where the parts begin and end: the times of readings nearest to equal parts."""
    if isinstance(meter, Log):
        start, end = whole
        return [start + (end - start) * at / parts for at in range(parts + 1)]
    times = [time for time, _ in points if whole[0] <= time <= whole[1]]
    if len(times) <= parts:
        return []
    return [times[(len(times) - 1) * at // parts] for at in range(parts + 1)]


def _joules(meter: Meter, points: Sequence[tuple[float, float]], cuts: Sequence[float]) -> list[float]:
    if isinstance(meter, Log):
        return [_between(meter, start, end) for start, end in pairwise(cuts)]
    return [_at(points, end) - _at(points, start) for start, end in pairwise(cuts)]


def _between(meter: Log, start: float, end: float) -> float:
    """What the log says, once it has been written so far."""
    until = perf_counter() + _LATE_S
    while True:
        try:
            return meter.between(start, end)
        except SensorFailed:
            if perf_counter() > until or meter.read().time_s >= end:
                raise
            sleep(_CHUNK_S)


def _at(points: Sequence[tuple[float, float]], time: float) -> float:
    """The value at a time, on the line between the points around it."""
    index = min(max(bisect_left(points, time, key=lambda point: point[0]), 1), len(points) - 1)
    (t0, v0), (t1, v1) = points[index - 1], points[index]
    return v0 if t1 == t0 else v0 + (v1 - v0) * (time - t0) / (t1 - t0)
