"""A measured profile as a file of events in time, for Perfetto and for speedscope.

A profile holds for each call how long it took and when it ended, both the median over the passes. A call begins that
long before it ended; but separate medians do not fit together to the nanosecond, so a call stays inside the one that
contains it, begins no earlier than the end of the one before it, and leaves room for those after it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from microtome.errors import BadQuery
from microtome.report.trace_events.chrome import ChromeEvents
from microtome.results.metrics import METRICS, TIME
from microtome.results.profile import Profile
from microtome.results.rows import Row
from microtome.units import shape

_HOW = (
    "a slice ends when the call ended after the beginning of the run, and begins as long before as the call took, both "
    "the medians over the passes; it is kept inside the slice around it and behind the one before it"
)


# -- slices ------------------------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """A call with the nanoseconds, from the beginning of the run, between which it ran."""

    row: Row
    begin_ns: int
    end_ns: int


def host_slices(profile: Profile) -> list[Slice]:
    """Return the calls as the host ran them, in the order they began, without those that were not timed."""
    if profile.total.time_s is None:
        raise BadQuery(f"this profile has no times, so there is nothing to lay out in time: make it with {TIME.advice}")
    return _slices(profile, "time_s", "elapsed_s")


def device_slices(profile: Profile) -> list[Slice]:
    """Return the calls as the GPU ran them, without its idle time; none where it was not timed."""
    return [] if profile.total.device_s is None else _slices(profile, "device_s", "elapsed_device_s")


def _slices(profile: Profile, duration: str, end: str) -> list[Slice]:
    """Lay out the calls in time.

    Args:
        duration: The field of a row with its seconds.
        end: The field with the seconds from the beginning of the run to its end.
    """
    # Every call gets a nanosecond for each call inside it: readers misplace slices without length.
    least: dict[str, int] = {}
    for row in reversed(profile.calls):  # those inside a call come after it
        if getattr(row, duration) is not None:
            least[row.address] = max(1, sum(least.get(child.address, 0) for child in profile.children(row)))

    def length(row: Row) -> int:
        return max(round(getattr(row, duration) * 1e9), least[row.address])

    def inside(parent: Row, begin_ns: int, end_ns: int) -> Iterator[Slice]:
        rows = [row for row in profile.children(parent) if row.address in least]
        at, later = begin_ns, sum(least[row.address] for row in rows)
        for row in rows:
            later -= least[row.address]
            stop = min(max(round((getattr(row, end) or 0) * 1e9), at + length(row)), end_ns - later)
            start = max(stop - length(row), at)
            yield Slice(row, start, stop)
            yield from inside(row, start, stop)
            at = stop

    whole = Slice(profile.total, 0, length(profile.total))
    return [whole, *inside(*whole)]


def _tracks(profile: Profile) -> dict[str, list[Slice]]:
    tracks = {"host": host_slices(profile), "GPU, without its idle time": device_slices(profile)}
    return {name: slices for name, slices in tracks.items() if slices}


# -- Perfetto ----------------------------------------------------------------------------------------------------------


def perfetto(profile: Profile) -> str:
    """Export Chrome trace JSON: calls as nested slices, memory, load and power as counters."""
    events = ChromeEvents()
    tracks = _tracks(profile)
    pid = events.process(profile.heading)
    for name, slices in tracks.items():
        lane = events.lane(pid, name)
        for row, begin_ns, end_ns in slices:
            events.slice(lane, row.address or row.type, begin_ns, end_ns, **_arguments(row))
    for at_ns, nbytes in _live_bytes(profile, tracks["host"]):
        events.counter(pid, "live", "bytes", at_ns, nbytes)
    for one in _leaves(tracks["host"]):
        for metric in METRICS.values():
            if metric.adds_up != "sum" and metric.requires is not None and (value := metric.of(one.row)) is not None:
                events.counter(pid, metric.label, metric.unit or "value", one.begin_ns, value)
    return events.dump(model=profile.model, inputs=profile.inputs, how=_HOW, **profile.environment)


def _arguments(row: Row) -> dict[str, Any]:
    """Return what Perfetto shows of a selected slice."""
    spread = row.spreads.get("time_s")
    arguments = {
        "type": row.type,
        "output": ", ".join(shape(tensor.shape) for tensor in row.outputs),
        **{metric.name: metric.of(row) for metric in METRICS.values() if metric.shown == "table"},
        "time_low_s": None if spread is None else spread.low,
        "time_high_s": None if spread is None else spread.high,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _leaves(slices: Sequence[Slice]) -> list[Slice]:
    """Return the timed calls without timed calls inside."""
    parents = {one.row.parent for one in slices}
    return [one for one in slices if one.row.address not in parents]


def _live_bytes(profile: Profile, slices: Sequence[Slice]) -> Iterator[tuple[int, int]]:
    """Yield live bytes over time. Operators have no times: they are spread evenly over the call that ran them."""
    leaves = {one.row.address for one in _leaves(slices)}
    if profile.timeline is None:
        yield from ((one.begin_ns, one.row.peak_bytes) for one in slices if one.row.address in leaves)
        return
    timed = {one.row.address: one for one in slices}
    calls = (profile.calls[index] for index in profile.timeline.calls[: profile.timeline.forward])
    owners = [_timed_owner(profile, row, timed) for row in calls]
    runs, done = Counter(owners), Counter[str]()
    at_ns = 0
    for owner, nbytes in zip(owners, profile.timeline.live_bytes, strict=False):
        _, begin_ns, end_ns = timed[owner]
        if owner in leaves:  # what runs between calls runs when the one before has ended
            at_ns = max(at_ns, begin_ns + (end_ns - begin_ns) * done[owner] // runs[owner])
            done[owner] += 1
        else:
            at_ns = max(at_ns, begin_ns)
        yield at_ns, nbytes
        if owner in leaves and done[owner] == runs[owner]:
            at_ns = max(at_ns, end_ns)


def _timed_owner(profile: Profile, row: Row, timed: dict[str, Slice]) -> str:
    """Return the address of a call, or of the nearest call around it that was timed."""
    while row.address not in timed and row.parent is not None:
        row = profile[row.parent]
    return row.address


# -- speedscope --------------------------------------------------------------------------------------------------------


def speedscope(profile: Profile) -> str:
    """Export the file format of https://www.speedscope.app: frames opened and closed, on the host and on the GPU."""
    tracks = _tracks(profile)
    calls = [one.row for one in tracks["host"]]
    frames = {row.address: index for index, row in enumerate(calls)}
    names = [f"{row.address} ({row.type})" if row.address else row.type for row in calls]
    data = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "shared": {"frames": [{"name": name} for name in names]},
        "profiles": [_evented_profile(name, slices, frames) for name, slices in tracks.items()],
        "name": profile.heading,
        "activeProfileIndex": 0,
        "exporter": "microtome",
    }
    return json.dumps(data) + "\n"


def _evented_profile(name: str, slices: Sequence[Slice], frames: dict[str, int]) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    stack: list[Slice] = []

    def close(until: str | None) -> None:
        """Close the open calls up to the one with this address."""
        while stack and stack[-1].row.address != until:
            closed = stack.pop()
            events.append({"type": "C", "frame": frames[closed.row.address], "at": closed.end_ns})

    for one in slices:
        close(one.row.parent)
        stack.append(one)
        events.append({"type": "O", "frame": frames[one.row.address], "at": one.begin_ns})
    close(None)
    return {
        "type": "evented",
        "name": name,
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": slices[0].end_ns,
        "events": events,
    }
