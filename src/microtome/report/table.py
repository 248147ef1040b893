"""Tables as data, and the one renderer that draws them on a terminal or as plain text.

A result describes its rows and columns in a `Report`; `microtome.report.formats` writes that as Markdown, and
`microtome.report.notebook_html` as HTML. Names may hold anything: they are made printable here and nowhere else.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from microtome.errors import sanitize_text

#: The width of text that goes to a file or a pipe.
_WIDTH = 140
#: The least width of a shorten name, and the least and the most of lists of names and wrapped cells.
_SHORTEST, _LEAST, _MOST = 16, 10, 48
#: The width of the figure beside a bar.
_FIGURE = 7
_EIGHTHS = " ▏▎▍▌▋▊▉█"

#: The target of a report: files and notebooks have room for every column and for full names.
Medium = Literal["terminal", "markdown", "html"]


@dataclass(frozen=True)
class Bar:
    """A cell with a bar, and a figure beside it."""

    fraction: float
    text: str = ""
    style: str = ""


@dataclass(frozen=True)
class Styled:
    """A cell with a style of its own."""

    text: str
    style: str


@dataclass(frozen=True)
class Names:
    """A cell with several names, of which a terminal shows as many as fit."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Segments:
    """A cell with a bar in parts, for notebooks.

    Attributes:
        parts: The length of each, as a fraction of the full width, and the index of its colour.
        title: The text of its tooltip.
    """

    parts: tuple[tuple[float, int], ...]
    title: str


