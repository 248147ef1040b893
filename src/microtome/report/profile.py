"""A profile as a table: on a terminal, as text, as Markdown, as CSV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from microtome.errors import printable
from microtome.report.columns import (
    AT_LEAST,
    OWN,
    CallColumn,
    at_least,
    columns_of,
    leaves_out,
)
from microtome.report.notes import notes_of
from microtome.report.row_selection import RowSelection, check, deepest, depth_of, rows_of, whole_tree
from microtome.report.shared_units import SCALED, spanning
from microtome.report.spreadsheet import csv_text
from microtome.report.terminal import bar, code, escaped, fitted, plain_text, shortened
from microtome.results.metrics import IMPORTANCE, METRICS
from microtome.results.profile import Profile
from microtome.results.profile_records import flat
from microtome.results.rows import Group, Row

#: The shortest that a name is cut to on a terminal.
_SHORTEST = 16
#: How long the longest bar is: with it, what is counted of a small model fits in 80 columns.
_BAR = 4


@dataclass(frozen=True)
class _Lines:
    """A table as cells: what each column is called, one list of cells for each row, and the last for the whole."""

    columns: tuple[str, ...]
    headers: list[str]
    right: list[bool]
    rows: list[list[str]]
    total: list[str]
    left_out: tuple[str, ...]
    count: int


def renderable(profile: Profile, view: RowSelection | None = None, width: int | None = None) -> Any:
    """What rich draws: the table, and under it what it rests on."""
    lines = _lines(profile, view or RowSelection(), width, is_drawn=True)
    table = Table(show_edge=False, pad_edge=False)
    shares = {metric.share: "green" for metric in METRICS.values() if metric.share}
    styles = {"type": "cyan", "outputs": "dim"} | shares
    for at, (name, header, right) in enumerate(zip(("", *lines.columns), lines.headers, lines.right, strict=True)):
        width_ = max(len(header), *(len(row[at]) for row in (*lines.rows, lines.total)))
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(header, justify=justify, style=styles.get(name, ""), min_width=width_, no_wrap=True)
    for row in lines.rows:
        table.add_row(*map(Text, row))
    table.add_section()
    table.add_row(*map(Text, lines.total), style="bold")
    title = Text(printable(f"{profile.model} on {profile.inputs}"), style="italic")
    notes = map(printable, _notes(profile, view or RowSelection(), lines))
    return Stack(title, table, Text("\n".join(notes), style="dim"))


def text(profile: Profile, view: RowSelection | None = None) -> str:
    """The table as text, with colours where the standard output is a terminal that wants them."""
    return plain_text(lambda width: renderable(profile, view, width))


def markdown(profile: Profile, view: RowSelection | None = None) -> str:
    view = whole_tree(profile, view or RowSelection())
    lines = _lines(profile, view, None, is_drawn=False)
    rows = [[_span(name), *map(escaped, rest)] for name, *rest in lines.rows]
    rule = ["---:" if right else "---" for right in lines.right]
    cells = [list(map(escaped, lines.headers)), rule, *rows, list(map(escaped, lines.total))]
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    notes = "\n".join(f"- {escaped(note)}" for note in _notes(profile, view, lines))
    return f"**{escaped(profile.model)}** on {code(profile.inputs)}\n\n{table}\n\n{notes}\n"


def _span(name: str) -> str:
    """A name with its indent, of spaces that are shown at the beginning of a cell, too."""
    bare = name.lstrip(" ")
    return "\N{NO-BREAK SPACE}" * (len(name) - len(bare)) + (bare if bare == "(root)" else code(bare))


def csv(profile: Profile, view: RowSelection | None = None) -> str:
    """Every row of the view, all calls if it does not say which, with all their numbers."""
    view = whole_tree(profile, view or RowSelection())
    check(view)
    pairs = [(row, flat(row) if isinstance(row, Row) else _flat_group(row)) for row, _ in rows_of(profile, view)]
    records = [record for _, record in pairs]
    if view.columns:
        chosen = [columns_of(view.by)[name] for name in view.columns]
        records = []
        for row, record in pairs:
            records.append({name: record[name] for name in ("address", "name") if name in record})
            for column in chosen:
                records[-1] |= column.raw(row, record, profile)
    return csv_text(list(dict.fromkeys(name for record in records for name in record)), records)


def _flat_group(group: Group) -> dict[str, Any]:
    known = [metric for metric in METRICS.values() if metric.known_of != "calls"]
    return {"name": group.name, "runs": group.runs} | {metric.file_name: metric.of(group) for metric in known}


# -- cells -------------------------------------------------------------------------------------------------------------


def _lines(profile: Profile, view: RowSelection, width: int | None, *, is_drawn: bool) -> _Lines:
    """The cells; those that are drawn have a unit in common in each column, and one column has bars."""
    check(view)
    pairs = rows_of(profile, view)
    names = [printable(name) for _, name in pairs]
    rows = [row for row, _ in pairs]
    known = columns_of(view.by)
    wanted = view.columns or tuple(name for name, column in known.items() if column.is_shown(profile))
    table = {name: _column(profile, view, known[name], rows, is_drawn=is_drawn) for name in wanted}
    if is_drawn and (heat := next((name for name in _HEAT if name in wanted), None)) is not None:
        table[heat] = _with_bars(profile, table[heat], known[heat], rows)
    chosen = wanted
    if width is not None:
        widths = {name: max(map(len, (column.header, *column.cells))) for name, column in table.items()}
        longest = max(map(len, ("total", *names)))
        if not view.columns:
            first = min(longest, max(width * 2 // 5, _SHORTEST))
            chosen = fitted(wanted, widths, _by_importance(wanted), width - first)
        room = width - sum(widths[name] + 3 for name in chosen)
        names = [_shortened(name, max(room, _SHORTEST)) for name in names]
    what = {None: "call", "module": "module", "type": "module", "op": "operator"}[view.by]
    return _Lines(
        columns=chosen,
        headers=[what, *(table[name].header for name in chosen)],
        right=[False, *(table[name].right for name in chosen)],
        rows=[[name, *(table[column].cells[at] for column in chosen)] for at, name in enumerate(names)],
        total=["total", *(table[name].cells[-1] for name in chosen)],
        left_out=tuple(name for name in wanted if name not in chosen),
        count=len(rows_of(profile, replace(view, top=None))),
    )


#: The columns that may have bars: the first that there is.
_HEAT = ("device_share", "time_share", "share")


class _Column(NamedTuple):
    """What is written in a column; the last cell is that of the total."""

    header: str
    right: bool
    cells: list[str]


def _by_importance(names: tuple[str, ...]) -> list[str]:
    return sorted(names, key=lambda name: IMPORTANCE.index(name) if name in IMPORTANCE else len(IMPORTANCE))


def _column(profile: Profile, view: RowSelection, column: CallColumn, rows: list[Any], *, is_drawn: bool) -> _Column:
    every, metric, header = (*rows, profile.total), column.metric, column.header
    cells = [printable(column.cell(row, profile)) for row in every]
    if metric is None or column.part != "value":
        if column.part == "share" or column.field == "type":
            cells[-1] = ""
        return _Column(header, column.right, cells)
    numbers = [number for row in every for number in (metric.of(row), _shared(row) if metric.name == "params" else 0)]
    if is_drawn and metric.unit in SCALED and (scale := spanning(numbers, metric.unit)) is not None:
        cells = [column.number(row, scale.write) for row in every]
        header = scale.head(header)
    if metric.counted_by is not None and profile.coverage.unknown:
        marks = [*map(leaves_out(profile, metric, view.by), rows), leaves_out(profile, metric, None)(profile.total)]
        cells = [at_least(cell) if is_marked else cell for cell, is_marked in zip(cells, marks, strict=True)]
    if metric.name == "runs":
        cells[-1] = ""
    return _Column(header, column.right, cells)


def _shared(row: Any) -> int:
    return getattr(row, "shared_params", 0)


def _with_bars(profile: Profile, cells: _Column, column: CallColumn, rows: list[Any]) -> _Column:
    assert column.metric is not None
    whole = column.metric.of(profile.total)
    bars = [bar(column.metric.of(row), whole, _BAR) for row in rows]
    return _Column(
        cells.header,
        False,
        [*(f"{drawn} {cell:>7}" for drawn, cell in zip(bars, cells.cells, strict=False)), ""],
    )


def _shortened(name: str, most: int) -> str:
    """A name with its indent, both shorter where they are too long; where the indent is, the name has a sign for it."""
    if len(name) <= most:
        return name
    bare = name.lstrip(" ")
    wanted = len(name) - len(bare)
    indent = min(wanted, max(most - len(bare) - 1, most // 3))
    begin = " " * indent + ("…" if indent < wanted else "")
    return begin + shortened(bare, most - len(begin))


def _notes(profile: Profile, view: RowSelection, lines: _Lines) -> list[str]:
    """What the numbers rest on, and what of them is not shown."""
    notes = notes_of(profile)
    if "params" in lines.columns and any("(" in row[1 + lines.columns.index("params")] for row in lines.rows):
        notes.append("parameters in brackets are counted elsewhere: tied weights, or a module that runs again")
    if any(cell.startswith(AT_LEAST) for row in (*lines.rows, lines.total) for cell in row[1:]):
        notes.append(f"{AT_LEAST.strip()}: without operators that have no formula; shares are of what is counted")
    if view.by == "type" or (view.sort is not None and (view.by, view.depth, view.granularity) == (None,) * 3):
        notes.append("a layer counts without the layers inside it")
    elif any(cell.endswith(OWN) for row in lines.rows for cell in row[1:]):
        notes.append(f"{OWN}: without the layers inside it, which have rows of their own")
    chosen = (view.depth, view.granularity, view.by, view.sort)
    if chosen == (None,) * 4 and depth_of(profile) < deepest(profile):
        notes.append(f"shown to depth {depth_of(profile)} of {deepest(profile)}")
    if view.top is not None and len(lines.rows) < lines.count:
        notes.append(f"shown: {len(lines.rows)} of {lines.count} rows; the total is of all")
    if lines.left_out:
        notes.append(f"no room for: {', '.join(columns_of(view.by)[name].header for name in lines.left_out)}")
    return notes
