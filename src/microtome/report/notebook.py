"""Results in notebooks: HTML without a script, readable on light and on dark.

Styles stand in the elements, since notebooks and the sites that show them drop style sheets; colours are those of the
surrounding text, more or less opaque. Only this file escapes text for notebooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from microtome.report.row_selection import fitting_depth
from microtome.report.table import Bar, Cell, Column, Line, Report, Segments, Table, plain
from microtome.units import UNKNOWN, count, seconds, shape, size, some

if TYPE_CHECKING:
    from microtome.capture.record import ActivationRecorder
    from microtome.capture.store import Recording
    from microtome.results.trace import Trace, TracedCall

#: The most rows, about.
_ROWS = 40
#: The colours of bars: distinct for the colour-blind too, on light and on dark.
_COLOURS = ("rgba(47,109,181,.55)", "rgba(201,140,20,.6)", "rgba(140,90,190,.6)", "rgba(20,140,110,.6)")
_LINE = "1px solid rgba(128,128,128,.25)"
_FONT = "font:13px/1.45 system-ui,sans-serif;color:inherit;text-align:left"
_TABLE = (
    "border-collapse:collapse;border:0;margin:.5em 0;font-size:12px;font-variant-numeric:tabular-nums;color:inherit"
)
_CELL = f"padding:2px 10px 2px 6px;border:0;border-bottom:{_LINE};background:none;white-space:nowrap;color:inherit"
_HEAD = f"{_CELL};font-weight:600;opacity:.7"
_CARD = f"display:inline-block;margin:0 8px 6px 0;padding:4px 12px;border:{_LINE};border-radius:6px"
_BARS = "display:inline-block;width:180px;height:10px;vertical-align:middle;white-space:nowrap;overflow:hidden"


def page(report: Report) -> str:
    """Render a report: its title, its headline figures, its tables, and the notes under them."""
    notes = "".join(f"<div>{escape(note)}</div>" for note in report.notes_with())
    small = f'<div style="opacity:.7;font-size:11.5px">{notes}</div>' if notes else ""
    head = f'<div style="font-weight:600;margin:0 0 .4em">{escape(report.title)}</div>'
    legend = _legend(report.legend) if report.legend else ""
    return f'<div style="{_FONT}">{head}{_cards(report)}{legend}{"".join(map(_table, report.tables))}{small}</div>'


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


def _legend(names: Iterable[str]) -> str:
    shown = (
        f'<span style="display:inline-block;width:.8em;height:.8em;margin:0 .35em 0 0;border-radius:2px;'
        f'background:{_COLOURS[index % len(_COLOURS)]}"></span>{escape(name)}&emsp;'
        for index, name in enumerate(names)
    )
    return f'<div style="font-size:11.5px">{"".join(shown)}</div>'


def _cell(column: Column, cell: Cell, line: Line) -> str:
    weight = ";font-weight:600" if "bold" in line.style or line.kind == "total" else ""
    style = f"{_CELL};text-align:{column.align}{weight}"
    if isinstance(cell, Bar):
        length = f"{100 * min(max(cell.fraction, 0.0), 1.0):.1f}%"
        bar = f"background:linear-gradient(90deg,{_COLOURS[0]} {length},transparent {length}) no-repeat"
        return f'<td style="{style};min-width:90px;{bar}">{escape(cell.text)}</td>'
    if isinstance(cell, Segments):
        drawn = "".join(
            f'<span style="display:inline-block;height:10px;width:{180 * part:.1f}px;'
            f'background:{_COLOURS[colour % len(_COLOURS)]}"></span>'
            for part, colour in cell.parts
        )
        return f'<td style="{style}"><span style="{_BARS}" title="{escape(cell.title)}">{drawn}</span></td>'
    name = plain(cell)
    bare = name.lstrip(" ")
    return f'<td style="{style}">{"&nbsp;" * (2 * (len(name) - len(bare)))}{escape(bare)}</td>'


# -- traces and recordings ---------------------------------------------------------------------------------------------


def trace(result: Trace) -> str:
    """Render the calls, as deep as there is room for, with their outputs and the number of operators they run."""
    calls = [call for call in result.calls if call.phase == "forward"]
    depth = fitting_depth([call.depth for call in calls], _ROWS)
    rows = [call for call in calls if call.depth <= depth][:_ROWS]

    def returned(call: TracedCall) -> int:
        return sum(result.values[index].nbytes for index in call.outputs)

    def operators(call: TracedCall) -> str:
        return str(sum(op.phase == "forward" for op in result.ops[call.begins : call.ends]))

    columns = (
        Column("call", lambda call: "  " * call.depth + (call.address or "(root)"), "left"),
        Column("module", lambda call: call.type, "left"),
        Column("operators", operators),
        Column("returns", lambda call: _some([shape(result.values[index].shape) for index in call.outputs]), "left"),
        _bytes_column(rows, returned),
    )
    figures = (
        ("calls", str(len(calls))),
        ("operators", str(len(result.ops))),
        ("values", str(len(result.values))),
        ("made on", f"{result.how.tensor_mode} tensors"),
    )
    notes = [*([result.how.why] if result.how.why else []), *_count_note(rows, calls, "calls")]
    return page(Report(f"Trace of {calls[0].type}", (Table.of(columns, rows),), tuple(notes), figures=figures))


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
    rows = [_Record(name, result[name], result.stats(name)) for name in names[:_ROWS]]

    def distinct(values: Iterable[str]) -> str:
        return _some(list(dict.fromkeys(values)))

    def statistic(row: _Record, field: str) -> str:
        value = getattr(row.stats, field)
        return UNKNOWN if value is None else f"{value:.4g}"

    columns = (
        Column("name", lambda row: row.name, "left"),
        Column("tensors", lambda row: str(len(row.series))),
        Column("shape", lambda row: distinct(map(shape, row.series.shapes)), "left"),
        Column("dtype", lambda row: distinct(str(one).removeprefix("torch.") for one in row.series.dtypes), "left"),
        _bytes_column(rows, lambda row: row.series.nbytes),
        Column("mean", partial(statistic, field="mean")),
        Column("std", partial(statistic, field="std")),
        Column("least", partial(statistic, field="min")),
        Column("greatest", partial(statistic, field="max")),
    )
    notes = tuple(_count_note(rows, names, "names"))
    return page(Report(title, (Table.of(columns, rows),), notes, figures=tuple(figures)))


def _bytes_column(rows: Sequence[Any], nbytes: Callable[[Any], int]) -> Column:
    most = max(map(nbytes, rows), default=0) or 1
    return Column("bytes", lambda row: Bar(nbytes(row) / most, size(nbytes(row))), "left")


def _some(names: list[str]) -> str:
    return some(names, 3, " and {} more")


def _count_note(rows: Sequence[Any], every: Sequence[Any], noun: str) -> list[str]:
    return [f"shown: {len(rows)} of {len(every)} {noun}"] if len(rows) < len(every) else []
