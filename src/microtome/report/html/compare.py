"""Two profiles side by side: the totals, and the calls that changed the most."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from math import isinf
from typing import Any

from microtome.report.html.data import numbers
from microtome.report.html.prose import plain_prose
from microtome.report.html.table import small_table
from microtome.results.diff import Costs, MetricChange, diff, has_known_calls, is_noise, own_costs
from microtome.results.metrics import Metric, compared_metrics, page_metrics, why_missing
from microtome.results.profile import Profile
from microtome.results.rows import Row
from microtome.units import UNKNOWN, write

#: The most calls in one run alone whose addresses the page has.
_NAMED = 5


def compare_data(profile: Profile, other: Profile) -> dict[str, Any]:
    """Return the metrics of both runs at the calls of this one, each without the calls inside it."""
    known = {row.address: row for row in other}
    both = [metric for metric in page_metrics() if not why_missing(profile, metric) and not why_missing(other, metric)]
    costs = {
        metric.name: [_costs(profile, other, row, known.get(row.address), metric) for row in profile] for metric in both
    }
    here = {row.address for row in profile}
    return {
        "here": {name: numbers(one for one, _ in pairs) for name, pairs in costs.items()},
        "there": {name: numbers(two for _, two in pairs) for name, pairs in costs.items()},
        "noise": {name: _noise(profile, known, name, pairs) for name, pairs in costs.items()},
        "shared": sum(row.address in known for row in profile if row.parent is not None or row.height == 1),
        "only_here": _addresses(row.address for row in profile if row.address not in known),
        "only_there": _addresses(row.address for row in other if row.address not in here),
    }


def _costs(profile: Profile, other: Profile, here: Row, there: Row | None, metric: Metric) -> Costs:
    """Return the costs of a call as a `Diff` has them, where both are known.

    A metric that does not add up is compared at the innermost calls.
    """
    if there is None:
        return None, None
    if metric.adds_up != "sum" and has_known_calls(profile, other, here, there, metric):
        return None, None
    costs = own_costs(profile, other, here, there, metric)
    return (None, None) if None in costs else costs


def _noise(profile: Profile, known: dict[str, Row], name: str, costs: list[Costs]) -> list[int]:
    """Return the indices of the compared calls whose passes overlap with those of the other run."""
    return [
        index
        for index, (row, pair) in enumerate(zip(profile, costs, strict=True))
        if None not in pair and is_noise(row, known[row.address], name)
    ]


def _addresses(alone: Iterable[str]) -> dict[str, Any]:
    """Return how many calls one run alone has, and the addresses of the first that are not inside another of them.

    >>> _addresses(["norm", "blocks.1", "blocks.1.attn", "blocks.10"])
    {'count': 4, 'first': ['norm', 'blocks.1', 'blocks.10']}
    """
    count = 0
    first: list[str] = []
    for address in alone:
        count += 1
        if len(first) < _NAMED and not (first and address.startswith(f"{first[-1]}.")):
            first.append(address)
    return {"count": count, "first": first}


def compare_table(profile: Profile, other: Profile) -> str:
    """Render the totals of both."""
    result = diff(profile, other)
    totals = {compared_metrics()[change.quantity].name: change for change in result.totals}
    rows = ""
    for metric in page_metrics():
        if not all(why_missing(run, metric) for run in (profile, other)):
            default = MetricChange(metric.name, metric.of(profile.total), metric.of(other.total))
            rows += _row(metric, profile, other, totals.get(metric.name, default))
    notes = "".join(f"<li>{escape(note)}</li>" for note in result.notes)
    here, there = (
        f"{escape(run.title)} on {escape(run.inputs)} ({escape(_machine(run.environment))})" for run in (profile, other)
    )
    return (
        f"<p>This run, before: {here}. The other, after: {there}.</p>"
        + small_table(("the whole model", "this run", "the other", "change"), rows)
        + (f'<ul class="caveats">{notes}</ul>' if notes else "")
    )


def _machine(environment: dict[str, str]) -> str:
    return environment.get("gpu") or environment.get("cpu") or "nothing measured"


def _row(metric: Metric, profile: Profile, other: Profile, change: MetricChange) -> str:
    cells = "".join(
        f'<td class="n" title="{escape(plain_prose(why_missing(run, metric) or ""))}">{write(value, metric.unit)}'
        for value, run in ((change.before, profile), (change.after, other))
    )
    growth = _growth(change)
    if change.is_noise and change.growth:
        growth = f'<span class="dim" title="{growth}: the middle halves of the passes of both meet">noise</span>'
    return f'<tr><th scope="row">{escape(metric.label)}{cells}<td class="n">{growth}'


def _growth(change: MetricChange) -> str:
    """
    >>> _growth(MetricChange("macs", 2.0, 3.0)), _growth(MetricChange("macs", 2, 2))
    ('+50.0 %', '=')
    >>> _growth(MetricChange("macs", None, 1)) == _growth(MetricChange("macs", 0, 1)) == UNKNOWN
    True
    """
    if change.growth is None or isinf(change.growth):
        return UNKNOWN
    return "=" if change.growth == 0 else f"{100 * change.growth:+.1f} %"
