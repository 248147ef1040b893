"""Results in notebooks: HTML without a script, readable on light and on dark.

Styles stand in the elements, since notebooks and the sites that show them drop style sheets; colours are those of the
surrounding text, more or less opaque. Only this file and `captures` escape text for notebooks.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from microtome.report.capping import cap, with_gaps
from microtome.report.row_selection import fitting_depth
from microtome.report.table import Bar, Cell, Column, Image, Line, Report, Segments, Styled, Table, gap, plain
from microtome.units import UNKNOWN, count, seconds, shape, size, some

if TYPE_CHECKING:
    from microtome.capture.record import ActivationRecorder
    from microtome.capture.store import Recording
    from microtome.results.trace import Trace, TracedCall

#: The most rows, about.
MOST_ROWS = 40
#: The colour of bars, under text.
_BAR = "rgba(47,116,200,.35)"
#: The colours of changes: readable on light and on dark.
_STYLES = {"red": "#d1493f", "green": "#2e9e5b", "dim": "#808890"}
_LINE = "1px solid rgba(128,128,128,.25)"
_FONT = "font:13px/1.45 system-ui,sans-serif;color:inherit;text-align:left"
_TABLE = (
    "border-collapse:collapse;border:0;margin:.5em 0;font-size:12px;font-variant-numeric:tabular-nums;color:inherit"
)
_CELL = f"padding:2px 10px 2px 6px;border:0;border-bottom:{_LINE};background:none;white-space:nowrap;color:inherit"
_HEAD = f"{_CELL};font-weight:600;opacity:.7"
_CARD = f"display:inline-block;margin:0 8px 6px 0;padding:4px 12px;border:{_LINE};border-radius:6px"
_BARS = "display:inline-block;width:180px;height:10px;vertical-align:middle;white-space:nowrap;overflow:hidden"


def page(report: Report, pictures: str = "") -> str:
    """Render a report: its title, its headline figures, its tables, and the notes under them.

    Args:
        pictures: HTML between tables and notes.
    """
    notes = "".join(f"<div>{escape(note)}</div>" for note in report.notes_with())
    small = f'<div style="opacity:.7;font-size:11.5px">{notes}</div>' if notes else ""
    head = f'<div style="font-weight:600;margin:0 0 .4em">{escape(report.title)}</div>'
    legend = _legend(report.legend) if report.legend else ""
    tables = "".join(map(_table, report.tables))
    return f'<div style="{_FONT}">{head}{_cards(report)}{legend}{tables}{pictures}{small}</div>'


def _cards(report: Report) -> str:
    return "".join(
        f'<span style="{_CARD}"><span style="opacity:.7;font-size:11px">{escape(label)}</span><br>'
        f'<b style="font-size:15px">{escape(value)}</b></span>'
        for label, value in report.figures
    )


def _table(table: Table) -> str:
    head = "".join(
        f'<th style="{_HEAD};text-align:{column.align}">{escape(column.title)}</th>' for column in table.columns
    )
    body = "".join(
        f'<tr style="background:none">{"".join(map(_cell, table.columns, line.cells, repeat(line)))}</tr>'
        for line in table.lines
    )
    return (
        f'<div style="overflow-x:auto"><table style="{_TABLE}"><thead><tr style="background:none">{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    shown = (
        f'<span style="display:inline-block;width:.8em;height:.8em;margin:0 .35em 0 0;border-radius:2px;'
        f'background:{colour}"></span>{escape(name)}&emsp;'
        for name, colour in entries
    )
    return f'<div style="font-size:11.5px">{"".join(shown)}</div>'


def _cell(column: Column, cell: Cell, line: Line) -> str:
    weight = ";font-weight:600" if "bold" in line.style or line.kind == "total" else ""
    style = f"{_CELL};text-align:{column.align}{weight}"
    if isinstance(cell, Bar):
        length = f"{100 * min(max(cell.fraction, 0.0), 1.0):.1f}%"
        bar = f"background:linear-gradient(90deg,{_BAR} {length},transparent {length}) no-repeat"
        return f'<td style="{style};min-width:90px;{bar}">{escape(cell.text)}</td>'
    if isinstance(cell, Image):
        return f'<td style="{style}">{image(cell.png)}</td>'
    if isinstance(cell, Segments):
        drawn = "".join(
            f'<span style="display:inline-block;height:10px;width:{180 * part:.1f}px;background:{colour}"></span>'
            for part, colour in cell.parts
        )
        return f'<td style="{style}"><span style="{_BARS}" title="{escape(cell.title)}">{drawn}</span></td>'
    if isinstance(cell, Styled) and cell.style in _STYLES:
        style += f";color:{_STYLES[cell.style]}"
    if line.style == "dim":
        style += ";opacity:.7"
    name = plain(cell)
    bare = name.lstrip(" ")
    return f'<td style="{style}">{"&nbsp;" * (2 * (len(name) - len(bare)))}{escape(bare)}</td>'


def image(png: bytes) -> str:
    return (
        f'<img src="data:image/png;base64,{b64encode(png).decode()}" style="max-width:none;image-rendering:pixelated">'
    )


# -- traces and recordings ---------------------------------------------------------------------------------------------


def trace(result: Trace) -> str:
    """Render the calls, as deep as there is room for, with their outputs and the number of operators they run."""
    calls = [call for call in result.calls if call.phase == "forward"]
    depth = fitting_depth([call.depth for call in calls], MOST_ROWS)
    selected = [call for call in calls if call.depth <= depth]
    places = {id(call): index for index, call in enumerate(selected)}
    parents = [None if call.parent is None else places.get(id(result.calls[call.parent])) for call in selected]

    def returned(call: TracedCall) -> int:
        return sum(result.values[index].nbytes for index in call.outputs)

    def operators(call: TracedCall) -> int:
        return sum(op.phase == "forward" for op in result.ops[call.begins : call.ends])

    kept = cap([operators(call) for call in selected], MOST_ROWS, parents)
    rows = [selected[index] for index in kept]
    columns = (
        Column("call", lambda call: "  " * call.depth + (call.address or "(root)"), "left"),
        Column("module", lambda call: call.type, "left"),
        Column("operators", lambda call: str(operators(call))),
        Column("returns", lambda call: some_of([shape(result.values[index].shape) for index in call.outputs]), "left"),
        bytes_column(rows, returned),
    )
    figures = (
        ("calls", str(len(calls))),
        ("operators", str(len(result.ops))),
        ("values", str(len(result.values))),
        ("made on", f"{result.how.tensor_mode} tensors"),
    )
    notes = [*([result.how.why] if result.how.why else []), *count_note(rows, calls, "calls")]
    table = fill_gaps(Table.of(columns, rows), kept, len(selected))
    return page(Report(f"Trace of {calls[0].type}", (table,), tuple(notes), figures=figures))


def recording(result: Recording) -> str:
    """Render the recording in a folder."""
    figures = [("names", str(len(result))), ("tensors", count(result.count)), ("bytes", size(result.nbytes))]
    figures += [("dropped", count(result.dropped))] if result.dropped else []
    model = result.manifest.get("model")
    return _records(result, f"Recording{f' of {model}' if model else ''} in {result.folder}", figures)


def recorder(result: ActivationRecorder) -> str:
    """Render the records of a `with` block."""
    runs, records, nbytes, spent = result.totals
    figures = [("runs", count(runs)), ("records", count(records)), ("bytes", size(nbytes)), ("time", seconds(spent))]
    return _records(result, "Recorder", figures)


class _Record(NamedTuple):
    name: str
    series: Any
    stats: Any


def _records(result: Recording | ActivationRecorder, title: str, figures: Sequence[tuple[str, str]]) -> str:
    """Render a row for each name: the number of tensors, their shapes and statistics."""
    names = list(result)
    kept = cap([result[name].nbytes for name in names], MOST_ROWS)
    rows = [_Record(names[index], result[names[index]], result.stats(names[index])) for index in kept]

    def distinct(values: Iterable[str]) -> str:
        return some_of(list(dict.fromkeys(values)))

    def statistic(row: _Record, field: str) -> str:
        value = getattr(row.stats, field)
        return UNKNOWN if value is None else f"{value:.4g}"

    columns = (
        Column("name", lambda row: row.name, "left"),
        Column("tensors", lambda row: str(len(row.series))),
        Column("shape", lambda row: distinct(map(shape, row.series.shapes)), "left"),
        Column("dtype", lambda row: distinct(str(one).removeprefix("torch.") for one in row.series.dtypes), "left"),
        bytes_column(rows, lambda row: row.series.nbytes),
        *(Column(field, partial(statistic, field=field)) for field in ("mean", "std", "min", "max")),
    )
    notes = tuple(count_note(rows, names, "names"))
    table = fill_gaps(Table.of(columns, rows), kept, len(names))
    return page(Report(title, (table,), notes, figures=tuple(figures)))


def fill_gaps(table: Table, kept: Sequence[int], count: int) -> Table:
    filled = with_gaps(kept, table.lines, count)
    width = len(table.columns) - 1
    return replace(table, lines=tuple(line if isinstance(line, Line) else gap(line, width) for line in filled))


def bytes_column(rows: Sequence[Any], nbytes: Callable[[Any], int]) -> Column:
    most = max(map(nbytes, rows), default=0) or 1
    return Column("bytes", lambda row: Bar(nbytes(row) / most, size(nbytes(row))), "left")


def some_of(names: list[str]) -> str:
    return some(names, 3, " and {} more")


def count_note(rows: Sequence[Any], every: Sequence[Any], noun: str) -> list[str]:
    return [f"shown: {len(rows)} of {len(every)} {noun}"] if len(rows) < len(every) else []
