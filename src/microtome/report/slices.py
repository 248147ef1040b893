"""A measured run laid out in time: when each call began and ended.

A profile says of each call how long it took and when it ended, each the median over the passes. A call begins that long
before it ended; but medians of their own do not fit together to the nanosecond, so a call is kept inside the one that
contains it, and begins when the one before it has ended at the earliest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from microtome.errors import BadQuery
from microtome.profile import Profile, Row


class Slice(NamedTuple):
    """A call with the nanoseconds, from the beginning of the run, between which it ran."""

    row: Row
    begin_ns: int
    end_ns: int


def host(profile: Profile) -> list[Slice]:
    """The calls as the host ran them, in the order they began. Calls that were not timed are left out."""
    if profile.total.time_s is None:
        raise BadQuery(
            "this profile has no times, so there is nothing to lay out in time: "
            'make it with measure=["time"], or with --time on the command line'
        )
    return list(_lay(profile, "time_s", "until_s"))


def device(profile: Profile) -> list[Slice]:
    """The calls as the GPU worked for them, its idle time left out; none where it was not timed."""
    return [] if profile.total.device_s is None else list(_lay(profile, "device_s", "until_device_s"))


def _lay(profile: Profile, took: str, until: str) -> Iterator[Slice]:
    root = profile.total
    whole = _ns(getattr(root, took))
    yield Slice(root, 0, whole)
    yield from _inside(profile, root, 0, whole, took, until)


def _inside(profile: Profile, parent: Row, begin: int, end: int, took: str, until: str) -> Iterator[Slice]:
    at = begin
    for row in profile.children(parent):
        seconds, ended = getattr(row, took), getattr(row, until)
        if seconds is None:
            continue
        stop = at + _ns(seconds) if ended is None else _ns(ended)
        stop = min(max(stop, at), end)
        start = min(max(stop - _ns(seconds), at), stop)
        yield Slice(row, start, stop)
        yield from _inside(profile, row, start, stop, took, until)
        at = stop


def _ns(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)
