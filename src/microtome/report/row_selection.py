"""The selection and the order of the rows of a table."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from microtome.errors import BadQuery
from microtome.report.call_columns import OWN, call_columns, columns_of
from microtome.results.metrics import Metric, why_unknown
from microtome.results.profile import Profile
from microtome.results.rows import Row

#: The most rows, about, of a table without an explicit depth.
_ROWS = 60


@dataclass(frozen=True)
class RowSelection:
    """The rows and columns that a table of a profile shows.

    Attributes:
        depth: Show the tree down to here.
        granularity: Show calls of this height, not the tree.
        by: Show groups, `"module"`, `"type"` or `"op"`, not calls.
        sort: Order by this metric, the largest first, and show no tree.
        top: Show only the first rows.
        columns: The names of the columns; () for those that fit the profile and the terminal.
    """

    depth: int | None = None
    granularity: int | None = None
    by: str | None = None
    sort: str | None = None
    top: int | None = None
    columns: tuple[str, ...] = ()

    @property
    def is_default(self) -> bool:
        """Whether the rows are those of a table without options: the tree, as deep as there is room for."""
        return (self.depth, self.granularity, self.by, self.sort) == (None,) * 4


def whole_tree(profile: Profile, view: RowSelection) -> RowSelection:
    """Select every call by default, since files have room for them."""
    return replace(view, depth=deepest(profile)) if view.is_default else view


def rows_of(profile: Profile, view: RowSelection) -> list[tuple[Any, str]]:
    """Return the selected rows or groups, each with its name."""
    if view.by is not None:
        groups = {"module": profile.by_module, "type": profile.by_type, "op": profile.by_op}[view.by]()
        rows: list[tuple[Any, str]] = [(group, name or "(root)") for name, group in groups.items()]
    elif view.granularity is None and view.sort is None:
        depth = depth_of(profile) if view.depth is None else view.depth
        rows = [(row, "  " * row.depth + name_in_tree(row)) for row in profile if row.depth <= depth]
    else:
        is_by_depth = view.granularity is None and view.depth is not None
        options = (
            {"depth": view.depth}
            if is_by_depth
            else {"granularity": 1 if view.granularity is None else view.granularity}
        )
        rows = [(row, row.address or "(root)") for row in profile.rows(**options)]
    if view.sort is not None:
        metric = call_columns()[view.sort].metric
        assert metric is not None
        if metric.known_of == "calls" and metric.shown != "named":  # (own) rows have those of the calls inside
            rows = [pair for pair in rows if not pair[0].type.endswith(OWN)]
        if rows and all(_number(row, metric) is None for row, _ in rows):
            raise BadQuery(f"no row has a value of {view.sort!r} to sort by: {why_unknown(profile, metric)}")
        rows.sort(key=lambda pair: -(_number(pair[0], metric) or 0))
    return rows[: view.top]


def _number(row: Any, metric: Metric) -> float | None:
    value = metric.of(row)
    return value if isinstance(value, int | float) else None


def fitting_depth(depths: Sequence[int], most: int) -> int:
    """Return the greatest depth with at most so many rows, or else the least."""
    fitting = [deepest for deepest in set(depths) if sum(depth <= deepest for depth in depths) <= most]
    return max(fitting, default=min((depth for depth in depths if depth), default=1))


def depth_of(profile: Profile) -> int:
    """Return the depth of a table without options."""
    return fitting_depth([row.depth for row in profile], _ROWS)


def name_in_tree(row: Row) -> str:
    """Return the name of a call relative to the call that contains it."""
    if row.parent is None:
        return "(root)"
    above = row.parent.partition("#")[0]
    return row.address.removeprefix(f"{above}.") if above else row.address


def check(view: RowSelection) -> None:
    """Raise if a selection names unknown columns."""
    columns = columns_of(view.by)
    rows = {None: "", "module": " of modules", "type": " of types", "op": " of operators"}[view.by]
    for name in view.columns:
        if name not in columns:
            raise _no_column(name, rows, columns)
    sortable = [name for name, column in columns.items() if column.metric and column.part != "interval"]
    if view.sort is not None and view.sort not in sortable:
        raise _no_column(view.sort, f"{rows} to sort by", sortable)


def _no_column(name: str, purpose: str, names: Iterable[str]) -> BadQuery:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return BadQuery(f"no column {name!r}{purpose}: {hint}expected one of {', '.join(names)}")


def deepest(profile: Profile) -> int:
    return max(row.depth for row in profile)
