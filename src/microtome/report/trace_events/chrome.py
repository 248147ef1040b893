"""The builder of Chrome trace JSON, which Perfetto opens."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Lane(NamedTuple):
    """A track: a thread of a process."""

    pid: int
    tid: int


class ChromeEvents:
    """Slices on lanes, counters, and arrows between slices. Times are whole nanoseconds."""

    def __init__(self) -> None:
        self._names: list[dict[str, Any]] = []
        self._timed: list[tuple[int, int, dict[str, Any]]] = []
        self._lanes: dict[int, int] = {}  # how many, by process
        self._arrows = 0

    def process(self, name: str) -> int:
        pid = len(self._lanes) + 1
        self._lanes[pid] = 0
        self._metadata("process_name", Lane(pid, 0), name=name)
        self._metadata("process_sort_index", Lane(pid, 0), sort_index=pid)
        return pid

    def lane(self, pid: int, name: str) -> Lane:
        self._lanes[pid] += 1
        lane = Lane(pid, self._lanes[pid])
        self._metadata("thread_name", lane, name=name)
        return lane

    def slice(self, lane: Lane, name: str, begin_ns: int, end_ns: int, **args: Any) -> None:
        """Add a slice; the slices of a lane must be nested or disjoint."""
        self._add("X", lane, name, begin_ns, dur=_us(end_ns - begin_ns), args=args, order=begin_ns - end_ns)

    def counter(self, pid: int, name: str, unit: str, at_ns: int, value: float) -> None:
        self._add("C", Lane(pid, 0), name, at_ns, args={unit: value})  # readers show both: "live bytes"

    def arrow(self, name: str, source: Lane, begin_ns: int, target: Lane, end_ns: int) -> None:
        """Add an arrow between the slices that are on two lanes at two times."""
        self._arrows += 1
        self._add("s", source, name, begin_ns, id=self._arrows, cat="transfer", order=1)
        self._add("f", target, name, end_ns, id=self._arrows, cat="transfer", bp="e", order=1)

    def dump(self, **metadata: Any) -> str:
        """Return the file, with its metadata."""
        ordered = sorted(self._timed, key=lambda event: event[:2])  # of those that begin together, the longest first
        events = [*self._names, *(event for _, _, event in ordered)]
        data = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}
        text = json.dumps(data, ensure_ascii=False) + "\n"  # Perfetto refuses escaped surrogate pairs
        return text.encode("utf-8", "replace").decode()  # and a lone surrogate is invalid

    def _metadata(self, event: str, lane: Lane, **args: Any) -> None:
        self._names.append({"ph": "M", "name": event, "pid": lane.pid, "tid": lane.tid, "args": args})

    def _add(self, kind: str, lane: Lane, name: str, at_ns: int, *, order: int = 0, **fields: Any) -> None:
        event = {"ph": kind, "name": name, "pid": lane.pid, "tid": lane.tid, "ts": _us(at_ns), **fields}
        self._timed.append((at_ns, order, event))


def _us(nanoseconds: int) -> float:
    """Microseconds, exact to the nanosecond."""
    return round(nanoseconds / 1000, 3)
