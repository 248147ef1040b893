"""The table of a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from microtome.report.call_columns import AT_LEAST, OWN, CallColumn, at_least, columns_of, leaves_out, write_metric
from microtome.report.call_tree import OWN_SHARE, hidden_shares, tree_rows
from microtome.report.capping import cap, with_gaps
from microtome.report.notes import NOISE, noise_note, profile_notes
from microtome.report.row_selection import (
    NAME_HEADERS,
    RowSelection,
    deepest,
    depth_of,
    resolve_columns,
    rows_of,
    whole_tree,
)
from microtome.report.table import Bar, Cell, Column, Line, Medium, Note, Report, Table, gap, plain
from microtome.results.metrics import IMPORTANCE, METRICS, advise, why_missing
from microtome.results.profile import Profile
from microtome.results.rows import Group, Row, flat
from microtome.units import SCALED, scale_of_largest, share, write

#: The width of the longest bar: with it, the counts of a small model fit in 80 columns.
_BAR = 4
#: The most rows in a notebook.
_NOTEBOOK_ROWS = 40
#: The metrics by which calls are costly: the first that is known.
_COSTS = ("device_s", "time_s", "flops", "params")
#: The columns that may have bars: the first that there is.
_BARS = ("device_share", "time_share", "share")
_STYLES = {"type": "cyan", "outputs": "dim"}


def report(profile: Profile, view: RowSelection | None = None, medium: Medium = "terminal") -> Report:
    """Describe the selected calls or groups; Markdown has every call by default.

    On a terminal the numbers of a column share a unit.
    """
    view = view or RowSelection()
    if medium == "markdown":
        view = whole_tree(profile, view)
    view = resolve_columns(view)
    selected = rows_of(profile, view)
    kept = _capped(profile, [row for row, _ in selected]) if medium == "html" else list(range(len(selected)))
    pairs = [selected[index] for index in kept]
    rows = [row for row, _ in pairs]
    known = columns_of(view.by)
    default = (name for name, column in known.items() if column.is_shown(profile) or name == view.sort)
    names = tuple(dict.fromkeys(view.columns or default))
    bars = next((name for name in _BARS if name in names), None) if medium != "markdown" else None
    columns: list[Column] = []
    cells: list[list[Cell]] = []
    for name in names:
        unit, texts = _texts(profile, view, known[name], rows, medium)
        columns.append(_column(name, known[name], unit, view, has_bars=name == bars))
        cells.append(_bars(profile, known[name], texts, rows) if name == bars else texts)
    by_row = list(zip(*cells, strict=True)) or [()] * (len(rows) + 1)
    named = [Line((name, *row)) for (_, name), row in zip(pairs, by_row, strict=False)]
    lines = [
        line if isinstance(line, Line) else gap(line, len(columns)) for line in with_gaps(kept, named, len(selected))
    ]
    lines.append(Line(("total", *by_row[-1]), style="bold", kind="total"))
    table = Table((Column(NAME_HEADERS[view.by], align="left", is_name=True), *columns), tuple(lines))
    notes = (
        *_missing(profile, [known[name] for name in names], rows),
        *profile_notes(profile),
        *_notes(profile, view, dict(zip(columns, cells, strict=True)), pairs),
    )
    return Report(profile.heading, (table,), notes, figures=_figures(profile))


def _capped(profile: Profile, rows: list[Any]) -> list[int]:
    """Return the indices of the rows that a notebook shows: all, or the first, the last and the costliest."""
    metric = next(METRICS[name] for name in _COSTS if METRICS[name].of(profile.total) is not None)
    calls = [(index, row) for index, row in enumerate(rows) if isinstance(row, Row) and not _is_own(row)]
    indices = {row.address: index for index, row in calls}
    parents = [
        indices.get(row.parent or "") if isinstance(row, Row) and row.parent is not None else None for row in rows
    ]
    return cap([metric.of(row) for row in rows], _NOTEBOOK_ROWS, parents)


def _is_own(row: Any) -> bool:
    """Whether a row is that of a call without the calls inside it."""
    return isinstance(row, Row) and row.type.endswith(OWN)


def records(profile: Profile, view: RowSelection | None = None) -> list[dict[str, Any]]:
    """Return a record for each selected row, by default for every call, with all its numbers."""
    view = replace(resolve_columns(whole_tree(profile, view or RowSelection())), calls_only=True)
    pairs = [(row, flat(row) if isinstance(row, Row) else _flat_group(row)) for row, _ in rows_of(profile, view)]
    if not view.columns:
        return [record for _, record in pairs]
    columns = [columns_of(view.by)[name] for name in view.columns]
    # The type distinguishes what is a call's own, whose address is that of the call.
    names = ("address", "type", "name") if any(_is_own(row) for row, _ in pairs) else ("address", "name")
    selected: list[dict[str, Any]] = []
    for row, record in pairs:
        selected.append({name: record[name] for name in names if name in record})
        for column in columns:
            selected[-1] |= column.raw(row, record, profile)
    return selected


def _flat_group(group: Group) -> dict[str, Any]:
    known = [metric for metric in METRICS.values() if metric.known_of != "calls"]
    return {"name": group.name, "runs": group.runs} | {metric.file_name: metric.of(group) for metric in known}


def _figures(profile: Profile) -> tuple[tuple[str, str], ...]:
    """Return the total of each ranked metric and of FLOPs, and the peak of the whole run."""
    total = profile.total
    figures = []
    for metric in METRICS.values():
        if (metric.is_ranked or metric.name == "flops") and metric.of(total) is not None:
            value = write(profile.peak_bytes if metric.name == "peak_bytes" else metric.of(total), metric.unit)
            is_less = metric.counted_by is not None and leaves_out(profile, metric, None)(total)
            figures.append((metric.label, at_least(value) if is_less else value))
    return tuple(figures)


# -- cells -------------------------------------------------------------------------------------------------------------


def _column(name: str, column: CallColumn, unit: str, view: RowSelection, *, has_bars: bool) -> Column:
    """Describe a column; one that the selection names or sorts by is never dropped."""
    rank = IMPORTANCE.index(name) if name in IMPORTANCE else len(IMPORTANCE)
    return Column(
        column.header,
        align="left" if column.metric is None or has_bars else "right",
        importance=None if view.columns or name == view.sort else rank,
        style="green" if column.part == "share" else _STYLES.get(name, ""),
        bar_width=_BAR if has_bars else 0,
        unit=unit,
    )


def _texts(
    profile: Profile, view: RowSelection, column: CallColumn, rows: list[Any], medium: Medium
) -> tuple[str, list[Cell]]:
    """Return the unit that the numbers of a column share, and its cells, the last of which is the total."""
    every, metric, unit = (*rows, profile.total), column.metric, ""
    cells = [column.cell(row, profile) for row in every]
    if column.part == "share" or column.field == "type" or (metric is not None and metric.name == "runs"):
        cells[-1] = ""
    if metric is None or column.part != "value":
        return unit, [*cells]
    numbers = [metric.of(row) for row in every]
    if medium == "terminal" and metric.unit in SCALED:
        scale = scale_of_largest(numbers, metric.unit)
        cells = [write_metric(metric, row, scale.write) for row in every]
        unit = scale.unit
    if metric.counted_by is not None and profile.coverage.unknown:
        marks = [*map(leaves_out(profile, metric, view.by), rows), leaves_out(profile, metric, None)(profile.total)]
        cells = [at_least(cell) if is_marked else cell for cell, is_marked in zip(cells, marks, strict=True)]
    return unit, [*cells]


def _bars(profile: Profile, column: CallColumn, cells: list[Cell], rows: list[Any]) -> list[Cell]:
    """Return the cells of a column of shares with bars."""
    assert column.metric is not None
    whole = column.metric.of(profile.total) or 1
    bars = [Bar((column.metric.of(row) or 0) / whole, plain(cell)) for row, cell in zip(rows, cells, strict=False)]
    return [*bars, ""]


def _missing(profile: Profile, columns: list[CallColumn], rows: list[Any]) -> list[str]:
    """Return the reasons why columns that the selection names have no values, or an own column raised."""
    metrics = dict.fromkeys(column.metric for column in columns if column.metric is not None)
    reasons = {metric.label: why_missing(profile, metric) for metric in metrics if metric.requires}
    raised = [metric.why_raised((*rows, profile.total)) for metric in metrics]
    return [*(f"{label}: {why}" for label, why in reasons.items() if why is not None), *filter(None, raised)]


def _notes(
    profile: Profile, view: RowSelection, columns: dict[Column, list[Cell]], pairs: list[tuple[Any, str]]
) -> list[str | Note]:
    """Return notes that explain the signs in the cells, and how many rows are left out."""

    def where(sign: str) -> tuple[Column, ...]:
        return tuple(column for column, cells in columns.items() if any(sign in plain(cell) for cell in cells))

    notes: list[str | Note] = []
    if shared := tuple(column for column in where("(") if column.header == METRICS["params"].header):
        notes.append(
            Note("parameters in brackets are counted elsewhere: tied weights, or a module that runs again", shared)
        )
    if marked := where(AT_LEAST):
        notes.append(
            Note(f"{AT_LEAST.strip()}: without operators that have no formula; shares are of what is counted", marked)
        )
    if noisy := tuple(column for column, cells in columns.items() if NOISE in map(plain, cells)):
        notes.append(Note(noise_note(profile), noisy))
    if view.by == "type" or (view.sort is not None and (view.by, view.depth, view.granularity) == (None,) * 3):
        notes.append("costs are those of a layer itself, without the layers inside it")
    elif own := where(OWN):
        notes.append(Note(f"{OWN}: the layer itself, without the layers inside it", own))
    elif not view.is_tree and (name := next((name for row, name in pairs if _is_own(row)), None)) is not None:
        notes.append(f"{name}: the layer itself, without the layers inside it")
    if view.is_tree:
        tree = tree_rows(profile, expand=view.expand, calls_only=view.calls_only)
        depth = depth_of(tree) if view.depth is None else view.depth
        if any(row.blocks > 1 and row.depth <= depth for row in tree):
            every = advise("show(expand=True)", "--all")
            notes.append(f"×: identical blocks, added up; {every} lists each")  # noqa: RUF001
        hidden = hidden_shares(profile, depth, expand=view.expand)
        label, most = max(hidden.items(), key=lambda item: item[1], default=("", 0.0))
        if most >= OWN_SHARE:
            notes.append(
                f"operators between modules have a row from {100 * OWN_SHARE:g} % of the model in any column; "
                f"the others have {share(most, 1)} of {label} together"
            )
        if view.depth is None and depth < deepest(profile):
            notes.append(f"shown to depth {depth} of {deepest(profile)}")
    whole = len(rows_of(profile, replace(view, top=None)))
    if len(pairs) < whole:
        notes.append(f"{len(pairs)} of {whole} rows shown; the total includes all")
    return notes
