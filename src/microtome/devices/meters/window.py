"""Measure the energy of a block of code."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Self

from microtome.devices.meters.base import Log, Meter, MeterReading, finite
from microtome.errors import SensorFailed, SessionError, describe_error

METHOD = {"counter": "counter, end minus start", "power": "power, sampled and integrated", "log": "log, interpolated"}


@dataclass(frozen=True)
class Energy:
    """The energy of a block.

    Attributes:
        joules: None if unknown.
        seconds: The time from the first reading to the last.
        method: How the joules were measured.
        samples: The number of readings; 0 for a log.
        reason: Why joules is None; empty otherwise.
    """

    joules: float | None
    seconds: float
    method: str
    samples: int
    reason: str = ""


class Window:
    """Measures the energy of a `with` block by one meter. A failing sensor does not disturb the block.

    A meter that must be read periodically is read by a background thread.

    Args:
        meter: An open meter.
        every_s: The reading period, instead of the meter's own `every_s`.

    Attributes:
        points: The times of readings and the joules so far; for a counter, only those where it changed.
        reason: Why reading stopped; empty otherwise.

    >>> from microtome.devices.meters import find
    >>> for meter in find()[0]:
    ...     with meter, Window(meter) as window:
    ...         _ = sum(range(1000))
    ...     energy = window.energy()
    """

    def __init__(self, meter: Meter, every_s: float | None = None) -> None:
        self._meter = meter
        self._every_s = meter.every_s if every_s is None else every_s
        self._thread: threading.Thread | None = None
        self._open = self._ended = False

    def __enter__(self) -> Self:
        if self._open:
            raise SessionError("this window is already open: use one window for each block")
        self._open, self._ended = True, False
        self._first: MeterReading | None = None
        self._last: MeterReading | None = None
        self._joules = 0.0
        self._samples = 0
        self.points: list[tuple[float, float]] = []
        self.reason = ""
        self._stop = threading.Event()
        self._start_s = self._end_s = time.perf_counter()
        self._sample()
        if self._every_s is not None and not self.reason:
            self._thread = threading.Thread(
                target=self._run, args=(self._every_s,), name="microtome-energy", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._sample()
        self._end_s = time.perf_counter()
        self._open, self._ended = False, True

    def energy(self) -> Energy:
        """Return the energy of the block; a log may cover more of it later."""
        method = METHOD[self._meter.kind]
        if not self._ended:
            return Energy(None, 0.0, method, 0, "the block has not ended")
        if isinstance(self._meter, Log):
            return self._logged_energy(self._meter, method)
        if self.reason or self._first is None or self._last is None:
            return Energy(None, self._end_s - self._start_s, method, self._samples, self.reason)
        seconds = self._last.time_s - self._first.time_s
        if self._meter.kind == "counter" and self._joules == 0:
            reason = f"the counter did not change within {seconds:.3g} s: the block is too short, or it has stopped"
            return Energy(None, seconds, method, self._samples, reason)
        return Energy(self._joules, seconds, method, self._samples)

    def _logged_energy(self, meter: Log, method: str) -> Energy:
        seconds = self._end_s - self._start_s
        try:
            return Energy(meter.between(self._start_s, self._end_s), seconds, method, 0)
        except SensorFailed as error:
            return Energy(None, seconds, method, 0, str(error))

    def _run(self, every_s: float) -> None:
        while not self.reason and not self._stop.wait(every_s):
            self._sample()

    def _sample(self) -> None:
        """Add a reading; the first failure ends the readings and becomes the reason."""
        if self.reason or isinstance(self._meter, Log):
            return
        try:
            self._add(self._meter.read())
        except SensorFailed as error:
            self.reason = str(error)
        except Exception as error:  # noqa: BLE001  in a thread it would be lost, and the sum would be a guess
            self.reason = f"reading {self._meter.what} failed: {describe_error(error)}"

    def _add(self, now: MeterReading) -> None:
        step = 0.0
        if self._last is not None:
            step = _step(self._last, now, self._meter)
            self._joules += step
        else:
            self._first = now
        if step or self._meter.kind == "power":
            self.points.append((now.time_s, self._joules))
        self._last = now
        self._samples += 1


def _step(last: MeterReading, now: MeterReading, meter: Meter) -> float:
    """Return the joules between two readings."""
    if not now.time_s >= last.time_s:
        raise SensorFailed(f"the time of {meter.what} went backwards, from {last.time_s} to {now.time_s}")
    if meter.kind == "power":
        return (_check(last.watts, meter) + _check(now.watts, meter)) / 2 * (now.time_s - last.time_s)
    step = _check(now.joules, meter) - _check(last.joules, meter)
    if step < 0:
        raise SensorFailed(f"the counter of {meter.what} went backwards, from {last.joules} to {now.joules} J")
    return step


def _check(number: float | None, meter: Meter) -> float:
    if number is None:
        raise SensorFailed(f"{meter.what}: expected a reading with {meter.kind}, got none")
    return finite(number, f"a reading of {meter.what}")
