"""Events in time as Chrome trace JSON, which Perfetto opens."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Lane(NamedTuple):
    """A row of the picture: a thread of a process."""

    pid: int
    tid: int


class ChromeEvents:
    """Slices on lanes, counters, and arrows between slices. Times are whole nanoseconds."""

    def __init__(self) -> None:
        self._names: list[dict[str, Any]] = []
        self._timed: list[tuple[int, int, dict[str, Any]]] = []
        self._lanes: dict[int, int] = {}
        self._arrows = 0

    def process(self, name: str) -> int:
        pid = len(self._lanes) + 1
        self._lanes[pid] = 0
        self._name("process_name", Lane(pid, 0), name)
        self._names.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        return pid

    def lane(self, pid: int, name: str) -> Lane:
        self._lanes[pid] += 1
        lane = Lane(pid, self._lanes[pid])
        self._name("thread_name", lane, name)
        return lane

    def slice(self, lane: Lane, name: str, begin_ns: int, end_ns: int, **args: Any) -> None:
        """Slices of a lane must lie in each other or apart."""
        self._add("X", lane, name, begin_ns, dur=_us(end_ns - begin_ns), args=args, order=begin_ns - end_ns)

    def counter(self, pid: int, name: str, unit: str, at_ns: int, value: float) -> None:
        self._add("C", Lane(pid, 0), name, at_ns, args={unit: value})  # readers say both: "live bytes"

    def arrow(self, name: str, source: Lane, begin_ns: int, target: Lane, end_ns: int) -> None:
        """From the slice that is there at a time to another."""
        self._arrows += 1
        self._add("s", source, name, begin_ns, id=self._arrows, cat="transfer", order=1)
        self._add("f", target, name, end_ns, id=self._arrows, cat="transfer", bp="e", order=1)

    def dump(self, **about: Any) -> str:
        """The file; `about` is kept in it for readers."""
        ordered = sorted(self._timed, key=lambda event: event[:2])  # what begins together, the longest first
        events = [*self._names, *(event for _, _, event in ordered)]
        data = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
        text = json.dumps(data, ensure_ascii=False) + "\n"  # Perfetto refuses escaped surrogate pairs
        return text.encode("utf-8", "replace").decode()  # and a half of one is no text

    def _name(self, what: str, lane: Lane, name: str) -> None:
        self._names.append({"ph": "M", "name": what, "pid": lane.pid, "tid": lane.tid, "args": {"name": name}})

    def _add(self, kind: str, lane: Lane, name: str, at_ns: int, *, order: int = 0, **more: Any) -> None:
        event = {"ph": kind, "name": name, "pid": lane.pid, "tid": lane.tid, "ts": _us(at_ns), **more}
        self._timed.append((at_ns, order, event))


def _us(nanoseconds: int) -> float:
    """Microseconds, exact to the nanosecond."""
    return round(nanoseconds / 1000, 3)
