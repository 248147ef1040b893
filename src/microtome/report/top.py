"""The costliest layers by each metric, in one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from microtome.errors import BadQuery, printable
from microtome.report.notes import notes_of
from microtome.report.shared_units import Kind, shared
from microtome.report.terminal import bar, fitted, plain_text, shortened
from microtome.results.profile import Profile
from microtome.results.rows import Row
from microtome.units import UNKNOWN, share

#: How long the longest bar is, and what it takes with the figure behind it.
_BAR, _HEAT = 8, 16
#: The longest that a layer's name is shown on a terminal, and the shortest that it is cut to.
_LONGEST, _SHORTEST = 40, 16
#: What a column takes beside its cells.
_BETWEEN = 2


class TopMetric(NamedTuple):
    """Something that layers cost.

    Attributes:
        name: What it is called in a table and in files.
        of: What a call costs by itself; None: not known, or, of memory, not its own.
        whole: What the model costs, of which that is a share.
    """

    name: str
    field: str
    kind: Kind
    of: Callable[[Row], float | None]
    whole: float | None


def metrics(profile: Profile) -> dict[str, TopMetric]:
    """Those that are known, by their names in files."""
    found = [_own(profile, "params", "params", "count"), _own(profile, "MACs", "macs", "count")]
    found.append(_peak(profile, "memory", "peak_bytes"))
    found.append(_peak(profile, "measured", "measured_peak_bytes"))
    found += [_own(profile, "time", "time_s", "seconds"), _own(profile, "device", "device_s", "seconds")]
    found.append(_own(profile, "energy", "energy_j", "joules"))
    return {metric.field: metric for metric in found if metric.whole is not None}


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
            name: {"whole": known[name].whole, "layers": [_record(known, row) for row in rows]}
            for name, rows in ranking(profile, n).items()
        },
    }
    return json.dumps(data, indent=1) + "\n"


def renderable(profile: Profile, n: int = 10, width: int = 140) -> Any:
    """What rich draws: a section for each metric, the same columns in all, and bars of the one that orders it."""
    known, found = metrics(profile), ranking(profile, n)
    every = [row for rows in found.values() for row in rows]
    scales = {name: shared([metric.of(row) for row in every], metric.kind) for name, metric in known.items()}
    cells = {name: [scales[name].write(metric.of(row)) for row in every] for name, metric in known.items()}
    heads = {name: scales[name].head(metric.name) for name, metric in known.items()} | {"type": "module"}
    cells["type"] = [printable(row.type) for row in every]
    widths = {name: max(map(len, (heads[name], *column))) for name, column in cells.items()}
    longest = max((len(_name(row)) for row in every), default=0)
    columns = fitted(("type", *known), widths, (*known, "type"), width - _HEAT - min(longest, _SHORTEST))
    room = width - _HEAT - _BETWEEN - sum(widths[name] + _BETWEEN for name in columns)
    where = max(min(longest, _LONGEST, room), len("by measured"))
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, _BETWEEN, 0, 0))
    table.add_column("", no_wrap=True, min_width=where)
    for name in columns:
        ink, side = ("cyan", "left") if name == "type" else ("", "right")
        table.add_column(heads[name], justify=side, style=ink, min_width=widths[name], no_wrap=True)  # type: ignore[arg-type]
    table.add_column("share", min_width=_HEAT, no_wrap=True)
    at = 0
    for name, rows in found.items():
        if rows:
            table.add_row(Text(("\n" if at else "") + f"by {known[name].name}", style="bold"))
        for row in rows:
            texts = [Text(cells[column][at], style="bold" if column == name else "") for column in columns]
            table.add_row(Text(shortened(_name(row), where)), *texts, _heat(known[name], row, rows[0]))
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
    "memory: the most that lives at once while a layer runs, all weights included; its share is that of the peak",
)


def _missing(profile: Profile, found: dict[str, tuple[Row, ...]]) -> Iterator[str]:
    """Why there is no section of a metric."""
    if profile.total.macs is None:
        unknown = ", ".join(op.name for op in profile.coverage.unknown)
        yield f"MACs: not known{f', no formula for {unknown}' if unknown else ''}"
    for name, metric in metrics(profile).items():
        if not found[name]:
            yield f"{metric.name}: no layer has {'parameters' if name == 'params' else 'any'}"


def _own(profile: Profile, name: str, field: str, kind: Kind) -> TopMetric:
    return TopMetric(name, field, kind, lambda row: getattr(row.own, field), getattr(profile.total, field))


def _peak(profile: Profile, name: str, field: str) -> TopMetric:
    """Of calls that contain others it is that of those."""
    return TopMetric(
        name,
        field,
        "bytes",
        lambda row: getattr(row, field) if row.height == 1 else None,
        getattr(profile.total, field),
    )


def _most(profile: Profile, metric: TopMetric, n: int) -> tuple[Row, ...]:
    costly = [row for row in profile if metric.of(row)]
    return tuple(sorted(costly, key=lambda row: -(metric.of(row) or 0))[:n])


def _heat(metric: TopMetric, row: Row, first: Row) -> Text:
    """A bar beside that of the costliest, the redder the more it is of the whole."""
    part = (metric.of(row) or 0) / metric.whole if metric.whole else 0.0
    ink = "red" if part >= 0.2 else "yellow" if part >= 0.05 else "green"
    told = share(metric.of(row), metric.whole) if metric.whole else UNKNOWN
    return Text.assemble((bar(metric.of(row), metric.of(first), _BAR), ink), f"{told:>8}")


def _name(row: Row) -> str:
    return printable(row.address) or "(root)"


def _record(known: dict[str, TopMetric], row: Row) -> dict[str, Any]:
    return {"address": row.address, "type": row.type} | {name: metric.of(row) for name, metric in known.items()}
