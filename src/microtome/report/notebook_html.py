"""Reports in a notebook: plain HTML without a script, readable on light and on dark.

Styles stand in the elements, since notebooks and the sites that show them drop style sheets; colours are those of the
text around, more or less opaque. Every text is escaped here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import repeat

from microtome.report.table import Bar, Cell, Column, Line, Report, Segments, Table, notes_of, plain

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
    """A report: its title, its headline figures, its tables, and the notes under them."""
    shown = [column for table in report.tables for column in table.columns]
    notes = "".join(f"<div>{escape(note)}</div>" for note in notes_of(report, shown))
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
        f'<th style="{_HEAD};text-align:{_side(column)}">{escape(column.title)}</th>' for column in table.columns
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
        f'background:{_COLOURS[at % len(_COLOURS)]}"></span>{escape(name)}&emsp;'
        for at, name in enumerate(names)
    )
    return f'<div style="font-size:11.5px">{"".join(shown)}</div>'


def _side(column: Column) -> str:
    return "right" if column.right else "left"


def _cell(column: Column, cell: Cell, line: Line) -> str:
    weight = ";font-weight:600" if "bold" in line.style or line.kind == "total" else ""
    style = f"{_CELL};text-align:{_side(column)}{weight}"
    if isinstance(cell, Bar):
        long = f"{100 * min(max(cell.fraction, 0.0), 1.0):.1f}%"
        bar = f"background:linear-gradient(90deg,{_COLOURS[0]} {long},transparent {long}) no-repeat"
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
