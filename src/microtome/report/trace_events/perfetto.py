"""A measured profile for Perfetto: calls as nested slices, memory, load and power as counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from microtome.report.trace_events.chrome import ChromeEvents
from microtome.report.trace_events.slices import Slice, device, host
from microtome.results.metrics import METRICS
from microtome.results.profile import Profile
from microtome.results.rows import Row
from microtome.units import shape

_HOW = (
    "a slice ends when the call ended after the beginning of the run, and begins as long before as the call took, both "
    "the medians over the passes; it is kept inside the slice around it and behind the one before it"
)


def perfetto(profile: Profile) -> str:
    """Chrome trace JSON."""
    calls = host(profile)
    events = ChromeEvents()
    pid = events.process(f"{profile.model} on {profile.inputs}")
    tracks = {"host": calls, "GPU, without its idle time": device(profile)}
    for lane, slices in ((events.lane(pid, name), slices) for name, slices in tracks.items() if slices):
        for one in slices:
            events.slice(lane, _name(one.row), one.begin_ns, one.end_ns, **_about(one.row))
    for at, nbytes in _live(profile, calls):
        events.counter(pid, "live", "bytes", at, nbytes)
    for one in _leaves(calls):
        for metric in METRICS.values():
            if metric.adds_up != "sum" and metric.requires is not None and (value := metric.of(one.row)) is not None:
                events.counter(pid, metric.label, metric.unit or "value", one.begin_ns, value)
    return events.dump(model=profile.model, inputs=profile.inputs, how=_HOW, **profile.environment)


def _leaves(calls: Sequence[Slice]) -> list[Slice]:
    """The timed calls without timed calls inside."""
    above = {one.row.parent for one in calls}
    return [one for one in calls if one.row.address not in above]


def _live(profile: Profile, calls: Sequence[Slice]) -> Iterator[tuple[int, int]]:
    """Live bytes over time. Operators have no times: they are spread evenly over the call that ran them."""
    if profile.timeline is None:
        yield from ((one.begin_ns, one.row.peak_bytes) for one in _leaves(calls))
        return
    timed = {one.row.address: one for one in calls}
    leaves = {one.row.address for one in _leaves(calls)}
    rows = {row.address: row for row in profile}
    ran_by = (profile.calls[at] for at in profile.timeline.calls[: profile.timeline.forward])
    owners = [_timed_owner(row, rows, timed) for row in ran_by]
    runs = Counter(owners)
    seen: Counter[str] = Counter()
    at = 0
    for owner, nbytes in zip(owners, profile.timeline.live_bytes, strict=False):
        one = timed[owner]
        if owner in leaves:  # what runs between calls runs when the one before has ended
            at = max(at, one.begin_ns + (one.end_ns - one.begin_ns) * seen[owner] // runs[owner])
            seen[owner] += 1
        else:
            at = max(at, one.begin_ns)
        yield at, nbytes
        if owner in leaves and seen[owner] == runs[owner]:
            at = max(at, one.end_ns)


def _timed_owner(row: Row, rows: dict[str, Row], timed: dict[str, Slice]) -> str:
    """The call that ran an operator, or the nearest around it that was timed."""
    while row.address not in timed and row.parent is not None:
        row = rows[row.parent]
    return row.address


def _name(row: Row) -> str:
    return row.address or row.type


def _about(row: Row) -> dict[str, Any]:
    spread = row.spreads.get("time_s")
    about = {
        "type": row.type,
        "output": ", ".join(shape(tensor.shape) for tensor in row.outputs),
        **{metric.name: metric.of(row) for metric in METRICS.values() if metric.shown == "table"},
        "time_low_s": None if spread is None else spread.low,
        "time_high_s": None if spread is None else spread.high,
    }
    return {name: value for name, value in about.items() if value is not None}
