"""The table of a summary of a model that has not run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from microtome.report.row_selection import fitting_depth
from microtome.report.table import Column, Line, Medium, Report, Table
from microtome.results.metrics import find_choice
from microtome.results.summary import ModelSummary, ModuleRow
from microtome.units import Scale, count, plural, scale_of_largest, size

#: The most rows, about, of a table without an explicit depth.
_ROWS = 60
#: The columns to sort by, and their headers.
_SORTS = {"params": (), "trainable_params": ("trainable",), "param_bytes": ("weights",), "buffer_bytes": ("buffers",)}


@dataclass(frozen=True)
class ModuleSelection:
    """The modules that a table shows.

    Attributes:
        depth: Those down to this depth; None: as deep as there is room for.
        sort: Order by this column, the largest first, and show no tree.
        top: Show only the first rows.
        columns: The names of the columns; () for all.
    """

    depth: int | None = None
    sort: str | None = None
    top: int | None = None
    columns: tuple[str, ...] = ()


def report(summary: ModelSummary, view: ModuleSelection | None = None, medium: Medium = "terminal") -> Report:
    """Describe the tree of modules; Markdown has every module."""
    view = view or ModuleSelection()
    rows = _select_rows(summary, view, medium)
    columns = _columns(rows, medium)
    table = Table.of((Column("module", lambda row: _name(row, view), "left", is_name=True), *columns), rows)
    total = Line(("total", *(column.cell(summary.total) if index else "" for index, column in enumerate(columns))))
    lines = (*table.lines, Line(total.cells, style="bold", kind="total"))
    figures = (("params", count(summary.total.params)), ("weights", size(summary.total.param_bytes)))
    table = Table(table.columns, lines).with_columns(view.columns)
    return Report(summary.model, (table,), tuple(_notes(summary, rows)), figures=figures)


def records(summary: ModelSummary) -> list[dict[str, Any]]:
    """Return a record for each module."""
    return list(map(asdict, summary))


def _select_rows(summary: ModelSummary, view: ModuleSelection, medium: Medium) -> list[ModuleRow]:
    rows = list(summary)
    if view.sort is not None:
        name = find_choice(view.sort, _SORTS, purpose=" to sort by")
        rows.sort(key=lambda row: -getattr(row, name))
    if view.depth is not None or (view.sort is None and medium != "markdown"):
        depth = fitting_depth([row.depth for row in rows], _ROWS) if view.depth is None else view.depth
        rows = [row for row in rows if row.depth <= depth]
    return rows[: view.top]


def _name(row: ModuleRow, view: ModuleSelection) -> str:
    if not row.path:
        return "(root)"
    return row.path if view.sort is not None else "  " * row.depth + row.path.rpartition(".")[2]


def _columns(rows: list[ModuleRow], medium: Medium) -> tuple[Column, ...]:
    numbers = [number for row in rows for number in (row.params, row.shared_params)]
    scale = scale_of_largest(numbers, "count") if medium == "terminal" else None
    return (
        Column("type", lambda row: row.type, "left", style="cyan"),
        Column("params", lambda row: _params(row, scale), unit="" if scale is None else scale.unit),
        Column("weights", lambda row: size(row.param_bytes)),
        Column("buffers", lambda row: size(row.buffer_bytes)),
    )


def _params(row: ModuleRow, scale: Scale | None) -> str:
    write = count if scale is None else scale.write
    shared = f"(+{write(row.shared_params)})" if row.shared_params else ""
    return f"{write(row.params)} {shared}".rstrip()


def _notes(summary: ModelSummary, rows: list[ModuleRow]) -> list[str]:
    total = summary.total
    notes = [
        f"{plural(total.params, 'parameter')} ({total.trainable_params:,} trainable, {size(total.param_bytes)}); "
        f"{size(total.buffer_bytes)} of buffers"
    ]
    if any(row.shared_params for row in rows):
        notes.append("parameters in brackets are counted elsewhere: tied weights, or a module with several names")
    if len(rows) < len(summary):
        notes.append(f"{len(rows)} of {len(summary)} modules shown; the total includes all")
    notes.append(
        "the model has not run: pass inputs, such as mt.profile(model, (1, 3, 224, 224)), for MACs, FLOPs, memory and "
        "output shapes, and measure= for times"
    )
    return notes
