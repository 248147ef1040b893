"""The data of the page's script: a profile as columns of plain numbers, in a JSON block."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import isfinite
from typing import Any

from microtome.results.metrics import page_metrics, why_missing
from microtome.results.profile import Profile
from microtome.units import shape

#: Significant digits of measured numbers; no measurement has more.
_DIGITS = 7


def block(name: str, data: Any) -> str:
    """Render data as an element of the page. No string in it can end the element, since every `<` is escaped."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def columns(profile: Profile) -> dict[str, Any]:
    """Return the calls as columns, in the order of the profile."""
    indices = {row.address: at for at, row in enumerate(profile)}
    types = {name: at for at, name in enumerate(dict.fromkeys(row.type for row in profile))}
    return {
        "address": [row.address for row in profile],
        "parent": [-1 if row.parent is None else indices[row.parent] for row in profile],
        "types": list(types),
        "type": [types[row.type] for row in profile],
        "output": [", ".join(shape(tensor.shape) for tensor in row.outputs) for row in profile],
        "shared": [row.shared_params for row in profile],
        "values": {
            metric.name: numbers(metric.of(row) for row in profile)
            for metric in page_metrics()
            if why_missing(profile, metric) is None
        },
        "spreads": _spreads(profile),
    }


def metrics(profile: Profile) -> list[dict[str, Any]]:
    """Return the metrics of the page, with the reason where the profile lacks one."""
    return [
        {
            "name": metric.name,
            "label": metric.label,
            "unit": metric.unit,
            "description": metric.description,
            "is_sum": metric.adds_up == "sum",
            "is_shown": metric.shown == "table",
            "unknown": metric.why_not_each,
            "missing": why_missing(profile, metric),
        }
        for metric in page_metrics()
    ]


def memory(profile: Profile) -> dict[str, Any] | None:
    line = profile.timeline
    if line is None or line.peak is None:
        return None
    model_bytes = sum(one.nbytes for one in line.alive if one.kind in ("parameter", "buffer"))
    return {
        "live_bytes": line.live_bytes,
        "calls": line.calls,
        "forward": line.forward,
        "peak": line.peak,
        "model_bytes": model_bytes,
    }


def _spreads(profile: Profile) -> dict[str, list[list[float | None] | None]]:
    """Return the intervals of measured metrics, by their names; None where a call lacks one."""
    names = [metric.name for metric in page_metrics() if metric.name in profile.total.spreads]
    return {
        name: [
            None if (spread := row.spreads.get(name)) is None else [_number(spread.low), _number(spread.high)]
            for row in profile
        ]
        for name in names
    }


def numbers(values: Iterable[float | None]) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float | None) -> float | None:
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{_DIGITS}g}") if isfinite(value) else None
