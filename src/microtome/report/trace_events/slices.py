"""A measured run laid out in time: when each call began and ended.

A profile says of each call how long it took and when it ended, each the median over the passes. A call begins that long
before it ended; but medians of their own do not fit together to the nanosecond, so a call is kept inside the one that
contains it, begins when the one before it has ended at the earliest, and leaves room for those after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from microtome.errors import BadQuery
from microtome.results.profile import Profile
from microtome.results.rows import Row


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
    return list(_lay(profile, "time_s", "elapsed_s"))


def device(profile: Profile) -> list[Slice]:
    """The calls as the GPU worked for them, its idle time left out; none where it was not timed."""
    return [] if profile.total.device_s is None else list(_lay(profile, "device_s", "elapsed_device_s"))


class _Laid(NamedTuple):
    """The layout of calls over time.

    Attributes:
        took: The attribute of a row that says how long it took, and `until` when it ended.
        least: The nanoseconds that each call needs for every one in it to have one: readers lose where a slice without
            length lies.
    """

    profile: Profile
    took: str
    until: str
    least: dict[str, int]

    def length(self, row: Row) -> int:
        return max(round(getattr(row, self.took) * 1e9), self.least[row.address])

    def inside(self, parent: Row, begin: int, end: int) -> Iterator[Slice]:
        rows = [row for row in self.profile.children(parent) if row.address in self.least]
        at, later = begin, sum(self.least[row.address] for row in rows)
        for row in rows:
            length, ended = self.length(row), getattr(row, self.until)
            later -= self.least[row.address]
            stop = min(max(0 if ended is None else round(ended * 1e9), at + length), end - later)
            start = max(stop - length, at)
            yield Slice(row, start, stop)
            yield from self.inside(row, start, stop)
            at = stop


def _lay(profile: Profile, took: str, until: str) -> Iterator[Slice]:
    least: dict[str, int] = {}
    for row in reversed(profile.calls):  # those inside a call come after it
        if getattr(row, took) is not None:
            least[row.address] = max(1, sum(least.get(one.address, 0) for one in profile.children(row)))
    laid = _Laid(profile, took, until, least)
    whole = laid.length(profile.total)
    yield Slice(profile.total, 0, whole)
    yield from laid.inside(profile.total, 0, whole)
