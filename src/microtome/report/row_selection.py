"""The selection and the order of the rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from microtome.errors import BadQuery
from microtome.report.columns import OWN, call_columns, columns_of
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
        sort: Order by this quantity, the largest first, and show no tree.
        top: Show the first so many.
        columns: The names of the columns; () for those that fit the profile and the terminal.
    """

    depth: int | None = None
    granularity: int | None = None
    by: str | None = None
    sort: str | None = None
    top: int | None = None
    columns: tuple[str, ...] = ()


def whole_tree(profile: Profile, view: RowSelection) -> RowSelection:
    """The selection for a file, which has room for every call."""
    chosen = (view.depth, view.granularity, view.by, view.sort)
    return view if chosen != (None,) * 4 else replace(view, depth=deepest(profile))


def rows_of(profile: Profile, view: RowSelection) -> list[tuple[Any, str]]:
    """The rows or groups of a view, each with its name."""
    if view.by is not None:
        groups = {"module": profile.by_module, "type": profile.by_type, "op": profile.by_op}[view.by]()
        rows: list[tuple[Any, str]] = [(group, name or "(root)") for name, group in groups.items()]
    elif view.granularity is not None:
        rows = [(row, _name(row)) for row in profile.rows(granularity=view.granularity)]
    elif view.sort is not None and view.depth is not None:
        rows = [(row, _name(row)) for row in profile.rows(depth=view.depth)]
    elif view.sort is not None:
        rows = [(row, _name(row)) for row in profile.rows(granularity=1)]
    else:
        depth = depth_of(profile) if view.depth is None else view.depth
        rows = [(row, "  " * row.depth + name_in_tree(row)) for row in profile if row.depth <= depth]
    if view.sort is not None:
        metric = call_columns()[view.sort].metric
        assert metric is not None
        if metric.known_of == "calls" and metric.shown != "named":  # (own) rows have those of the calls inside
            rows = [pair for pair in rows if not pair[0].type.endswith(OWN)]
        if rows and all(_number(row, metric) is None for row, _ in rows):
            raise BadQuery(f"no row has a number of {view.sort!r} to sort by: {why_unknown(profile, metric)}")
        rows.sort(key=lambda pair: -(_number(pair[0], metric) or 0))
    return rows[: view.top]


def _number(row: Any, metric: Metric) -> float | None:
    value = metric.of(row)
    return value if isinstance(value, int | float) else None


def fitting_depth(depths: Sequence[int], most: int) -> int:
    """The greatest depth at which there are at most so many rows; else the least."""
    fitting = [deepest for deepest in set(depths) if sum(depth <= deepest for depth in depths) <= most]
    return max(fitting, default=min((depth for depth in depths if depth), default=1))


def depth_of(profile: Profile) -> int:
    """The depth of a table that has room for so many rows."""
    return fitting_depth([row.depth for row in profile], _ROWS)


def _name(row: Row) -> str:
    return row.address or "(root)"


def name_in_tree(row: Row) -> str:
    """The name of a call below that of the call that contains it."""
    if row.parent is None:
        return "(root)"
    above = row.parent.partition("#")[0]
    return row.address.removeprefix(f"{above}.") if above else row.address


def check(view: RowSelection) -> None:
    """Raise if a selection names unknown columns."""
    known = columns_of(view.by)
    for name in view.columns:
        if name not in known:
            raise BadQuery(f"there is no column {name!r}{_OF[view.by]}: write one of {', '.join(known)}")
    if view.sort is not None and view.sort not in known:
        raise BadQuery(f"there is no column {view.sort!r}{_OF[view.by]} to sort by: write one of {', '.join(known)}")
    if view.sort is not None and (known[view.sort].metric is None or known[view.sort].part == "interval"):
        raise BadQuery(f"rows are sorted by a quantity, such as flops or params, not by {view.sort}")


_OF = {None: "", "module": " of modules", "type": " of types", "op": " of operators"}


def deepest(profile: Profile) -> int:
    return max(row.depth for row in profile)
