"""Tables as data, and the renderer that draws them on a terminal or as plain text.

A result describes its rows and columns in a `Report`; `microtome.report.formats` writes that as Markdown, and
`microtome.report.notebook` as HTML. Names may hold any characters: only the renderers escape them.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from microtome.errors import sanitize_text
from microtome.report.text import shorten
from microtome.results.metrics import find_choice
from microtome.units import plural

#: The width of text that goes to a file or a pipe, unless a table is wider.
_WIDTH = 140
#: The least width of a shortened name, and the least and the most of lists of names and wrapped cells.
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
    """A cell with a stacked bar, for notebooks.

    Attributes:
        parts: The length of each segment, as a fraction of the full width, and its colour.
        title: The tooltip.
    """

    parts: tuple[tuple[float, str], ...]
    title: str


@dataclass(frozen=True)
class Image:
    """A cell with a picture, for notebooks."""

    png: bytes


Cell = str | Bar | Styled | Names | Segments | Image


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        header: A line break in it is one on a terminal, and a space elsewhere.
        cell: Returns the cell of a row, for `Table.of`.
        importance: Where a terminal is too narrow, columns with the highest number are dropped first; None: never.
        style: The style of its cells on a terminal.
        bar_width: The width of its bars on a terminal; 0: only the figure is shown there.
        is_name: Whether the cells are names from the model, which are code in Markdown.
        wraps: Whether long cells are wrapped on a terminal.
        unit: The unit of all its numbers, which is written after the header.
    """

    header: str
    cell: Callable[[Any], Cell] = str
    align: Literal["left", "right"] = "right"
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

    @property
    def name(self) -> str:
        """The name by which a selection refers to the column."""
        return self.title.lower().replace(" ", "_")


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


def gap(count: int, columns: int) -> Line:
    """Return a row that stands for rows that are left out.

    Args:
        columns: The number of columns after the first.
    """
    return Line((f"… {plural(count, 'row')} more", *[""] * columns), style="dim")


@dataclass(frozen=True)
class Table:
    """Rows under headers. The first column holds the names of the rows.

    Attributes:
        summary: The title under which Markdown folds the table; "": it does not.
        has_rules: Whether lines are drawn between columns on a terminal.
    """

    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    summary: str = ""
    has_rules: bool = True

    @classmethod
    def of(
        cls,
        columns: Sequence[Column],
        rows: Iterable[Any],
        mark: Callable[[Any], str] = lambda row: "",
        style: Callable[[Any], str] = lambda row: "",
    ) -> Table:
        """Build a table whose cells the columns compute from each row."""
        lines = (Line(tuple(column.cell(row) for column in columns), mark(row), style(row)) for row in rows)
        return cls(tuple(columns), tuple(lines))

    def with_columns(self, names: Sequence[str]) -> Table:
        """Return a table with the names of the rows and these columns, in this order; with all if none is named.

        The name of a column is its header with underscores: `"head_macs"`.
        """
        if not names:
            return self
        known = {column.name: index for index, column in enumerate(self.columns) if index and column.name}
        choices: dict[str, tuple[str, ...]] = dict.fromkeys(known, ())
        others = [name for name in names if name.strip().lower() != self.columns[0].name]
        chosen = [0, *(known[find_choice(name, choices)] for name in others)]
        columns = tuple(replace(self.columns[index], importance=None) for index in chosen)
        return replace(
            self,
            columns=columns,
            lines=tuple(
                line if line.kind == "section" else replace(line, cells=tuple(line.cells[index] for index in chosen))
                for line in self.lines
            ),
        )

    def with_kept_column(self, name: str) -> Table:
        """Return a table that does not drop the column of this name where a terminal is too narrow."""
        columns = (replace(column, importance=None) if column.name == name else column for column in self.columns)
        return replace(self, columns=tuple(columns))


