"""The table of a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from microtome.report.columns import AT_LEAST, OWN, CallColumn, at_least, columns_of, leaves_out
from microtome.report.notes import notes_of
from microtome.report.row_selection import RowSelection, check, deepest, depth_of, rows_of, whole_tree
from microtome.report.table import Bar, Cell, Column, Line, Medium, Note, Report, Table, plain
from microtome.results.metrics import IMPORTANCE, METRICS
from microtome.results.profile import Profile
from microtome.results.rows import Group, Row, flat
from microtome.units import SCALED, scale_of_all, write

#: The width of the longest bar: with it, the counts of a small model fit in 80 columns.
_BAR = 4
#: The most rows in a notebook.
_NOTEBOOK_ROWS = 40
#: The columns that may have bars: the first that there is.
_BARS = ("device_share", "time_share", "share")
_STYLES = {"type": "cyan", "outputs": "dim"}


def report(profile: Profile, view: RowSelection | None = None, medium: Medium = "terminal") -> Report:
    """The calls or groups that are selected; in Markdown every call, if it is not said which.

    On a terminal the numbers of a column have a unit in common.
    """
    view = view or RowSelection()
    if medium == "markdown":
        view = whole_tree(profile, view)
    check(view)
    pairs = rows_of(profile, view)[: _NOTEBOOK_ROWS if medium == "html" else None]
    rows = [row for row, _ in pairs]
    known = columns_of(view.by)
    names = tuple(dict.fromkeys(view.columns)) or tuple(
        name for name, column in known.items() if column.is_shown(profile)
    )
    bars = next((name for name in _BARS if name in names), None) if medium != "markdown" else None
    made = {name: _column(profile, view, known[name], rows, medium) for name in names}
    if bars is not None:
        made[bars] = _with_bars(profile, known[bars], made[bars], rows)
    columns = {name: _styled(name, known[name], unit, view, bars) for name, (unit, _) in made.items()}
    cells = [made[name][1] for name in names]
    lines = [Line((name, *row)) for (_, name), *row in zip(pairs, *(column[:-1] for column in cells), strict=True)]
    lines.append(Line(("total", *(column[-1] for column in cells)), style="bold", kind="total"))
    first = {None: "call", "module": "module", "type": "module", "op": "operator"}[view.by]
    table = Table((Column(first, right=False, is_name=True), *columns.values()), tuple(lines))
    notes = [*notes_of(profile), *_notes(profile, view, {columns[name]: made[name][1] for name in names}, len(rows))]
    return Report(f"{profile.model} on {profile.inputs}", (table,), tuple(notes), figures=_figures(profile))


def records(profile: Profile, view: RowSelection | None = None) -> list[dict[str, Any]]:
    """Every row of the view, all calls if it does not say which, with all their numbers."""
    view = whole_tree(profile, view or RowSelection())
    check(view)
    pairs = [(row, flat(row) if isinstance(row, Row) else _flat_group(row)) for row, _ in rows_of(profile, view)]
    if not view.columns:
        return [record for _, record in pairs]
    chosen: list[dict[str, Any]] = []
    for row, record in pairs:
        chosen.append({name: record[name] for name in ("address", "name") if name in record})
        for name in view.columns:
            chosen[-1] |= columns_of(view.by)[name].raw(row, record, profile)
    return chosen


def _flat_group(group: Group) -> dict[str, Any]:
    known = [metric for metric in METRICS.values() if metric.known_of != "calls"]
    return {"name": group.name, "runs": group.runs} | {metric.file_name: metric.of(group) for metric in known}


def _figures(profile: Profile) -> tuple[tuple[str, str], ...]:
    """The total of each metric that is ranked, FLOPs, and the peak of the whole run."""
    total = profile.total
    figures = []
    for metric in METRICS.values():
        if (metric.is_ranked or metric.name == "flops") and metric.of(total) is not None:
            value = write(profile.peak_bytes if metric.name == "peak_bytes" else metric.of(total), metric.unit)
            is_less = metric.counted_by is not None and leaves_out(profile, metric, None)(total)
            figures.append((metric.label, at_least(value) if is_less else value))
    return tuple(figures)


# -- cells -------------------------------------------------------------------------------------------------------------


def _styled(name: str, column: CallColumn, unit: str, view: RowSelection, bars: str | None) -> Column:
    """Columns that were named are never left out."""
    rank = IMPORTANCE.index(name) if name in IMPORTANCE else len(IMPORTANCE)
    return Column(
        column.header,
        right=column.right and name != bars,
        importance=None if view.columns else rank,
        style="green" if column.part == "share" else _STYLES.get(name, ""),
        bar_width=_BAR if name == bars else 0,
        unit=unit,
    )


def _column(
    profile: Profile, view: RowSelection, column: CallColumn, rows: list[Any], medium: Medium
) -> tuple[str, list[Cell]]:
    """The unit that the numbers of a column have in common, and its cells; the last is that of the total."""
    every, metric, unit = (*rows, profile.total), column.metric, ""
    cells = [column.cell(row, profile) for row in every]
    if column.part == "share" or column.field == "type" or (metric is not None and metric.name == "runs"):
        cells[-1] = ""
    if metric is None or column.part != "value":
        return unit, [*cells]
    numbers = [metric.of(row) for row in every]
    numbers += [getattr(row, "shared_params", 0) for row in every if metric.name == "params"]
    if medium == "terminal" and metric.unit in SCALED and (scale := scale_of_all(numbers, metric.unit)) is not None:
        cells = [column.number(row, scale.write) for row in every]
        unit = scale.unit
    if metric.counted_by is not None and profile.coverage.unknown:
        marks = [*map(leaves_out(profile, metric, view.by), rows), leaves_out(profile, metric, None)(profile.total)]
        cells = [at_least(cell) if is_marked else cell for cell, is_marked in zip(cells, marks, strict=True)]
    return unit, [*cells]


def _with_bars(
    profile: Profile, column: CallColumn, made: tuple[str, list[Cell]], rows: list[Any]
) -> tuple[str, list[Cell]]:
    assert column.metric is not None
    whole = column.metric.of(profile.total) or 1
    unit, cells = made
    bars = [Bar((column.metric.of(row) or 0) / whole, plain(cell)) for row, cell in zip(rows, cells, strict=False)]
    return unit, [*bars, ""]


def _notes(profile: Profile, view: RowSelection, columns: dict[Column, list[Cell]], shown: int) -> list[str | Note]:
    """Explain the signs in the cells, and say how many rows are left out."""

    def where(sign: str) -> tuple[Column, ...]:
        return tuple(column for column, cells in columns.items() if any(sign in plain(cell) for cell in cells))

    notes: list[str | Note] = []
    shared = [column for column in where("(") if column.header == METRICS["params"].header]
    if shared:
        text = "parameters in brackets are counted elsewhere: tied weights, or a module that runs again"
        notes.append(Note(text, tuple(shared)))
    if marked := where(AT_LEAST):
        notes.append(
            Note(f"{AT_LEAST.strip()}: without operators that have no formula; shares are of what is counted", marked)
        )
    if view.by == "type" or (view.sort is not None and (view.by, view.depth, view.granularity) == (None,) * 3):
        notes.append("a layer counts without the layers inside it")
    elif own := where(OWN):
        notes.append(Note(f"{OWN}: without the layers inside it, which have rows of their own", own))
    chosen = (view.depth, view.granularity, view.by, view.sort)
    if chosen == (None,) * 4 and depth_of(profile) < deepest(profile):
        notes.append(f"shown to depth {depth_of(profile)} of {deepest(profile)}")
    whole = len(rows_of(profile, replace(view, top=None)))
    if shown < whole:
        notes.append(f"shown: {shown} of {whole} rows; the total is of all")
    return notes
