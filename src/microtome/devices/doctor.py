"""What this machine can measure, and how well: tried now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from microtome.devices import cuda_activity
from microtome.devices.meters import Meter, Missing, find
from microtome.errors import SensorFailed, Unsupported, said

#: How long a sensor is watched for its steps.
_WATCH_S = 0.6


@dataclass(frozen=True, slots=True)
class Checkup:
    """A clock or sensor that works.

    Attributes:
        what: What it measures.
        read_s: Seconds that a reading takes.
        period_s: Seconds between its steps, as far as they could be seen; None if it did not move.
    """

    name: str
    what: str
    read_s: float
    period_s: float | None


def check_clock() -> Checkup:
    """The clock that times are taken with."""
    return Checkup("perf_counter", "time", *_try(time.perf_counter, 0.01))


def check_sources(found: list[Meter], missing: list[Missing]) -> tuple[list[Checkup], list[Missing]]:
    """Each energy source, tried; one that fails is missing."""
    checked, lost = [], list(missing)
    for source in found:
        try:
            read = _joules_or_watts(source)
            checked.append(Checkup(source.name, f"{source.what} ({source.kind})", *_try(read, _WATCH_S)))
        except Exception as error:  # noqa: BLE001  a meter of somebody's own may raise anything
            lost.append(
                Missing(
                    source.name,
                    said(error) if not isinstance(error, SensorFailed) else str(error),
                    "see whether another program can read it",
                )
            )
        finally:
            source.close()
    return checked, lost


def checkup() -> tuple[list[Checkup], list[Missing]]:
    """All that can be measured here, and what is missing with what would help."""
    sources, missing = check_sources(*find())
    return [check_clock(), *sources], missing


def kernels_seen() -> str:
    """Whether torch's profiler sees what a CUDA device does, in words."""
    try:
        with cuda_activity.watch() as seen:
            torch.zeros(1, device="cuda")
    except (Unsupported, RuntimeError) as error:
        return f"not from kernels: {said(error)}"
    if not seen.launches:
        return "not from kernels: torch's profiler sees none; measure with --device-time graph"
    return "durations of kernels, from torch's profiler"


def _joules_or_watts(source: Meter) -> Callable[[], Any]:
    def read() -> Any:
        reading = source.read()
        return reading.watts if reading.joules is None else reading.joules

    return read


def _try(read: Callable[[], Any], watch_s: float) -> tuple[float, float | None]:
    """How long a reading takes, and how far apart its steps are."""
    costs: list[float] = []
    steps: list[float] = []
    last, began = read(), time.perf_counter()
    while (now := time.perf_counter()) - began < watch_s and len(steps) < 100:
        value = read()
        costs.append(time.perf_counter() - now)
        if value != last:
            last = value
            steps.append(time.perf_counter())
    gaps = [after - before for before, after in pairwise(steps)]
    return median(costs), median(gaps) if gaps else None
