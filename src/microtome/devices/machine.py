"""Describe this machine and its software, and check which clocks and sensors work, and how well."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import Any

import psutil
import torch

from microtome.devices.base import backend_of
from microtome.devices.meters import Meter, Missing, find
from microtome.errors import SensorFailed, Unsupported, describe_error

#: How long a sensor is observed to find its period.
_WATCH_S = 0.6


def environment(devices: Sequence[torch.device] = ()) -> dict[str, str]:
    """Describe the machine, the software and the accelerators in use; the state of the first is as of now."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "cpu": _cpu(),
        **_cpu_clock(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **(backend_of(devices[0]).environment(devices) if devices else {}),
    }


def _cpu_clock() -> dict[str, str]:
    """Return the current mean clock of the cores, if the system exposes it."""
    try:
        clock = psutil.cpu_freq()
    except (OSError, NotImplementedError, RuntimeError):
        return {}
    if clock is None or not clock.current:
        return {}
    return {"cpu_clock": f"{clock.current:.0f}{f' of {clock.max:.0f}' if clock.max else ''} MHz"}


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Checkup:
    """A working clock or sensor.

    Attributes:
        what: The measured quantity.
        read_s: The duration of a reading.
        period_s: The time between two changes of its value; None if it did not change.
    """

    name: str
    what: str
    read_s: float
    period_s: float | None


def checkup() -> tuple[list[Checkup], list[Missing]]:
    """Check all clocks and sensors of this machine; return those that work, and those that are missing."""
    meters, missing = check_meters(*find())
    return [check_clock(), *meters], missing


def check_clock() -> Checkup:
    """Check the clock that times are measured with."""
    return Checkup("perf_counter", "time", *_time_readings(time.perf_counter, 0.01))


def check_meters(meters: list[Meter], missing: list[Missing]) -> tuple[list[Checkup], list[Missing]]:
    """Check each energy meter; those that fail are added to the missing ones."""
    checked, failed = [], list(missing)
    for meter in meters:
        try:
            checked.append(
                Checkup(meter.name, f"{meter.what} ({meter.kind})", *_time_readings(_reader(meter), _WATCH_S))
            )
        except Exception as error:  # noqa: BLE001  a user's meter may raise anything
            reason = str(error) if isinstance(error, SensorFailed) else describe_error(error)
            failed.append(Missing(meter.name, reason, "see whether another program can read it"))
        finally:
            meter.close()
    return checked, failed


def describe_device_time(device: torch.device) -> str:
    """Describe whether torch's profiler reports the kernels of a device."""
    try:
        with backend_of(device).watch_activity() as activity:
            torch.zeros(1, device=device)
    except (Unsupported, RuntimeError) as error:
        return f"not from kernels: {describe_error(error)}"
    if not activity.launches:
        return "not from kernels: torch's profiler reports none; measure with --device-time graph"
    return "durations of kernels, from torch's profiler"


def _reader(meter: Meter) -> Callable[[], Any]:
    def read() -> Any:
        reading = meter.read()
        return reading.watts if reading.joules is None else reading.joules

    return read


def _time_readings(read: Callable[[], Any], watch_s: float) -> tuple[float, float | None]:
    """Return the median duration of a reading, and the median time between two changes."""
    durations: list[float] = []
    changes: list[float] = []
    last, began = read(), time.perf_counter()
    while (now := time.perf_counter()) - began < watch_s and len(changes) < 100:
        value = read()
        durations.append(time.perf_counter() - now)
        if value != last:
            last = value
            changes.append(time.perf_counter())
    periods = [after - before for before, after in pairwise(changes)]
    return median(durations), median(periods) if periods else None
