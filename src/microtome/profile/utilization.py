"""Measure the load of the machine while each call runs."""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from time import perf_counter

import torch

from microtome.devices.meters import Log, Meter, pick
from microtome.devices.meters.base import finite
from microtome.devices.utilization import QUANTITIES, LoadSampler, Sample
from microtome.errors import SensorFailed, describe_error
from microtome.profile.call_tree import CallTree
from microtome.profile.passes import Passes, PassSchedule
from microtome.profile.timing import Stopwatch
from microtome.results.measurements import Load, Sampling

#: The minimum duration of the passes, for enough samples.
_MIN_S = 1.0


def sample_load(
    runs: Passes, tree: CallTree, schedule: PassSchedule, meter: Meter | str | None
) -> tuple[list[Load], Sampling]:
    """Return the load of each call, and how it was sampled.

    A sample is the mean over its interval, and is attributed to the calls that ran in it, weighted by their overlap.
    On an accelerator these are the calls that the host ran.
    """
    watch = Stopwatch(tree.order)
    times: list[torch.Tensor] = []
    with ExitStack() as stack:
        watts, reason = (None, "") if runs.devices else _PowerReader.open(meter, stack)
        sampler = stack.enter_context(LoadSampler(runs.devices[0] if runs.devices else None, watts))
        if reason:
            sampler.missing["watts"] = reason
        began = perf_counter()
        while len(times) < schedule.repeat or perf_counter() - began < _MIN_S:
            elapsed = perf_counter() - began
            if elapsed > schedule.budget_s and len(sampler.samples) > 1:
                break
            schedule.report("sampling the load", min(len(times), schedule.repeat), schedule.repeat)
            watch.restart()
            with runs.session(watch, tree):
                runs.once()
            watch.durations()
            times.append(torch.tensor([watch.begins, watch.ends], dtype=torch.float64) / 1e9)
    samples = sampler.samples
    begins, ends = (part.contiguous() for part in torch.stack(times).unbind(1))
    columns = [_mean(samples, name, begins, ends) for name in QUANTITIES]
    loads = [Load(*values) for values in zip(*columns, _overlapping(samples, begins, ends), strict=True)]
    every_s = median(sample.end_s - sample.begin_s for sample in samples) if samples else 0.0
    return loads, Sampling(every_s, len(samples), len(times), sampler.missing)


class _PowerReader:
    """Reads the power from a meter: its reading, or the change of its counter since the last reading."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._last = meter.read()

    @classmethod
    def open(cls, requested: Meter | str | None, stack: ExitStack) -> tuple[_PowerReader | None, str]:
        """Return a reader, or None with the reason."""
        try:
            meter = pick(requested)
            if meter is not requested:
                stack.callback(meter.close)
            if isinstance(meter, Log):
                return None, f"{meter.what} can be read only afterwards"
            return cls(meter), ""
        except Exception as error:  # noqa: BLE001  a user's meter may raise anything
            return None, str(error) if isinstance(error, SensorFailed) else describe_error(error)

    def __call__(self) -> float:
        now, last = self._meter.read(), self._last
        self._last = now
        if now.watts is not None:
            return finite(now.watts, f"a reading of {self._meter.what}")
        if now.joules is None or last.joules is None or now.time_s <= last.time_s:
            raise SensorFailed(f"{self._meter.what} does not measure the current power")
        drawn = finite(now.joules, f"a reading of {self._meter.what}") - last.joules
        return finite(drawn, f"the step of {self._meter.what}") / (now.time_s - last.time_s)


def _mean(samples: list[Sample], name: str, begins: torch.Tensor, ends: torch.Tensor) -> list[float | None]:
    """Return the mean of a quantity over the times in which each call ran."""
    read = [(sample.begin_s, sample.end_s, value) for sample in samples if (value := getattr(sample, name)) is not None]
    if len(read) < len(samples) or not read:
        return [None] * begins.shape[1]
    edges = torch.tensor([read[0][0], *(end for _, end, _ in read)], dtype=torch.float64)
    steps = torch.tensor([(end - begin) * value for begin, end, value in read], dtype=torch.float64)
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), steps.cumsum(0)])

    def integral(times: torch.Tensor) -> torch.Tensor:
        """Integrate from the first edge to each time."""
        clamped = times.clamp(edges[0], edges[-1])
        after = torch.searchsorted(edges, clamped).clamp(1, len(edges) - 1)
        part = (clamped - edges[after - 1]) / (edges[after] - edges[after - 1])
        return sums[after - 1] + part * steps[after - 1]

    sampled = (ends.clamp(edges[0], edges[-1]) - begins.clamp(edges[0], edges[-1])).sum(0)
    values = [value for _, _, value in read]
    means = (integral(ends) - integral(begins)).sum(0) / sampled
    means = means.clamp(min(values), max(values))  # against rounding
    return [float(mean) if time > 0 else None for mean, time in zip(means, sampled, strict=True)]


def _overlapping(samples: list[Sample], begins: torch.Tensor, ends: torch.Tensor) -> list[int]:
    """Count the samples that overlap with a run of each call."""
    starts = torch.tensor([sample.begin_s for sample in samples], dtype=torch.float64)
    stops = torch.tensor([sample.end_s for sample in samples], dtype=torch.float64)
    first, last = torch.searchsorted(stops, begins), torch.searchsorted(starts, ends)
    spans = zip(first.T.tolist(), last.T.tolist(), strict=True)
    return [len({index for a, b in zip(*span, strict=True) for index in range(a, b)}) for span in spans]
