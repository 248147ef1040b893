"""How tables look in a notebook: plain HTML without a script, readable on light and on dark.

Styles stand in the elements, since notebooks and the sites that show them drop style sheets; colours are those of the
text around, more or less opaque. Every text is escaped here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

#: Of bars, by what they stand for: seen apart by the colour-blind too, on light and on dark.
INKS = ("rgba(47,109,181,.55)", "rgba(201,140,20,.6)", "rgba(140,90,190,.6)", "rgba(20,140,110,.6)")
_LINE = "1px solid rgba(128,128,128,.25)"
_FONT = "font:13px/1.45 system-ui,sans-serif;color:inherit;text-align:left"
_TABLE = (
    "border-collapse:collapse;border:0;margin:.5em 0;font-size:12px;font-variant-numeric:tabular-nums;color:inherit"
)
_CELL = f"padding:2px 10px 2px 6px;border:0;border-bottom:{_LINE};background:none;white-space:nowrap;color:inherit"
_HEAD = f"{_CELL};font-weight:600;opacity:.7"
_CARD = f"display:inline-block;margin:0 8px 6px 0;padding:4px 12px;border:{_LINE};border-radius:6px"
_BARS = "display:inline-block;width:180px;height:10px;vertical-align:middle;white-space:nowrap;overflow:hidden"


@dataclass(frozen=True)
class Bar:
    """A cell with a figure, and under it a bar as long as its part of the whole."""

    text: str
    part: float


@dataclass(frozen=True)
class TableParts:
    """A cell with a bar that is made of parts.

    Attributes:
        parts: How long each is, of the whole width, and the index of its ink.
        said: What is told where it is pointed at.
    """

    parts: tuple[tuple[float, int], ...]
    said: str


Cell = str | Bar | TableParts
Side = Literal["left", "right"]


def page(title: str, *parts: str, notes: Iterable[str] = ()) -> str:
    """A result: a title, what is made by the functions below, and sentences under it."""
    under = "".join(f"<div>{escape(note)}</div>" for note in notes)
    small = f'<div style="opacity:.7;font-size:11.5px">{under}</div>' if under else ""
    head = f'<div style="font-weight:600;margin:0 0 .4em">{escape(title)}</div>'
    return f'<div style="{_FONT}">{head}{"".join(parts)}{small}</div>'


def cards(pairs: Iterable[tuple[str, str]]) -> str:
    """Headline figures: what, and how much."""
    return "".join(
        f'<span style="{_CARD}"><span style="opacity:.7;font-size:11px">{escape(what)}</span><br>'
        f'<b style="font-size:15px">{escape(much)}</b></span>'
        for what, much in pairs
    )


def table(
    headers: Sequence[str], rows: Iterable[Sequence[Cell]], sides: Sequence[Side], strong: Iterable[int] = ()
) -> str:
    """Rows under headers.

    Args:
        sides: To which side each column is aligned.
        strong: The rows that stand out.
    """
    marked = set(strong)
    head = "".join(f'<th style="{_HEAD};text-align:{side}">{escape(name)}</th>' for name, side in _with(headers, sides))
    body = "".join(_row(row, sides, at in marked) for at, row in enumerate(rows))
    return (
        f'<div style="overflow-x:auto"><table style="{_TABLE}"><thead><tr style="background:none">{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def legend(names: Iterable[str]) -> str:
    """Which ink stands for what."""
    shown = (
        f'<span style="display:inline-block;width:.8em;height:.8em;margin:0 .35em 0 0;border-radius:2px;'
        f'background:{INKS[at % len(INKS)]}"></span>{escape(name)}&emsp;'
        for at, name in enumerate(names)
    )
    return f'<div style="font-size:11.5px">{"".join(shown)}</div>'


def _with(cells: Sequence[str], sides: Sequence[Side]) -> Iterable[tuple[str, Side]]:
    return zip(cells, sides, strict=True)


def _row(row: Sequence[Cell], sides: Sequence[Side], strong: bool) -> str:
    cells = "".join(_cell(cell, side, strong) for cell, side in zip(row, sides, strict=True))
    return f'<tr style="background:none">{cells}</tr>'


def _cell(cell: Cell, side: Side, strong: bool) -> str:
    weight = ";font-weight:600" if strong else ""
    style = f"{_CELL};text-align:{side}{weight}"
    if isinstance(cell, str):
        indent = len(cell) - len(cell.lstrip(" "))
        text = "&nbsp;" * (2 * indent) + escape(cell.lstrip(" "))
        return f'<td style="{style}">{text}</td>'
    if isinstance(cell, Bar):
        long = f"{100 * min(max(cell.part, 0.0), 1.0):.1f}%"
        bar = f"background:linear-gradient(90deg,{INKS[0]} {long},transparent {long}) no-repeat"
        return f'<td style="{style};min-width:90px;{bar}">{escape(cell.text)}</td>'
    drawn = "".join(
        f'<span style="display:inline-block;height:10px;width:{180 * part:.1f}px;background:{INKS[ink % len(INKS)]}">'
        "</span>"
        for part, ink in cell.parts
    )
    return f'<td style="{style}"><span style="{_BARS}" title="{escape(cell.said)}">{drawn}</span></td>'
