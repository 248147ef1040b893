"""Files of events in time, read and checked as their readers do."""

from __future__ import annotations

import json
from typing import Any


def check_chrome(text: str) -> list[dict[str, Any]]:
    """The events of a Chrome trace, after the checks: times do not go back, slices nest, arrows join slices."""
    data = json.loads(text, parse_constant=_refuse)
    named = [event for event in data["traceEvents"] if event["ph"] == "M"]
    events = [event for event in data["traceEvents"] if event["ph"] != "M"]
    assert {event["ph"] for event in events} <= {"X", "C", "s", "f"}
    assert all(event["ts"] >= 0 for event in events)
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    processes = {event["pid"] for event in named if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in named if event["name"] == "thread_name"}
    for lane, several in lanes.items():
        assert lane[0] in processes
        _check_nesting([event for event in several if event["ph"] == "X"])
    assert {lane for lane, several in lanes.items() if any(event["ph"] == "X" for event in several)} <= threads
    _check_arrows(events)
    return events


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    ends: list[int] = []
    for one in slices:
        begin, end = _ns(one["ts"]), _ns(one["ts"]) + _ns(one["dur"])
        assert end > begin  # Perfetto puts a slice without length where it does not belong
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1], f"{one['name']} ends after what contains it"
        ends.append(end)


def _check_arrows(events: list[dict[str, Any]]) -> None:
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == sum(event["ph"] == "s" for event in events)
    for at, begin in begins.items():
        assert begin["ts"] <= ends[at]["ts"]
        assert (begin["name"], begin["cat"]) == (ends[at]["name"], ends[at]["cat"])
        assert begin["pid"] != ends[at]["pid"]
        assert ends[at]["bp"] == "e"
        for event in (begin, ends[at]):
            assert any(_covers(one, event) for one in events if one["ph"] == "X"), f"{event} is in no slice"
        there = [one for one in events if one["ph"] == "X" and _lane(one) == _lane(ends[at])]
        # Perfetto takes the slice that has begun last in the lane, whether or not it is over.
        assert _covers(max((one for one in there if one["ts"] <= ends[at]["ts"]), key=_begun), ends[at])


def _lane(event: dict[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]


def _begun(one: dict[str, Any]) -> tuple[int, int]:
    return _ns(one["ts"]), -_ns(one["dur"])


def _covers(one: dict[str, Any], event: dict[str, Any]) -> bool:
    return _lane(one) == _lane(event) and _ns(one["ts"]) <= _ns(event["ts"]) < _ns(one["ts"]) + _ns(one["dur"])


def check_speedscope(text: str) -> dict[str, Any]:
    """The file, after the checks of its format: known fields, balanced events, times that do not go back."""
    data: dict[str, Any] = json.loads(text, parse_constant=_refuse)
    assert data["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert data.keys() <= {"$schema", "shared", "profiles", "name", "activeProfileIndex", "exporter"}
    assert 0 <= data["activeProfileIndex"] < len(data["profiles"])
    frames = data["shared"]["frames"]
    assert all(frame.keys() <= {"name", "file", "line", "col"} and isinstance(frame["name"], str) for frame in frames)
    for profile in data["profiles"]:
        assert profile.keys() == {"type", "name", "unit", "startValue", "endValue", "events"}
        assert profile["type"] == "evented"
        assert profile["unit"] in ("bytes", "microseconds", "milliseconds", "nanoseconds", "none", "seconds")
        _check_events(profile, len(frames))
    return data


def _check_events(profile: dict[str, Any], frames: int) -> None:
    going: list[int] = []
    at = profile["startValue"]
    for event in profile["events"]:
        assert event.keys() == {"type", "frame", "at"}
        assert 0 <= event["frame"] < frames
        assert at <= event["at"] <= profile["endValue"]
        at = event["at"]
        if event["type"] == "O":
            going.append(event["frame"])
        else:
            assert event["type"] == "C"
            assert going.pop() == event["frame"]
    assert not going


def _ns(microseconds: float) -> int:
    return round(1000 * microseconds)


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")
