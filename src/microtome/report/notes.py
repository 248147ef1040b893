"""The notes under a profile: conventions, coverage and methods of measurement."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from microtome.results.measurements import EnergyUse, Spread, Timing
from microtome.results.metrics import Metric, advise
from microtome.results.profile import Profile
from microtome.results.rows import Row, group
from microtome.units import UNKNOWN, joules, plural, seconds, size, some, watts

#: Above this ratio, measuring has changed the measured times.
_DISTURBED = 1.05
#: How much longer than measured time stamps may take from cold caches.
_COLD = 5
#: Signs of a busy machine: measured passes over bare ones below this, quartiles this far apart, calls inside a call
#: longer than it by this, where it takes this share of the total; a type of module below zero by this share.
_FASTER, _WIDE, _EXCEEDED, _WEIGHT, _BELOW = 0.95, 0.25, 1.05, 0.1, 0.01
#: The most operators or modules that a note names.
_NAMES = 6
#: With fewer passes, their range covers the true median with a probability, 1 - 2 ** (1 - passes), below 95 %.
FEW = 6


#: The text of a time below zero.
NOISE = "noise"


def is_noise(metric: Metric, value: Any) -> bool:
    """Whether a value is a time below zero: a difference of medians that disturbances exceed."""
    return metric.unit == "seconds" and value is not None and value < 0


def interval_name(spread: Spread | None) -> str:
    """Name the interval of a median: with few passes, it is their range."""
    return "95 %" if spread is None or spread.count >= FEW else f"range of {spread.count} passes"


def interval(spread: Spread | None, write: Callable[[float], str] = seconds) -> str:
    """Format the interval of a median, which `interval_name` names."""
    return UNKNOWN if spread is None else f"{write(spread.low)} to {write(spread.high)}"


def profile_notes(profile: Profile) -> list[str]:
    """Return the notes on the counts, the coverage and the measurements of a profile."""
    total, coverage = profile.total, profile.coverage
    counts = [
        f"{unit} unknown" if number is None else f"{number:,} {unit}"
        for number, unit in ((total.macs, "MACs"), (total.flops, "FLOPs"))
    ]
    keeps = profile.gradients and total.saved_bytes is None
    gradients = ", with gradients: memory includes tensors saved for the backward" if keeps else ""
    notes = [
        f"{plural(total.params, 'parameter')} ({total.trainable_params:,} trainable, {size(total.param_bytes)}); "
        f"{'; '.join(counts)} ({profile.convention} convention)",
        f"counted: {coverage}, on {profile.how}{gradients}",
    ]
    if total.backward_flops is not None:
        peak = f"peak {size(profile.peak_bytes)}, {size(total.peak_bytes)} in the forward"
        notes.append(f"backward: {total.backward_flops:,} FLOPs; {size(total.saved_bytes)} of saved tensors; {peak}")
    elif total.saved_bytes is not None:
        notes.append(f"the {profile.convention} convention does not define the FLOPs of a backward")
    notes += _measurement_notes(profile)
    if coverage.unknown:
        notes.append(f"no FLOP formula for {some([f'{op.name} ({op.runs})' for op in coverage.unknown], _NAMES)}")
    if coverage.never_ran:
        names = some(_merge_paths(coverage.never_ran), _NAMES)
        notes.append(f"modules that never ran: {names}; their parameters are counted in the call around them")
    return notes


def _measurement_notes(profile: Profile) -> Iterator[str]:
    where = profile.environment
    if where:
        cpu, threads, version = (where.get(key, "unknown") for key in ("cpu", "threads", "torch"))
        yield f"measured on {cpu}, {threads} thread{'' if threads == '1' else 's'}, torch {version}{_gpu(where)}"
    if profile.timing is not None:
        yield from _timing(profile, profile.timing)
    if (memory := profile.memory) is not None:
        process = f"resident memory {size(memory.rss_before_bytes)} before, {size(memory.rss_peak_bytes)} at the peak"
        yield f"measured peak: {memory.method}; {process}"
    if profile.energy is not None:
        yield from _energy(profile, profile.energy)
    if (sampling := profile.sampling) is not None:
        yield (
            f"load: {plural(sampling.samples, 'sample')} over {plural(sampling.passes, 'pass')}, one every "
            f"{seconds(sampling.every_s)}; calls shorter than that interval include the load of their neighbors"
        )
        reasons = group((why, name) for name, why in sampling.missing.items())
        yield from (f"no load of {' and '.join(names)}: {why}" for why, names in reasons.items())
    yield from (f"no {name}: {why}" for name, why in profile.unavailable.items())


def _gpu(where: dict[str, str]) -> str:
    if "gpu" not in where:
        return ""
    parts = [where[key] for key in ("gpu", "gpu_runtime") if key in where]
    if "driver" in where:
        parts.append(f"driver {where['driver']}")
    if "gpu_clock" in where:
        parts.append(f"clock {where['gpu_clock']}, throttling: {where.get('gpu_throttling', 'unknown')}")
    return "; " + ", ".join(parts)


def _noise(profile: Profile, timing: Timing) -> Iterator[str]:
    """Yield a note with the reasons if the times are unreliable."""
    reasons = []
    for name, bare, ratio, added in _with_stamps(profile, timing):
        if ratio < _FASTER and timing.is_same_code:
            reasons.append(f"{name} with time stamps were faster than {name} without")
        if _is_unexplained(timing, bare, ratio, added):
            reasons.append(
                f"{name} with time stamps took {ratio:.3g} times as long, and the stamps take only {seconds(added)} of "
                f"{seconds(ratio * bare.median)}"
            )
        if _is_wide(bare):
            middle = f"{seconds(bare.q1)} to {seconds(bare.q3)}"
            reasons.append(f"the interquartile range of the {name} without time stamps is {middle}")
    if timing.bare.count >= FEW and (row := _exceeded(profile)) is not None:
        reasons.append(f"the calls inside {row.address or 'the model'} sum up to more than its own time")
    if reasons:
        yield _too_busy("; ".join(reasons))


def _with_stamps(profile: Profile, timing: Timing) -> Iterator[tuple[str, Spread, float, float]]:
    """Yield, for each measured phase: its passes without time stamps, the ratio of those with them, and their cost."""
    calls = sum(row.time_s is not None for row in profile)
    yield "passes", timing.bare, timing.ratio, calls * timing.stamp_s
    if timing.backward is not None and timing.backward_ratio is not None:
        yield "backwards", timing.backward, timing.backward_ratio, 2 * calls * (timing.backward_stamp_s or 0.0)


def _is_unexplained(timing: Timing, bare: Spread, ratio: float, added: float) -> bool:
    """Whether passes with time stamps took longer than the stamps do, even from cold caches."""
    return timing.is_same_code and ratio > _DISTURBED and _COLD * added < (ratio - 1) * bare.median


def _is_wide(bare: Spread) -> bool:
    """Whether passes took so different times that other programs must have run meanwhile."""
    return bare.q3 - bare.q1 > _WIDE * bare.median


def _too_busy(reason: str) -> str:
    return (
        f"this machine was too busy for these times: {reason}. Close other programs, or measure more passes with "
        f"{advise('repeat=', '--repeat')}"
    )


_SUM_EXCEEDS = "the calls inside a call sum up to more than its own time"


def noise_note(profile: Profile) -> str:
    """Explain `NOISE`; if it is large, also say that the times are unreliable, unless another note does."""
    is_said = profile.timing is not None and any(_noise(profile, profile.timing))
    return f"{NOISE}: {_too_busy(_SUM_EXCEEDS) if _is_noise_large(profile) and not is_said else _SUM_EXCEEDS}"


def _is_noise_large(profile: Profile) -> bool:
    least = min(group.time_s or 0.0 for group in profile.by_type().values())
    return least < -_BELOW * (profile.total.time_s or 0.0)


def busy_notes(profile: Profile) -> list[str]:
    """Return a note if the machine was too busy for the times of a profile."""
    notes = [] if profile.timing is None else list(_noise(profile, profile.timing))
    return notes or ([_too_busy(_SUM_EXCEEDS)] if _is_noise_large(profile) else [])


def _exceeded(profile: Profile) -> Row | None:
    """Return a call with a large share of the time that took less than the sum of the calls inside it."""
    least = _WEIGHT * (profile.total.time_s or 0)
    for row in profile:
        inside = [child.time_s for child in profile.children(row) if child.time_s is not None]
        if row.time_s is not None and row.time_s > least and sum(inside) > _EXCEEDED * row.time_s:
            return row
    return None


def _timing(profile: Profile, timing: Timing) -> Iterator[str]:
    yield from _noise(profile, timing)
    bare = timing.bare
    observed = "with them" if timing.is_same_code else "with them, and other code,"
    yield (
        f"time: median of {plural(bare.count, 'pass')} after {timing.warmups} warm-up passes; a forward without time "
        f"stamps takes {seconds(bare.median)} ({interval(bare)}), {observed} {timing.ratio:.3f} times as long; "
        f"{seconds(timing.stamp_s)} per call is subtracted"
    )
    if timing.backward is not None and timing.backward_ratio is not None:
        yield (
            f"backward: without time stamps {seconds(timing.backward.median)} ({interval(timing.backward)}), "
            f"{observed} {timing.backward_ratio:.3f} times as long; "
            f"{seconds(timing.backward_stamp_s)} per time stamp is subtracted"
        )
    if timing.device is not None and timing.device_ratio is not None:
        device = timing.device
        method = profile.total.spreads["device_s"].method
        yield (
            f"device time: {method}; {seconds(device.median)} ({interval(device)}) for a forward without time stamps; "
            f"the calls sum up to {timing.device_ratio:.3f} of it"
        )
        layers = [row for row in profile if row.height == 1 and row.is_launch_bound is not None]
        bound = sum(bool(row.is_launch_bound) for row in layers)
        if bound:
            yield (
                f"{bound} of {len(layers)} layers {'is' if bound == 1 else 'are'} launch-bound: "
                "the host takes longer to launch them than the GPU to run them"
            )
    yield from _depth(profile)
    if timing.compiled:
        yield (
            "compiled code runs as Python while calls are timed, and compiled in passes without time stamps: times of "
            f"calls are those of the uncompiled model; compiled, a forward takes {seconds(bare.median)}"
        )
    if not timing.fast_paths:
        yield "fast paths of torch, which skip calls, are disabled while calls are timed, and enabled in other passes"
    if bare.count < FEW:
        yield (
            f"only {plural(bare.count, 'pass')}: intervals are the range of the passes, and the median of a call may "
            "exceed that of the call around it"
        )
    if is_disturbed(profile, timing):
        less = f": measure with a smaller {advise('depth=', '--depth')}" if len(profile) > 1 else ""
        yield f"time stamps add more than 5 %, so the times of short calls are too long{less}"


def is_disturbed(profile: Profile, timing: Timing) -> bool:
    """Whether time stamps have changed the measured times.

    Not known if passes without them ran other code, or if other programs explain the difference: passes took different
    times, or the stamps take much less than the difference.
    """
    return timing.is_same_code and any(
        ratio > _DISTURBED and not _is_wide(bare) and not _is_unexplained(timing, bare, ratio, added)
        for _, bare, ratio, added in _with_stamps(profile, timing)
    )


def _depth(profile: Profile) -> Iterator[str]:
    """Yield a note if calls below a depth were not timed: the times of the calls around them include theirs."""
    untimed = [row.depth for row in profile if row.time_s is None]
    if untimed:
        yield (
            f"measured to depth {min(untimed) - 1}: the time of {plural(len(untimed), 'call')} below it is part of "
            "the own time of the calls around them"
        )


def _energy(profile: Profile, use: EnergyUse) -> Iterator[str]:
    if use.whole is None:
        yield "energy: estimated from coefficients, not measured"
        return
    methods = {"share": "distributed by time", "replay": "each layer replayed alone"}
    yield (
        f"energy: {use.meter}, {methods[use.method]}; one pass takes {joules(use.whole.median)} "
        f"({interval(use.whole, joules)}, {plural(use.whole.count, 'window')}) in {seconds(use.pass_s)}; "
        f"idle {watts(use.idle_w)}"
    )
    closure = f"{joules(use.closure_j)} ({joules(use.net_closure_j)} net)"
    yield f"closure: the total minus the sum of its parts is {closure}"
    if use.not_replayed:
        reasons = Counter(use.not_replayed.values())
        counted = "; ".join(f"{plural(count, 'layer')}, {why}" for why, count in reasons.items())
        yield f"not replayed: {counted}; sums exclude them"


def _merge_paths(paths: Sequence[str]) -> list[str]:
    """Merge paths that differ only in a number, with their count."""
    alike = group((re.sub(r"\b\d+\b|(?<=_)\d+\b", "*", path), path) for path in paths)
    return [f"{pattern} ({len(same)})" if len(same) > 1 else same[0] for pattern, same in alike.items()]