Cell = str | Bar | Styled | Names | Segments


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        header: A line break in it is one on a terminal, and a space elsewhere.
        unit: The unit of all its numbers, which is written after the header.
        importance: Where a terminal is too narrow, columns with the highest number are left out first; None: never.
        style: The style of its cells on a terminal.
        bar_width: The width of its bars on a terminal; 0: only the figure is shown there.
        is_name: Whether the cells are names that the model gave, which are code in Markdown.
        wraps: Whether long cells are wrapped on a terminal.
    """

    header: str
    right: bool = True
    importance: int | None = None
    style: str = ""
    bar_width: int = 0
    is_name: bool = False
    wraps: bool = False
    unit: str = ""

    @property
    def drawn_header(self) -> str:
        return f"{self.header} {self.unit}".rstrip(" ")

    @property
    def title(self) -> str:
        """The header in one line."""
        return " ".join(self.header.split("\n")).strip()


@dataclass(frozen=True)
class Line:
    """A row of a table.

    Attributes:
        cells: One for each column.
        mark: A sign before the name on a terminal.
        style: The style on a terminal; bold is strong in the other formats, too.
        kind: The last row with the totals, or the heading of a section, which has one cell.
    """

    cells: tuple[Cell, ...]
    mark: str = ""
    style: str = ""
    kind: Literal["row", "total", "section"] = "row"


@dataclass(frozen=True)
class Table:
    """Rows under headers. The first column holds the names of the rows.

    Attributes:
        summary: Markdown folds the table away under it; "": it does not.
        has_rules: Whether lines are drawn between columns on a terminal.
    """

    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    summary: str = ""
    has_rules: bool = True


@dataclass(frozen=True)
class Note:
    """A sentence that is there only where one of the columns is shown."""

    text: str
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Report:
    """A result as people read it.

    Attributes:
        notes: Sentences under the tables.
        chart: Draws a chart for a terminal of a given width.
        figures: Headline figures for notebooks, as labels and values.
        legend: What the colours of `Segments` stand for.
    """

    title: str
    tables: tuple[Table, ...]
    notes: tuple[str | Note, ...] = ()
    chart: Callable[[int], str] | None = None
    figures: tuple[tuple[str, str], ...] = ()
    legend: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for part in self._parts(options.max_width):
            for text, style, control in console.render(part, options):
                yield Segment(sanitize_text(text, keep="\n"), style, control)

    def _parts(self, width: int) -> Iterator[Any]:
        layouts = [_Layout(table, width) for table in self.tables]
        yield Text(sanitize_text(self.title), style="italic")
        for at, layout in enumerate(layouts):
            if at:
                yield Text("")
            yield layout.draw()
        if self.chart is not None:
            yield Text("")
            yield Text(self.chart(width))
        notes = notes_of(self, [column for layout in layouts for column in layout.columns])
        left_out = [column.title for layout in layouts for column in layout.left_out if column.title]
        if left_out:
            notes.append(f"no room for: {', '.join(left_out)}")
        if notes:
            yield Text("\n".join(map(sanitize_text, notes)), style="dim")


def text(report: Report) -> str:
    """A report as text, with colours where the standard output is a terminal, unless NO_COLOR is set."""
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal or "COLUMNS" in os.environ else _WIDTH
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=is_terminal, legacy_windows=False).print(report)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def notes_of(report: Report, shown: Sequence[Column]) -> list[str]:
    """The sentences under tables that show these columns."""
    about = [note if isinstance(note, Note) else Note(note, ()) for note in report.notes]
    return [note.text for note in about if not note.columns or any(column in shown for column in note.columns)]


class _Layout:
    """A table fitted to a width: which columns are shown, and how wide each is."""

    def __init__(self, table: Table, width: int) -> None:
        self._table = table
        self._gap = 3 if table.has_rules else 2
        self._marks = max((len(line.mark) + 1 for line in table.lines if line.mark), default=0)
        wanted = [self._wanted(at) for at in range(len(table.columns))]
        least = [min(wide, _LEAST) if self._stretches(at) else wide for at, wide in enumerate(wanted)]
        name = min(wanted[0], max(width * 2 // 5, _SHORTEST + self._marks))
        kept = list(range(1, len(table.columns)))
        while (droppable := [at for at in kept if table.columns[at].importance is not None]) and (
            name + sum(least[at] + self._gap for at in kept) > width
        ):
            kept.remove(max(droppable, key=lambda at: (table.columns[at].importance or 0, at)))
        room = width - sum(least[at] + self._gap for at in kept)
        stretched = sum(wanted[at] - least[at] for at in kept)
        self._widths = least
        self._widths[0] = min(wanted[0], max(min(name, room), room - stretched, _SHORTEST + self._marks))
        room -= self._widths[0]
        for at in kept:
            self._widths[at] = min(wanted[at], least[at] + max(room, 0))
            room -= self._widths[at] - least[at] if wanted[at] > least[at] else 0
        self._kept = [0, *kept]
        self.columns = [table.columns[at] for at in self._kept]
        self.left_out = [column for at, column in enumerate(table.columns) if at not in self._kept]

    def draw(self) -> RichTable:
        options: dict[str, Any] = {} if self._table.has_rules else {"box": None, "padding": (0, self._gap, 0, 0)}
        drawn = RichTable(show_edge=False, pad_edge=False, **options)
        height = max(column.header.count("\n") for column in self.columns)
        for at in self._kept:
            column = self._table.columns[at]
            drawn.add_column(
                "\n" * (height - column.header.count("\n")) + column.drawn_header,
                justify="right" if column.right else "left",
                style=column.style,
                min_width=self._widths[at],
                no_wrap=not column.wraps,
                overflow="fold" if column.wraps else "ellipsis",
            )
        for line in self._table.lines:
            if line.kind == "total":
                drawn.add_section()
            if line.kind == "section":
                between = "" if line is self._table.lines[0] else "\n"
                drawn.add_row(Text(between + self._text(line, 0).plain, style=line.style))
            else:
                drawn.add_row(*(self._text(line, at) for at in self._kept), style=line.style)
        return drawn

    def _stretches(self, at: int) -> bool:
        """Whether the cells of a column may be drawn narrower than their text."""
        names = any(isinstance(line.cells[at], Names) for line in self._table.lines if at < len(line.cells))
        return at > 0 and (names or self._table.columns[at].wraps)

    def _wanted(self, at: int) -> int:
        """The width in which every cell is shown whole."""
        column = self._table.columns[at]
        cells = [line.cells[at] for line in self._table.lines if at < len(line.cells)]
        widest = max((len(_figure(cell, column)) for cell in cells), default=0)
        if self._stretches(at):
            widest = min(widest, _MOST)
        return max(widest + (0 if at else self._marks), *map(len, column.drawn_header.split("\n")))

    def _text(self, line: Line, at: int) -> Text:
        """A cell in the width that its column has."""
        column, cell = self._table.columns[at], line.cells[at]
        if isinstance(cell, Names):
            return Text(_names([sanitize_text(name) for name in cell.names], self._widths[at]))
        if isinstance(cell, Bar) and column.bar_width:
            drawn = bar(cell.fraction, 1, column.bar_width)
            return Text.assemble((drawn, cell.style), f" {cell.text:>{_FIGURE}}" if cell.text else "")
        shown = sanitize_text(_figure(cell, column))
        if at == 0 and line.kind != "section":
            mark = f"{line.mark:<{self._marks}}" if self._marks else ""
            return Text(mark + (shown if column.wraps else shorten(shown, self._widths[0] - self._marks)))
        return Text(shown, style=cell.style if isinstance(cell, Styled) else "")


def _figure(cell: Cell, column: Column) -> str:
    """The text of a cell, as wide as it is drawn."""
    if isinstance(cell, Bar) and column.bar_width:
        return " " * (column.bar_width + (1 + max(_FIGURE, len(cell.text)) if cell.text else 0))
    return plain(cell)


def plain(cell: Cell) -> str:
    """The text of a cell."""
    if isinstance(cell, Names):
        return ", ".join(cell.names)
    return cell if isinstance(cell, str) else "" if isinstance(cell, Segments) else cell.text


def _names(names: Sequence[str], room: int) -> str:
    """As many names as fit, and the number of the others."""
    for shown in range(len(names), 0, -1):
        rest = f" +{len(names) - shown}" if shown < len(names) else ""
        line = ", ".join(names[:shown]) + rest
        if len(line) <= room:
            return line
    rest = f" +{len(names) - 1}" if len(names) > 1 else ""
    if names and room - len(rest) >= _SHORTEST:
        return shorten(names[0], room - len(rest)) + rest
    return f"{len(names)} value{'' if len(names) == 1 else 's'}"[:room] if names else ""


def bar(part: float | None, whole: float | None, width: int = 8) -> str:
    """A share as a bar.

    >>> bar(1, 2, width=4) + "|", bar(1, 16, width=4) + "|"
    ('██  |', '▎   |')
    >>> bar(-1, 2, width=4) + "|"
    '    |'
    """
    eighths = round(8 * width * min(max((part or 0) / whole, 0), 1)) if whole else 0
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def shorten(name: str, most: int) -> str:
    """A name with its middle left out where it is too long: addresses differ at their ends. So is its indent.

    >>> shorten("encoder.layer.11.attention.output", 20)
    'encode…ention.output'
    >>> shorten("            attn", 10)
    '     …attn'
    """
    if len(name) <= most:
        return name
    bare = name.lstrip(" ")
    wanted = len(name) - len(bare)
    indent = min(wanted, max(most - len(bare) - 1, most // 3))
    begin = " " * indent + ("…" if indent < wanted else "")
    room = most - len(begin)
    if len(bare) <= room:
        return begin + bare
    return f"{begin}{bare[: room // 3]}…{bare[len(bare) - (room - room // 3 - 1) :]}"
