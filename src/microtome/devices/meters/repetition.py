"""Measure the energy of repeated work, for much longer than the period of the sensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter, sleep

from microtome.devices.meters.base import Log, Meter, interpolate
from microtome.devices.meters.window import Window
from microtome.errors import SensorFailed

#: The period of polling a counter for changes.
_POLL_S = 0.005
#: The duration of work between two readings of the clock.
_CHUNK_S = 0.02
#: The maximum delay of an external meter's lines.
_MAX_DELAY_S = 5.0
#: The multiple of the requested time after which a counter without enough changes is considered stopped.
_PATIENCE = 5


@dataclass(frozen=True, slots=True)
class RepeatedWork:
    """A part of the measured time: its number of runs, duration and energy."""

    runs: float
    seconds: float
    joules: float


def metered(meter: Meter, work: Callable[[int], object], *, seconds: float, parts: int = 5) -> list[RepeatedWork]:
    """Repeat work for some seconds without a pause, and measure the energy of several parts of that time.

    Parts begin and end at changes of a counter, and the sensor is read by a background thread, so that the work does
    not wait for it.

    Args:
        work: Runs the work a number of times, and returns when it is complete, on devices too.

    Raises:
        SensorFailed: It could not be read, or did not move.
    """
    chunk = _chunk(work)
    done: list[tuple[float, float]] = []
    every_s = {"counter": _POLL_S, "power": meter.every_s or _CHUNK_S, "log": None}[meter.kind]
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
    edges = _part_edges(meter, window.points, (began, done[-1][0]), parts)
    if len(edges) < parts + 1:
        raise SensorFailed(
            f"{meter.what}: expected at least {parts + 1} changes, got {len(window.points)} within "
            f"{done[-1][0] - began:.3g} s"
        )

    def joules(start: float, end: float) -> float:
        if isinstance(meter, Log):
            return _logged_joules(meter, start, end)
        return interpolate(window.points, end) - interpolate(window.points, start)

    return [
        RepeatedWork(interpolate(done, end) - interpolate(done, start), end - start, joules(start, end))
        for start, end in pairwise(edges)
    ]


def _chunk(work: Callable[[int], object]) -> int:
    """Return the number of runs of the work in `_CHUNK_S`."""
    work(1)  # warm up
    began, count = perf_counter(), 1
    work(1)
    while (took := perf_counter() - began) < _CHUNK_S / 4 and count < 1_000_000:
        count *= 2
        began = perf_counter()
        work(count)
    return max(round(count * _CHUNK_S / took), 1)


def _part_edges(
    meter: Meter, points: Sequence[tuple[float, float]], whole: tuple[float, float], parts: int
) -> list[float]:
    """Return the edges of the parts: the times of readings that split the time about equally."""
    if isinstance(meter, Log):
        start, end = whole
        return [start + (end - start) * part / parts for part in range(parts + 1)]
    times = [time for time, _ in points if whole[0] <= time <= whole[1]]
    if len(times) <= parts:
        return []
    return [times[(len(times) - 1) * part // parts] for part in range(parts + 1)]


def _logged_joules(meter: Log, start: float, end: float) -> float:
    """Return the energy from a log, after waiting for its lines."""
    deadline = perf_counter() + _MAX_DELAY_S
    while True:
        try:
            return meter.between(start, end)
        except SensorFailed:
            if perf_counter() > deadline or meter.read().time_s >= end:
                raise
            sleep(_CHUNK_S)
