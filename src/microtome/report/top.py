"""The costliest layers by each metric, in one table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from microtome.errors import BadQuery
from microtome.report import table
from microtome.report.call_tree import NO_OPERATORS, operators_of
from microtome.report.notes import NOISE, is_noise, noise_note, profile_notes
from microtome.report.table import Bar, Column, Line, Report, Styled, Table
from microtome.results.metrics import METRICS, Metric
from microtome.results.profile import Profile
from microtome.results.rows import Row
from microtome.units import Scale, scale_of_largest, share

#: The width of the longest bar.
_BAR = 8


def metrics(profile: Profile) -> dict[str, Metric]:
    """Return the metrics that are ranked and known, by their names in files."""
    return {
        name: metric for name, metric in METRICS.items() if metric.is_ranked and metric.of(profile.total) is not None
    }


def ranking(profile: Profile, n: int = 10) -> dict[str, tuple[Row, ...]]:
    """Return the costliest calls by each metric, without the calls inside them and those that cost nothing.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> found = ranking(mt.profile(*zoo.build("tiny-resnet")), 2)
    >>> {name: [row.address for row in rows] for name, rows in found.items()}["params"]
    ['layer2.0.conv2', 'layer2.1.conv1']
    """
    if n < 1:
        raise BadQuery(f"expected n of 1 or more, got {n}")
    return {name: _most(profile, metric, n) for name, metric in metrics(profile).items()}


def text(profile: Profile, n: int = 10) -> str:
    return table.text(report(profile, n))


def as_json(profile: Profile, n: int = 10) -> str:
    """Return the ranking as JSON: for each metric the whole and the layers, raw numbers."""
    known = metrics(profile)
    data = {
        "kind": "top",
        "model": profile.model,
        "inputs": profile.inputs,
        "top": {
            name: {"whole": known[name].of(profile.total), "layers": [_record(profile, known, row) for row in rows]}
            for name, rows in ranking(profile, n).items()
        },
    }
    return json.dumps(data, indent=1) + "\n"


def report(profile: Profile, n: int = 10) -> Report:
    """Describe the ranking: a section for each metric, with bars of the metric that orders it."""
    known, ranked = metrics(profile), ranking(profile, n)
    every = [row for rows in ranked.values() for row in rows]
    scales = {
        name: scale_of_largest([profile.own_cost(metric, row) for row in every], metric.unit or "count")
        for name, metric in known.items()
    }
    columns = [
        Column("", align="left"),
        Column("module", align="left", importance=len(known), style="cyan"),
        *(Column(known[name].header, importance=at, unit=scales[name].unit) for at, name in enumerate(known)),
        Column("share", align="left", bar_width=_BAR),
    ]
    lines = []
    for name, rows in ranked.items():
        if rows:
            lines.append(Line((f"by {known[name].label}",), style="bold", kind="section"))
        for row in rows:
            costs = {column: profile.own_cost(metric, row) for column, metric in known.items()}
            numbers = {column: _number(cost, known[column], scales[column]) for column, cost in costs.items()}
            cells = [Styled(cell, "bold") if column == name else cell for column, cell in numbers.items()]
            lines.append(Line((_name(profile, row), row.type, *cells, _bar(known[name], profile, row, rows[0]))))
    is_noisy = any(is_noise(metric, profile.own_cost(metric, row)) for metric in known.values() for row in every)
    noise = [noise_note(profile)] if is_noisy else []
    return Report(
        f"{profile.heading}: the costliest layers",
        (Table(tuple(columns), tuple(lines), has_rules=False),),
        (*_missing(profile, ranked), *_NOTES, *noise, *_between_modules(profile, every), *profile_notes(profile)),
    )


_NOTES = (
    "costs are those of a layer itself, without the layers inside it; bars are relative to the first of each section",
    "peak memory: the most live bytes while a layer's own operators run, all weights included, and their share of the "
    "model's peak",
)


def _name(profile: Profile, row: Row) -> str:
    """Return the address of a call, with its own operators if there are calls inside it."""
    address = row.address or "(root)"
    return f"{address} {operators_of(row)}" if profile.children(row) else address


def _between_modules(profile: Profile, rows: list[Row]) -> Iterator[str]:
    """Yield what the time of a call without operators of its own is."""
    if any(profile.children(row) and operators_of(row) == NO_OPERATORS for row in rows):
        yield (
            f"{NO_OPERATORS}: code of a layer between the layers inside it, and what other programs took from the "
            "machine meanwhile"
        )


def _missing(profile: Profile, ranked: dict[str, tuple[Row, ...]]) -> Iterator[str]:
    """Yield the reason why a metric has no section."""
    if profile.total.macs is None:
        unknown = ", ".join(op.name for op in profile.coverage.unknown)
        yield f"MACs: unknown{f', no formula for {unknown}' if unknown else ''}"
    for name, metric in metrics(profile).items():
        if not ranked[name]:
            yield f"{metric.label}: 0 in every layer"


def _most(profile: Profile, metric: Metric, n: int) -> tuple[Row, ...]:
    costs = [(row, cost) for row in profile if (cost := profile.own_cost(metric, row) or 0) > 0]
    return tuple(row for row, _ in sorted(costs, key=lambda pair: -pair[1])[:n])


def _number(cost: float | None, metric: Metric, scale: Scale) -> str:
    return NOISE if is_noise(metric, cost) else scale.write(cost)


def _bar(metric: Metric, profile: Profile, row: Row, first: Row) -> Bar:
    """Return a bar relative to the costliest layer, redder for a larger share of the whole."""
    cost, whole = profile.own_cost(metric, row), metric.of(profile.total)
    part = cost / whole if whole else 0.0
    style = "red" if part >= 0.2 else "yellow" if part >= 0.05 else "green"
    return Bar(cost / profile.own_cost(metric, first), share(cost, whole), style)


def _record(profile: Profile, known: dict[str, Metric], row: Row) -> dict[str, Any]:
    costs = {name: profile.own_cost(metric, row) for name, metric in known.items()}
    return {"address": row.address, "type": row.type} | costs
