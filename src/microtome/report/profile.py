"""A profile as a table: on a terminal, as text, as Markdown, as CSV."""

from __future__ import annotations

import csv as csv_format
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from microtome.errors import BadQuery
from microtome.profile import Amounts, Group, Profile, Row
from microtome.profile.data import AMOUNTS
from microtome.profile.files import flat
from microtome.profile.timing import Timing
from microtome.report.columns import COLUMNS, columns_of, interval
from microtome.report.terminal import fitted, plain_text
from microtome.units import seconds, size

#: A table that is not told how deep to go shows at most about this many rows.
_ROWS = 60


@dataclass(frozen=True)
class View:
    """Which rows of a profile are shown, and what of them.

    Attributes:
        depth: Show the tree down to here.
        granularity: Show calls of this height, not the tree.
        by: Show groups, `"type"` or `"op"`, not calls.
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


#: The first are left out last where a terminal is too narrow.
_SHOWN = ("flops", "time", "time_share", "backward_flops", "params", "saved_bytes", "type", "share", "macs", "outputs", "moved_bytes", "peak_bytes")  # fmt: skip  # noqa: E501
_ORDER = ("runs", "type", "outputs", "params", "macs", "flops", "share", "time", "time_share", "backward_flops", "saved_bytes", "moved_bytes", "peak_bytes")  # fmt: skip  # noqa: E501


@dataclass(frozen=True)
class _Lines:
    """A table as cells: what each column is called, one list of cells for each row, and the last for the whole."""

    columns: tuple[str, ...]
    headers: list[str]
    right: list[bool]
    rows: list[list[str]]
    total: list[str]
    left_out: tuple[str, ...]
    count: int


def renderable(profile: Profile, view: View | None = None, width: int | None = None) -> Any:
    """What rich draws: the table, and under it what it rests on."""
    lines = _lines(profile, view or View(), width)
    table = Table(show_edge=False, pad_edge=False)
    styles = {"type": "cyan", "share": "green", "outputs": "dim"}
    for at, (name, header, right) in enumerate(zip(("", *lines.columns), lines.headers, lines.right, strict=True)):
        width_ = max(len(header), *(len(row[at]) for row in (*lines.rows, lines.total)))
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(header, justify=justify, style=styles.get(name, ""), min_width=width_, no_wrap=True)
    for row in lines.rows:
        table.add_row(*map(Text, row))
    table.add_section()
    table.add_row(*map(Text, lines.total), style="bold")
    title = Text(f"{profile.model} on {profile.inputs}", style="italic")
    return Stack(title, table, Text("\n".join(_notes(profile, view or View(), lines)), style="dim"))


def text(profile: Profile, view: View | None = None) -> str:
    """The table as text, with colours where the standard output is a terminal that wants them."""
    return plain_text(lambda width: renderable(profile, view, width))


def markdown(profile: Profile, view: View | None = None) -> str:
    view = _whole_tree(profile, view or View())
    lines = _lines(profile, view, None)
    indent = "\N{NO-BREAK SPACE}"  # other spaces at the beginning of a cell are not shown
    rows = [[name.replace(" ", indent), *(cell.lstrip("█▏▎▍▌▋▊▉ ") for cell in rest)] for name, *rest in lines.rows]
    rule = ["---:" if right else "---" for right in lines.right]
    cells = [lines.headers, rule, *rows, lines.total]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)
    notes = "\n".join(f"- {note}" for note in _notes(profile, view, lines))
    return f"**{profile.model}** on `{profile.inputs}`\n\n{table}\n\n{notes}\n"


def csv(profile: Profile, view: View | None = None) -> str:
    """Every row of the view, all calls if it does not say which, with all their numbers."""
    view = _whole_tree(profile, view or View())
    check(view)
    file = io.StringIO()
    records = [flat(row) if isinstance(row, Row) else _flat_group(row) for row, _ in _rows(profile, view)]
    if view.columns:
        named = ("address", "name", *view.columns)
        records = [{name: value for name, value in record.items() if name in named} for record in records]
    writer = csv_format.DictWriter(file, list(records[0]) if records else [])
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def _whole_tree(profile: Profile, view: View) -> View:
    """The view as it is in a file, which has room for every call."""
    chosen = (view.depth, view.granularity, view.by, view.sort)
    return view if chosen != (None,) * 4 else replace(view, depth=_deepest(profile))


def _flat_group(group: Group) -> dict[str, Any]:
    return {"name": group.name, "runs": group.runs} | {name: getattr(group, name) for name in AMOUNTS}


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(profile: Profile, view: View) -> list[tuple[Any, str]]:
    """The rows or groups of a view, each with its name."""
    if view.by is not None:
        groups = {"type": profile.by_type, "op": profile.by_op}[view.by]()
        rows: list[tuple[Any, str]] = [(group, name) for name, group in groups.items()]
    elif view.granularity is not None:
        rows = [(row, _name(row)) for row in profile.rows(granularity=view.granularity)]
    elif view.sort is not None and view.depth is not None:
        rows = [(row, _name(row)) for row in profile.rows(depth=view.depth)]
    elif view.sort is not None:
        rows = [(row, _name(row)) for row in profile.rows(granularity=1)]
    else:
        depth = _depth(profile) if view.depth is None else view.depth
        rows = [(row, _in_tree(row)) for row in profile if row.depth <= depth]
    if view.sort is not None:
        by = {"share": "flops", "time": "time_s", "time_share": "time_s"}.get(view.sort, view.sort)
        if by in ("peak_bytes", "output_bytes"):  # which rows of their own have from the calls inside
            rows = [pair for pair in rows if not pair[0].type.endswith("(own)")]
        rows.sort(key=lambda pair: -(getattr(pair[0], by, None) or 0))
    return rows[: view.top]


def _depth(profile: Profile) -> int:
    """As deep as there is room for."""
    depths = [row.depth for row in profile]
    return next((d for d in range(max(depths), 0, -1) if sum(depth <= d for depth in depths) <= _ROWS), 1)


def _name(row: Row) -> str:
    return row.address or "(root)"


def _in_tree(row: Row) -> str:
    if row.parent is None:
        return "(root)"
    above = row.parent.partition("#")[0]
    name = row.address.removeprefix(f"{above}.") if above else row.address
    return "  " * row.depth + name


# -- cells -------------------------------------------------------------------------------------------------------------


def _lines(profile: Profile, view: View, width: int | None) -> _Lines:
    check(view)
    pairs = _rows(profile, view)
    names = [name for _, name in pairs]
    wanted = view.columns or tuple(name for name in _ORDER if _has(profile, view, name))
    table = {name: [COLUMNS[name].cell(row, profile) for row, _ in pairs] for name in wanted}
    whole = {name: _whole(name, profile) for name in wanted}
    chosen = wanted
    if width is not None and not view.columns:
        widths = {name: max(map(len, (COLUMNS[name].header, whole[name], *table[name])), default=0) for name in wanted}
        first = max(map(len, ("total", *names)), default=0)
        chosen = fitted(wanted, widths, [name for name in ("runs", *_SHOWN) if name in wanted], width - first)
    what = "call" if view.by is None else {"type": "module", "op": "operator"}[view.by]
    return _Lines(
        columns=chosen,
        headers=[what, *(COLUMNS[name].header for name in chosen)],
        right=[False, *(COLUMNS[name].right for name in chosen)],
        rows=[[name, *(table[column][at] for column in chosen)] for at, name in enumerate(names)],
        total=["total", *(whole[name] for name in chosen)],
        left_out=tuple(name for name in wanted if name not in chosen),
        count=len(_rows(profile, replace(view, top=None))),
    )


def check(view: View) -> None:
    """Raise where a view asks for what there is not."""
    known = columns_of(view.by)
    for name in view.columns:
        if name not in known:
            raise BadQuery(f"there is no column {name!r}{_OF[view.by]}: write one of {', '.join(known)}")
    if view.sort is not None and view.sort not in known:
        raise BadQuery(f"there is no column {view.sort!r}{_OF[view.by]} to sort by: write one of {', '.join(known)}")
    if view.sort in ("type", "inputs", "outputs", "dtype"):
        raise BadQuery(f"rows are sorted by a quantity, such as flops or params, not by {view.sort}")


_OF = {None: "", "type": " of types", "op": " of operators"}


def _has(profile: Profile, view: View, column: str) -> bool:
    needed = {
        "time": "time_s",
        "time_share": "time_s",
        "backward_flops": "backward_flops",
        "saved_bytes": "saved_bytes",
    }
    unknown = column in needed and getattr(profile.total, needed[column]) is None
    return column in columns_of(view.by) and not unknown


def _whole(column: str, profile: Profile) -> str:
    return "" if column in ("type", "share", "runs") else COLUMNS[column].cell(profile.total, profile)


# -- what the numbers rest on ------------------------------------------------------------------------------------------


def _notes(profile: Profile, view: View, lines: _Lines) -> list[str]:
    total, coverage = profile.total, profile.coverage
    counted = f"{_known(total, 'macs', 'MACs')}; {_known(total, 'flops', 'FLOPs')} ({profile.convention} convention)"
    notes = [
        f"{total.params:,} parameters ({total.trainable_params:,} trainable, {size(total.param_bytes)}); {counted}",
        f"counted: {coverage.fraction:.1%} of {coverage.ops:,} operators, on {profile.how}",
    ]
    if total.backward_flops is not None:
        notes.append(f"backward: {total.backward_flops:,} FLOPs; {size(total.saved_bytes)} saved for it")
    elif total.saved_bytes is not None:
        notes.append(f"the {profile.convention} convention does not say what a backward costs")
    if profile.timing is not None:
        notes += _timing_notes(profile.timing)
    if coverage.unknown:
        notes.append(f"no formula is known for {_some([f'{op.name} ({op.runs})' for op in coverage.unknown])}")
    if coverage.never_ran:
        notes.append(
            f"never ran: {_some(_folded(coverage.never_ran))}; parameters they hold count in the call above them"
        )
    if "params" in lines.columns and any("(" in row[1 + lines.columns.index("params")] for row in lines.rows):
        notes.append("parameters in brackets are counted elsewhere: tied weights, or a module that runs again")
    chosen = (view.depth, view.granularity, view.by, view.sort)
    if chosen == (None,) * 4 and _depth(profile) < _deepest(profile):
        notes.append(f"shown to depth {_depth(profile)} of {_deepest(profile)}")
    if view.top is not None and len(lines.rows) < lines.count:
        notes.append(f"shown: {len(lines.rows)} of {lines.count} rows; the total is of all")
    if lines.left_out:
        notes.append(f"no room for: {', '.join(COLUMNS[name].header for name in lines.left_out)}")
    return notes


def _timing_notes(timing: Timing) -> list[str]:
    bare, where = timing.bare, timing.environment
    notes = [
        f"time: median of {bare.count} passes after {timing.warmups}, {where['threads']} threads of {where['cpu']}; "
        f"a bare pass takes {seconds(bare.median)} ({interval(bare)}), one with time stamps {timing.ratio:.3f} of it; "
        f"{seconds(timing.stamp_s)} a call are taken off"
    ]
    if timing.ratio > 1.05:
        notes.append("the time stamps cost more than 5 %: short calls look longer than they are")
    return notes


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _folded(paths: Sequence[str]) -> list[str]:
    """Paths that differ in a number alone as one, with how many there are."""
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(re.sub(r"\b\d+\b|(?<=_)\d+\b", "*", path), []).append(path)
    return [f"{name} ({len(several)})" if len(several) > 1 else several[0] for name, several in alike.items()]


def _deepest(profile: Profile) -> int:
    return max(row.depth for row in profile)


def _known(total: Amounts, name: str, unit: str) -> str:
    number = getattr(total, name)
    return f"no {unit}" if number is None else f"{number:,} {unit}"
