"""Render any kind of result as text, Markdown, CSV or HTML."""

from __future__ import annotations

import csv as csv_format
import io
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from microtome.errors import BadQuery, sanitize_text
from microtome.report import find_renderer, table
from microtome.report.notebook import page
from microtome.report.table import Cell, Column, Line, Medium, Names, Report, Table, plain
from microtome.results.base import Result

#: Spreadsheets read a cell with such a prefix as a formula; some skip tabs and new lines before it.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def describe(result: Result, *options: Any, medium: Medium = "terminal") -> Report:
    """Build the report of a result, with the options of its kind, such as the selected rows."""
    report: Report = find_renderer(f"{result.kind}.report")(result, *options, medium=medium)
    return report


def text(result: Result, *options: Any) -> str:
    return table.text(describe(result, *options))


def show(result: Result, selection: str = "", **options: Any) -> None:
    """Print the selected rows and columns of a result; in a notebook, display them as HTML.

    Args:
        selection: The name of the class of its options, such as `"cuts.CutSelection"`; "": it has none.
    """
    selected = [find_renderer(selection)(**_check_options(options))] if selection else []
    if is_notebook():
        bundle = {"text/html": html(result, *selected), "text/plain": text(result, *selected)}
        import_module("IPython.display").display(bundle, raw=True)
    else:
        sys.stdout.write(text(result, *selected) + "\n")


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    for name, least in (("depth", 0), ("granularity", 1), ("top", 1)):
        value = options.get(name)
        if value is not None and (not isinstance(value, int) or value < least):
            raise BadQuery(f"expected {name} of {least} or more, got {value!r}")
    groups = ("module", "type", "op")
    if options.get("by") not in (None, *groups):
        raise BadQuery(f"expected by to be one of {', '.join(groups)}, got {options['by']!r}")
    columns = options["columns"]
    return options | {"columns": (columns,) if isinstance(columns, str) else tuple(columns)}


def is_notebook() -> bool:
    """Whether the code runs in a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def html(result: Result, *options: Any) -> str:
    """Render HTML for a notebook."""
    return page(describe(result, *options, medium="html"))


def csv(result: Result, *options: Any) -> str:
    """Render CSV: raw numbers, one line a row."""
    records = find_renderer(f"{result.kind}.records")(result, *options)
    return csv_text(list(dict.fromkeys(name for record in records for name in record)), records)


def selected_json(result: Result, *options: Any) -> str:
    """Render JSON of the selected rows, raw numbers; `microtome.load` reads only JSON of the whole result."""
    records = find_renderer(f"{result.kind}.records")(result, *options)
    about = {name: getattr(result, name) for name in ("model", "name", "inputs") if hasattr(result, name)}
    return json.dumps({"kind": "rows", "of": result.kind, **about, "rows": records}, indent=1) + "\n"


def markdown(result: Result, *options: Any) -> str:
    return report_markdown(describe(result, *options, medium="markdown"))


def report_markdown(report: Report) -> str:
    """Render a report as Markdown."""
    notes = "\n".join(f"- {escape_markdown(note)}" for note in report.notes_with())
    parts = [f"**{escape_markdown(report.title)}**", *map(_markdown_table, report.tables), notes]
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown_table(one: Table) -> str:
    rules = ["---:" if column.align == "right" else "---" for column in one.columns]
    rows = [[escape_markdown(column.title) for column in one.columns], rules]
    rows += [[_markdown_cell(line, at, column) for at, column in enumerate(one.columns)] for line in one.lines]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"<details><summary>{escape_markdown(one.summary)}</summary>\n\n{lines}\n\n</details>" if one.summary else lines
    )


def _markdown_cell(line: Line, at: int, column: Column) -> str:
    cell: Cell = line.cells[at]
    if isinstance(cell, Names):
        return ", ".join(map(code_span, cell.names))
    name = plain(cell)
    bare = name.lstrip(" ")
    is_code = column.is_name and line.kind != "total" and bare != "(root)"
    shown = "\N{NO-BREAK SPACE}" * (len(name) - len(bare)) + (code_span(bare) if is_code else escape_markdown(bare))
    return f"**{shown}**" if at == 0 and "bold" in line.style and line.kind == "row" else shown


def escape_markdown(text: str) -> str:
    """Escape text for Markdown, also in a table.

    >>> escape_markdown("a<b>&amp; *c* | d")
    'a&lt;b&gt;&amp;amp; \\\\*c\\\\* \\\\| d'
    """
    safe = sanitize_text(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", safe)


def code_span(name: str) -> str:
    """Format a name as a Markdown code span, also in a table.

    >>> code_span("layer1.0"), code_span("a|b"), code_span("`tick`")
    ('`layer1.0`', '`a\\\\|b`', '`` `tick` ``')
    """
    if not name:
        return ""
    safe = sanitize_text(name).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", safe)), default=0))
    return f"{fence} {safe} {fence}" if len(fence) > 1 else f"`{safe}`"


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any] | Mapping[str, Any]]) -> str:
    """Format a table as CSV. A string that a spreadsheet would read as a formula begins with an apostrophe.

    >>> csv_text(["name", "value"], [["=1+1", -1.5], {"name": "a,b"}]).splitlines()
    ['name,value', "'=1+1,-1.5", '"a,b",']
    """
    file = io.StringIO()
    writer = csv_format.writer(file)
    writer.writerow(map(_csv_cell, header))
    for row in rows:
        cells = [row.get(name) for name in header] if isinstance(row, Mapping) else row
        writer.writerow(map(_csv_cell, cells))
    return file.getvalue()


def _csv_cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
