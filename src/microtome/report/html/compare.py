"""Two profiles side by side: the totals, and the calls that changed the most."""

from __future__ import annotations

from html import escape
from typing import Any

from microtome.report.html.data import numbers
from microtome.report.html.table import small_table
from microtome.results.diff import diff
from microtome.results.metrics import Metric, compared_metrics, page_metrics, why_missing
from microtome.results.profile import Profile
from microtome.units import UNKNOWN, write


def compare_data(profile: Profile, other: Profile) -> dict[str, Any]:
    """Return the other run's metrics at the calls of this one, None where it lacks the call."""
    known = {row.address: row for row in other}
    rows = [known.get(row.address) for row in profile]
    both = [metric for metric in page_metrics() if not why_missing(profile, metric) and not why_missing(other, metric)]
    here = {row.address for row in profile}
    return {
        "values": {metric.name: numbers(None if row is None else metric.of(row) for row in rows) for metric in both},
        "noise": _noise(profile, other),
        "only_here": sum(row is None for row in rows),
        "only_there": sum(row.address not in here for row in other),
    }


def _noise(profile: Profile, other: Profile) -> dict[str, list[int]]:
    """Return, by metric, the indices of the layers whose passes overlap with those of the other run."""
    compared = compared_metrics()
    real = {
        (layer.address, compared[change.quantity].name)
        for layer in diff(profile, other).layers
        for change in layer.changes
        if not change.is_noise
    }
    there = {(row.address, name) for row in other if not other.children(row) for name in row.spreads}
    here = [(at, row) for at, row in enumerate(profile) if not profile.children(row)]
    return {
        name: [
            at
            for at, row in here
            if name in row.spreads and (row.address, name) in there and (row.address, name) not in real
        ]
        for name in (metric.name for metric in compared.values())
    }


def compare_table(profile: Profile, other: Profile) -> str:
    """Render the totals of both."""
    found = diff(profile, other)
    compared = compared_metrics()
    noise = {compared[one.quantity].name for one in found.totals if one.is_noise}
    known = [metric for metric in page_metrics() if not all(why_missing(one, metric) for one in (profile, other))]
    whole = {compared[one.quantity].name: (one.before, one.after) for one in found.totals}
    rows = "".join(
        _row(metric, profile, other, whole.get(metric.name), is_noise=metric.name in noise) for metric in known
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
    machines = [
        one.environment.get("gpu") or one.environment.get("cpu") or "nothing measured" for one in (profile, other)
    ]
    return (
        f"<p>This run, before: {escape(profile.model)} on {escape(profile.inputs)} ({escape(machines[0])}). "
        f"The other, after: {escape(other.model)} on {escape(other.inputs)} ({escape(machines[1])}).</p>"
        + small_table(("the whole model", "this run", "the other", "change"), rows)
        + (f'<ul class="caveats">{notes}</ul>' if notes else "")
    )


def _row(
    metric: Metric,
    profile: Profile,
    other: Profile,
    whole: tuple[float | None, float | None] | None,
    *,
    is_noise: bool,
) -> str:
    here, there = whole or (metric.of(profile.total), metric.of(other.total))
    cells = "".join(
        f'<td class="n" title="{escape(why_missing(one, metric) or "")}">{write(value, metric.unit)}'
        for value, one in ((here, profile), (there, other))
    )
    grown = change(here, there)
    if is_noise and here != there:
        grown = f'<span class="dim" title="{grown}: the middle halves of the passes of both meet">noise</span>'
    return f'<tr><th scope="row">{escape(metric.label)}{cells}<td class="n">{grown}'


def change(here: float | None, there: float | None) -> str:
    """Format the change from this run to the other.

    >>> change(2.0, 3.0), change(2, 2), change(None, 1) == change(0, 1) == UNKNOWN
    ('+50.0 %', '=', True)
    """
    if here is None or there is None or (not here and there):
        return UNKNOWN
    return "=" if here == there else f"{100 * (there - here) / here:+.1f} %"
