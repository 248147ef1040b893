"""The data of the page's script: a profile as columns of plain numbers, in a JSON block."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import isfinite
from typing import Any

from microtome.report.call_tree import tree_rows
from microtome.report.html.prose import plain_prose
from microtome.report.notes import interval_name
from microtome.results.metrics import Metric, page_metrics, why_missing
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
        "own": _own(profile, indices),
        "spreads": _spreads(profile),
        "intervals": {name: interval_name(spread) for name, spread in profile.total.spreads.items()},
    }


def _own(profile: Profile, indices: dict[str, int]) -> dict[str, Any]:
    """Return the operators between modules that have a row, as columns, with the index of the call that runs them."""
    rows = [one for one in tree_rows(profile, expand=True) if one.is_own]
    known = [metric for metric in page_metrics() if why_missing(profile, metric) is None]
    return {
        "parent": [indices[one.row.address] for one in rows],
        "name": [one.name for one in rows],
        "shared": [one.row.shared_params for one in rows],
        "values": {metric.name: numbers(metric.of(one.row) for one in rows) for metric in known},
    }


def metrics(profile: Profile) -> list[dict[str, Any]]:
    """Return the metrics of the page, with the reason where the profile lacks one."""
    shown = shown_metrics(profile)
    return [
        {
            "name": metric.name,
            "label": metric.label,
            "unit": metric.unit,
            "description": metric.description,
            "is_sum": metric.adds_up == "sum",
            "is_measured": metric.is_measured,
            "header": header(metric),
            "base": bar_base(profile, metric),
            "is_shown": metric in shown,
            "unknown": metric.why_not_each,
            "missing": None if (why := why_missing(profile, metric)) is None else plain_prose(why),
        }
        for metric in page_metrics()
    ]


def memory(profile: Profile) -> dict[str, Any] | None:
    line = profile.timeline
    if line is None or line.peak is None:
        return None
    return {
        "live_bytes": line.live_bytes,
        "calls": line.calls,
        "forward": line.forward,
        "peak": line.peak,
        "model_bytes": model_bytes(profile),
    }


def model_bytes(profile: Profile) -> int:
    """Return the bytes of weights and buffers, which are live in the whole run; 0 where that is not known."""
    line = profile.timeline
    return 0 if line is None else sum(one.nbytes for one in line.alive if one.kind in ("parameter", "buffer"))


#: The metrics of the table by importance, after those that are always shown.
_IMPORTANCE = (
    "device_s", "time_s", "energy_j", "load_gpu", "load_cpu", "params", "macs", "peak_bytes", "backward_device_s",
    "backward_s", "flops", "backward_flops", "saved_bytes", "moved_bytes", "load_watts", "measured_peak_bytes",
)  # fmt: skip
#: The most metrics that fit beside the names in a window of 1280 pixels.
_FITTING = 7


def shown_metrics(profile: Profile) -> list[Metric]:
    """Return the metrics that the table shows by default: the most important, as many as fit."""
    known = [metric.name for metric in page_metrics() if metric.shown == "table" and not why_missing(profile, metric)]
    chosen = [name for name in (*_IMPORTANCE, *known) if name in known]
    fitting = list(dict.fromkeys(chosen))[:_FITTING]
    return [metric for metric in page_metrics() if metric.name in fitting]


def header(metric: Metric) -> str:
    """Return the header of a column, which must not be that of the output's shape."""
    return metric.header if metric.header != "output" else metric.label


def bar_base(profile: Profile, metric: Metric) -> int:
    """Return where the bars of a metric begin: a peak's at what the model holds all the time, which no call adds."""
    if metric.adds_up != "max":
        return 0
    return min([model_bytes(profile), *(value for row in profile if (value := metric.of(row)))])


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
