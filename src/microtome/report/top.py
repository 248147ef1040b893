"""The costliest layers by each metric, in one table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from microtome.errors import BadQuery, printable
from microtome.report.notes import notes_of
from microtome.report.shared_units import shared
from microtome.report.terminal import bar, fitted, plain_text, shortened
from microtome.results.metrics import METRICS, Metric
from microtome.results.profile import Profile
from microtome.results.rows import Row
from microtome.units import share

#: How long the longest bar is, and what it takes with the figure behind it.
_BAR, _HEAT = 8, 16
#: The longest that a layer's name is shown on a terminal, and the shortest that it is cut to.
_LONGEST, _SHORTEST = 40, 16
#: What a column takes beside its cells.
_BETWEEN = 2


def metrics(profile: Profile) -> dict[str, Metric]:
    """Those that are ranked and known, by their names in files."""
    return {
        name: metric for name, metric in METRICS.items() if metric.is_ranked and metric.of(profile.total) is not None
    }


def ranking(profile: Profile, n: int = 10) -> dict[str, tuple[Row, ...]]:
    """The calls that by themselves cost the most, by each metric; those that cost nothing are left out.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> found = ranking(mt.profile(*zoo.build("tiny-resnet")), 2)
    >>> {name: [row.address for row in rows] for name, rows in found.items()}["params"]
    ['layer2.0.conv2', 'layer2.1.conv1']
    """
    if n < 1:
        raise BadQuery(f"the top are 1 or more, got {n}")
    return {name: _most(profile, metric, n) for name, metric in metrics(profile).items()}


def text(profile: Profile, n: int = 10) -> str:
    """The table as text, with colours where the standard output is a terminal that wants them."""
    return plain_text(lambda width: renderable(profile, n, width))


def as_json(profile: Profile, n: int = 10) -> str:
    """The ranking as JSON: of each metric the whole, and the layers, raw numbers."""
    known = metrics(profile)
    data = {
        "kind": "top",
        "model": profile.model,
        "inputs": profile.inputs,
        "top": {
            name: {"whole": known[name].of(profile.total), "layers": [_record(known, row) for row in rows]}
            for name, rows in ranking(profile, n).items()
        },
    }
    return json.dumps(data, indent=1) + "\n"


def renderable(profile: Profile, n: int = 10, width: int = 140) -> Any:
    """What rich draws: a section for each metric, the same columns in all, and bars of the one that orders it."""
    known, found = metrics(profile), ranking(profile, n)
    every = [row for rows in found.values() for row in rows]
    scales = {
        name: shared([metric.own(row) for row in every], metric.unit or "count") for name, metric in known.items()
    }
    cells = {name: [scales[name].write(metric.own(row)) for row in every] for name, metric in known.items()}
    heads = {name: scales[name].head(metric.header) for name, metric in known.items()} | {"type": "module"}
    cells["type"] = [printable(row.type) for row in every]
    widths = {name: max(map(len, (heads[name], *column))) for name, column in cells.items()}
    longest = max((len(_name(row)) for row in every), default=0)
    columns = fitted(("type", *known), widths, (*known, "type"), width - _HEAT - min(longest, _SHORTEST))
    room = width - _HEAT - _BETWEEN - sum(widths[name] + _BETWEEN for name in columns)
    where = max(min(longest, _LONGEST, room), max(len(f"by {metric.label}") for metric in known.values()))
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, _BETWEEN, 0, 0))
    table.add_column("", no_wrap=True, min_width=where)
    for name in columns:
        ink, side = ("cyan", "left") if name == "type" else ("", "right")
        table.add_column(heads[name], justify=side, style=ink, min_width=widths[name], no_wrap=True)  # type: ignore[arg-type]
    table.add_column("share", min_width=_HEAT, no_wrap=True)
    at = 0
    for name, rows in found.items():
        if rows:
            table.add_row(Text(("\n" if at else "") + f"by {known[name].label}", style="bold"))
        for row in rows:
            texts = [Text(cells[column][at], style="bold" if column == name else "") for column in columns]
            table.add_row(Text(shortened(_name(row), where)), *texts, _heat(known[name], profile, row, rows[0]))
            at += 1
    left_out = [heads[name] for name in known if name not in columns]
    notes = [
        *_missing(profile, found),
        *_NOTES,
        *notes_of(profile),
        *([f"no room for: {', '.join(left_out)}"] if left_out else []),
    ]
    title = Text(printable(f"{profile.model} on {profile.inputs}: the costliest layers"), style="italic")
    return Stack(title, table, Text("\n".join(map(printable, notes)), style="dim"))


_NOTES = (
    "a layer counts without the layers inside it; bars are beside the first of each section",
    "peak memory: the most that lives at once while a layer runs, all weights included; its share is that of the peak",
)


def _missing(profile: Profile, found: dict[str, tuple[Row, ...]]) -> Iterator[str]:
    """Why there is no section of a metric."""
    if profile.total.macs is None:
        unknown = ", ".join(op.name for op in profile.coverage.unknown)
        yield f"MACs: not known{f', no formula for {unknown}' if unknown else ''}"
    for name, metric in metrics(profile).items():
        if not found[name]:
            yield f"{metric.label}: no layer has {'parameters' if name == 'params' else 'any'}"


def _most(profile: Profile, metric: Metric, n: int) -> tuple[Row, ...]:
    costs = [(row, cost) for row in profile if (cost := metric.own(row))]
    return tuple(row for row, _ in sorted(costs, key=lambda pair: -pair[1])[:n])


def _heat(metric: Metric, profile: Profile, row: Row, first: Row) -> Text:
    """A bar beside that of the costliest, the redder the more it is of the whole."""
    cost, whole = metric.own(row), metric.of(profile.total)
    part = cost / whole if whole else 0.0
    ink = "red" if part >= 0.2 else "yellow" if part >= 0.05 else "green"
    return Text.assemble((bar(cost, metric.own(first), _BAR), ink), f"{share(cost, whole):>8}")


def _name(row: Row) -> str:
    return printable(row.address) or "(root)"


def _record(known: dict[str, Metric], row: Row) -> dict[str, Any]:
    return {"address": row.address, "type": row.type} | {name: metric.own(row) for name, metric in known.items()}
