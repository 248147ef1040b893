"""A measured profile for speedscope: https://www.speedscope.app/file-format-schema.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from microtome.report.trace_events.slices import Slice, device, host
from microtome.results.profile import Profile


def speedscope(profile: Profile) -> str:
    """Its file format: frames opened and closed, on the host and, where there was one, on the GPU."""
    calls = host(profile)
    frames = [{"name": _name(one)} for one in calls]
    index = {one.row.address: at for at, one in enumerate(calls)}
    tracks = {"host": calls, "GPU, without its idle time": device(profile)}
    data = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "shared": {"frames": frames},
        "profiles": [_evented(name, slices, index) for name, slices in tracks.items() if slices],
        "name": f"{profile.model} on {profile.inputs}",
        "activeProfileIndex": 0,
        "exporter": "microtome",
    }
    return json.dumps(data) + "\n"


def _name(one: Slice) -> str:
    return f"{one.row.address} ({one.row.type})" if one.row.address else one.row.type


def _evented(name: str, slices: Sequence[Slice], index: dict[str, int]) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    going: list[Slice] = []

    def close(until: str | None) -> None:
        """Close the open calls up to the one with this address."""
        while going and going[-1].row.address != until:
            done = going.pop()
            events.append({"type": "C", "frame": index[done.row.address], "at": done.end_ns})

    for one in slices:
        close(one.row.parent)
        going.append(one)
        events.append({"type": "O", "frame": index[one.row.address], "at": one.begin_ns})
    close(None)
    return {
        "type": "evented",
        "name": name,
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": slices[0].end_ns,
        "events": events,
    }
