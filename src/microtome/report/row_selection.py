"""The selection and the order of the rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from microtome.errors import BadQuery
from microtome.report.call_columns import OWN, call_columns, columns_of
from microtome.report.call_tree import TreeRow, operators_of, tree_rows
from microtome.results.metrics import Metric, find_choice, why_unknown
from microtome.results.profile import Profile
from microtome.results.rows import Row

#: The most rows, about, of a table without an explicit depth.
_ROWS = 60
#: The header of the first column, which has the names of the rows, for calls and for groups.
NAME_HEADERS = {None: "call", "module": "module", "type": "module", "op": "operator"}


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
        expand: Show each of several identical blocks of the tree, not their sum.
        calls_only: Show no rows for operators between modules.
    """

    depth: int | None = None
    granularity: int | None = None
    by: str | None = None
    sort: str | None = None
    top: int | None = None
    columns: tuple[str, ...] = ()
    expand: bool = False
    calls_only: bool = False

    @property
    def is_tree(self) -> bool:
        """Whether the rows are the tree of calls."""
        return (self.granularity, self.by, self.sort) == (None,) * 3

    @property
    def is_default(self) -> bool:
        """Whether the rows are those of a table without options: the tree, as deep as there is room for."""
        return (self.depth, self.granularity, self.by, self.sort) == (None,) * 4


def whole_tree(profile: Profile, view: RowSelection) -> RowSelection:
    """Select every call by default, since files have room for them."""
    return replace(view, depth=deepest(profile) if view.is_default else view.depth, expand=True)


def rows_of(profile: Profile, view: RowSelection) -> list[tuple[Any, str]]:
    """Return the selected rows or groups, each with its name."""
    if view.by is not None:
        groups = {"module": profile.by_module, "type": profile.by_type, "op": profile.by_op}[view.by]()
        rows: list[tuple[Any, str]] = [(group, name or "(root)") for name, group in groups.items()]
    elif view.is_tree:
        tree = tree_rows(profile, expand=view.expand, calls_only=view.calls_only)
        depth = depth_of(tree) if view.depth is None else view.depth
        rows = [(one.row, "  " * one.depth + one.name) for one in tree if one.depth <= depth]
    else:
        is_by_depth = view.granularity is None and view.depth is not None
        options = (
            {"depth": view.depth}
            if is_by_depth
            else {"granularity": 1 if view.granularity is None else view.granularity}
        )
        rows = [(row, _name(row)) for row in profile.rows(**options)]
    if view.sort is not None:
        metric = call_columns()[view.sort].metric
        assert metric is not None
        if rows and all(_number(row, metric) is None for row, _ in rows):
            raise BadQuery(f"no row has a value of {view.sort!r} to sort by: {why_unknown(profile, metric)}")
        rows.sort(key=lambda pair: -(_number(pair[0], metric) or 0))
    return rows[: view.top]


def _name(row: Row) -> str:
    """Return the name of a row outside a tree, with the operators if it has those of a call alone."""
    name = row.address or "(root)"
    return f"{name} {operators_of(row)}" if row.type.endswith(OWN) else name


def _number(row: Any, metric: Metric) -> float | None:
    value = metric.of(row)
    return value if isinstance(value, int | float) else None


def fitting_depth(depths: Sequence[int], most: int) -> int:
    """Return the greatest depth below the root with at most so many rows, or else the least."""
    fitting = [deepest for deepest in set(depths) if deepest and sum(depth <= deepest for depth in depths) <= most]
    return max(fitting, default=min((depth for depth in depths if depth), default=1))


def depth_of(tree: Sequence[TreeRow]) -> int:
    """Return the depth of a table without options; rows of operators between modules take no depth from it."""
    return fitting_depth([row.depth for row in tree if not row.is_own], _ROWS)


def resolve_columns(view: RowSelection) -> RowSelection:
    """Replace headers by the names of their columns; raise if a selection names unknown ones."""
    columns = columns_of(view.by)
    rows = {None: "", "module": " of modules", "type": " of types", "op": " of operators"}[view.by]
    titles = {name: column.titles for name, column in columns.items()}
    names = [name for name in view.columns if name.strip().lower() != NAME_HEADERS[view.by]]  # always shown
    chosen = tuple(find_choice(name, titles, purpose=rows) for name in names)
    if view.sort is None:
        return replace(view, columns=chosen)
    sortable = {name: titles[name] for name, column in columns.items() if column.metric and column.part != "interval"}
    return replace(view, columns=chosen, sort=find_choice(view.sort, sortable, purpose=f"{rows} to sort by"))


def deepest(profile: Profile) -> int:
    return max(row.depth for row in profile)