@dataclass(frozen=True)
class Note:
    """A sentence that is shown only with one of its columns; always if it has none."""

    text: str
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Report:
    """A result as people read it.

    Attributes:
        notes: Sentences under the tables.
        chart: Draws a chart for a terminal of a given width.
        figures: Headline figures for notebooks, as labels and values.
        legend: The meanings of the colours of `Segments`, and the colours.
    """

    title: str
    tables: tuple[Table, ...]
    notes: tuple[str | Note, ...] = ()
    chart: Callable[[int], Text] | None = None
    figures: tuple[tuple[str, str], ...] = ()
    legend: tuple[tuple[str, str], ...] = ()

    def notes_with(self, shown: Iterable[Column] | None = None) -> list[str]:
        """Return the notes under tables that show these columns, by default all columns."""
        columns = list(shown) if shown is not None else [column for table in self.tables for column in table.columns]
        return [
            note if isinstance(note, str) else note.text
            for note in self.notes
            if isinstance(note, str) or not note.columns or any(column in columns for column in note.columns)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for part in self._parts(options.max_width):
            for text, style, control in console.render(part, options):
                yield Segment(sanitize_text(text, keep="\n"), style, control)

    def _parts(self, width: int) -> Iterator[Any]:
        layouts = [_Layout(table, width) for table in self.tables]
        yield Text(sanitize_text(self.title), style="italic")
        for index, layout in enumerate(layouts):
            if index:
                yield Text("")
            yield layout.draw()
        if self.chart is not None:
            yield Text("")
            yield self.chart(width)
        notes = self.notes_with(column for layout in layouts for column in layout.columns)
        dropped = [column.title for layout in layouts for column in layout.dropped if column.title]
        if dropped:
            notes.append(f"no room for: {', '.join(dropped)}")
        if notes:
            yield Text("\n".join(map(sanitize_text, notes)), style="dim")


def text(report: Report) -> str:
    """Render a report as text, with colours where the standard output is a terminal, unless NO_COLOR is set.

    Columns are dropped only where the width is known: on a terminal, or with COLUMNS.
    """
    is_terminal = sys.stdout.isatty()
    width = text_width() or max([_WIDTH, *(_Layout(table, sys.maxsize).width for table in report.tables)])
    file = io.StringIO()
    # In a Jupyter kernel, a console would display the report and write nothing to the file.
    console = Console(file=file, width=width, force_terminal=is_terminal, force_jupyter=False, legacy_windows=False)
    console.print(report)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def text_width() -> int | None:
    """Return the width of the terminal, or COLUMNS; None: the standard output is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else None


class _Layout:
    """A table fitted to a width: the columns that are shown, and the width of each.

    Attributes:
        columns: The columns that are shown.
        dropped: The columns that do not fit.
    """

    def __init__(self, table: Table, width: int) -> None:
        self._table = table
        self._gap = 3 if table.has_rules else 2
        self._mark_width = max((len(line.mark) + 1 for line in table.lines if line.mark), default=0)
        full = [self._full_width(index) for index in range(len(table.columns))]
        least = [min(wide, _LEAST) if self._is_elastic(index) else wide for index, wide in enumerate(full)]
        shortest = _SHORTEST + self._mark_width
        name = min(full[0], max(width * 2 // 5, shortest))
        shown = list(range(1, len(table.columns)))
        while (droppable := [index for index in shown if table.columns[index].importance is not None]) and (
            name + sum(least[index] + self._gap for index in shown) > width
        ):
            shown.remove(max(droppable, key=lambda index: (table.columns[index].importance or 0, index)))
        # The others are dropped rather than cut in the middle, where a short name leaves no room either.
        while shown and min(full[0], shortest) + sum(least[index] + self._gap for index in shown) > width:
            shown.pop()
        # The name gets what the other columns do not need in full, then those get what it leaves, in order.
        room = width - sum(least[index] + self._gap for index in shown)
        elastic = sum(full[index] - least[index] for index in shown)
        self._widths = least
        self._widths[0] = min(full[0], max(min(name, room), room - elastic, shortest))
        room = max(room - self._widths[0], 0)
        for index in shown:
            extra = min(full[index] - least[index], room)
            self._widths[index] += extra
            room -= extra
        self._shown = [0, *shown]
        self.columns = [table.columns[index] for index in self._shown]
        self.dropped = [column for index, column in enumerate(table.columns) if index not in self._shown]

    @property
    def width(self) -> int:
        """The width of the columns that are shown, with the gaps between them."""
        return sum(self._widths[index] + self._gap for index in self._shown) - self._gap

    def draw(self) -> RichTable:
        options: dict[str, Any] = {} if self._table.has_rules else {"box": None, "padding": (0, self._gap, 0, 0)}
        drawn = RichTable(show_edge=False, pad_edge=False, **options)
        height = max(column.header.count("\n") for column in self.columns)
        for index in self._shown:
            column = self._table.columns[index]
            drawn.add_column(
                "\n" * (height - column.header.count("\n")) + column.drawn_header,
                justify=column.align,
                style=column.style,
                min_width=self._widths[index],
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
                drawn.add_row(*(self._text(line, index) for index in self._shown), style=line.style)
        return drawn

    def _cells(self, index: int) -> list[Cell]:
        return [line.cells[index] for line in self._table.lines if index < len(line.cells)]

    def _is_elastic(self, index: int) -> bool:
        """Whether the cells of a column may be drawn narrower than their text."""
        has_names = any(isinstance(cell, Names) for cell in self._cells(index))
        return index > 0 and (has_names or self._table.columns[index].wraps)

    def _full_width(self, index: int) -> int:
        """Return the width in which every cell is shown whole."""
        column = self._table.columns[index]
        widest = max((_drawn_width(cell, column) for cell in self._cells(index)), default=0)
        if self._is_elastic(index):
            widest = min(widest, _MOST)
        return max(widest + (0 if index else self._mark_width), *map(len, column.drawn_header.split("\n")))

    def _text(self, line: Line, index: int) -> Text:
        """Return a cell in the width of its column."""
        column, cell = self._table.columns[index], line.cells[index]
        if isinstance(cell, Names):
            return Text(_fitting_names([sanitize_text(name) for name in cell.names], self._widths[index]))
        if isinstance(cell, Bar) and column.bar_width:
            drawn = _bar(cell.fraction, column.bar_width)
            return Text.assemble((drawn, cell.style), f" {cell.text:>{_FIGURE}}" if cell.text else "")
        shown = sanitize_text(plain(cell))
        if index == 0 and line.kind != "section":
            mark = f"{line.mark:<{self._mark_width}}" if self._mark_width else ""
            return Text(mark + (shown if column.wraps else shorten(shown, self._widths[0] - self._mark_width)))
        return Text(shown, style=cell.style if isinstance(cell, Styled) else "")


def _drawn_width(cell: Cell, column: Column) -> int:
    if isinstance(cell, Bar) and column.bar_width:
        return column.bar_width + (1 + max(_FIGURE, len(cell.text)) if cell.text else 0)
    return len(plain(cell))


def plain(cell: Cell) -> str:
    """Return the text of a cell."""
    if isinstance(cell, Names):
        return ", ".join(cell.names)
    return cell if isinstance(cell, str) else "" if isinstance(cell, Segments | Image) else cell.text


def _fitting_names(names: Sequence[str], room: int) -> str:
    """Join as many names as fit, and the number of the others."""
    for shown in range(len(names), 0, -1):
        rest = f" +{len(names) - shown}" if shown < len(names) else ""
        line = ", ".join(names[:shown]) + rest
        if len(line) <= room:
            return line
    rest = f" +{len(names) - 1}" if len(names) > 1 else ""
    if names and room - len(rest) >= _SHORTEST:
        return shorten(names[0], room - len(rest)) + rest
    return plural(len(names), "value")[:room] if names else ""


def _bar(fraction: float, width: int) -> str:
    """
    >>> _bar(1 / 2, width=4) + "|", _bar(1 / 16, width=4) + "|", _bar(-1, width=4) + "|"
    ('██  |', '▎   |', '    |')
    """
    full, rest = divmod(round(8 * width * min(max(fraction, 0), 1)), 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)
