"""A profile as a table: on a terminal, as text, as Markdown, as CSV."""

from __future__ import annotations

import csv as csv_format
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from microtome.errors import BadQuery
from microtome.profile import Amounts, Group, Profile, Row
from microtome.profile.data import AMOUNTS
from microtome.profile.files import flat
from microtome.report.terminal import bar, fitted, plain_text
from microtome.units import UNKNOWN, count, ratio, shape, share, size

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


@dataclass(frozen=True)
class _Column:
    header: str
    cell: Callable[[Any, Profile], str]
    right: bool = True


def _amount(name: str, write: Callable[[Any], str], header: str) -> _Column:
    return _Column(header, lambda row, _: write(getattr(row, name, None)))


def _flops_share(row: Any, profile: Profile) -> str:
    whole = profile.total.flops
    return f"{bar(row.flops, whole)} {share(row.flops, whole):>7}" if whole else UNKNOWN


_COLUMNS = {
    "type": _Column("module", lambda row, _: getattr(row, "type", ""), right=False),
    "runs": _Column("runs", lambda row, _: str(getattr(row, "runs", ""))),
    "inputs": _Column("input", lambda row, _: _shapes(getattr(row, "inputs", ())), right=False),
    "outputs": _Column("output", lambda row, _: _shapes(getattr(row, "outputs", ())), right=False),
    "dtype": _Column("dtype", lambda row, _: " ".join(dict.fromkeys(t.dtype for t in row.outputs)), right=False),
    "params": _Column("params", lambda row, _: _params(row)),
    "share": _Column("FLOPs share", _flops_share, right=False),
    "intensity": _Column("FLOPs/B", lambda row, _: ratio(row.intensity)),
    "output_bytes": _amount("output_bytes", size, "output"),
    "peak_bytes": _amount("peak_bytes", size, "peak"),
    "moved_bytes": _amount("moved_bytes", size, "moved"),
    "trainable_params": _amount("trainable_params", count, "trainable"),
    "param_bytes": _amount("param_bytes", size, "weights"),
    "buffer_bytes": _amount("buffer_bytes", size, "buffers"),
    "macs": _amount("macs", count, "MACs"),
    "flops": _amount("flops", count, "FLOPs"),
    "madds": _amount("madds", count, "MAdds"),
    "read_bytes": _amount("read_bytes", size, "read"),
    "write_bytes": _amount("write_bytes", size, "written"),
    "backward_macs": _amount("backward_macs", count, "bwd MACs"),
    "backward_flops": _amount("backward_flops", count, "bwd FLOPs"),
    "saved_bytes": _amount("saved_bytes", size, "saved"),
}
#: The first are left out last where a terminal is too narrow.
_SHOWN = ("flops", "params", "type", "share", "macs", "outputs", "backward_flops", "saved_bytes", "moved_bytes", "peak_bytes")  # fmt: skip  # noqa: E501
_ORDER = ("runs", "type", "outputs", "params", "macs", "flops", "share", "backward_flops", "saved_bytes", "moved_bytes", "peak_bytes")  # fmt: skip  # noqa: E501

COLUMNS = tuple(_COLUMNS)


@dataclass(frozen=True)
class _Lines:
    """A table as cells: what each column is called, one list of cells for each row, and the last for the whole."""

    columns: tuple[str, ...]
    headers: list[str]
    right: list[bool]
    rows: list[list[str]]
    total: list[str]
    left_out: tuple[str, ...]


def renderable(profile: Profile, view: View | None = None, width: int | None = None) -> Any:
    """What rich draws: the table, and under it what it rests on."""
    lines = _lines(profile, view or View(), width)
    table = Table(title=f"{profile.model} on {profile.inputs}", title_justify="left", show_edge=False, pad_edge=False)
    styles = {"type": "cyan", "share": "green", "outputs": "dim"}
    for name, header, right in zip(("", *lines.columns), lines.headers, lines.right, strict=True):
        table.add_column(header, justify="right" if right else "left", style=styles.get(name, ""), no_wrap=True)
    for row in lines.rows:
        table.add_row(*map(Text, row))
    table.add_section()
    table.add_row(*map(Text, lines.total), style="bold")
    return Stack(table, Text("\n".join(_notes(profile, view or View(), lines)), style="dim"))


def text(profile: Profile, view: View | None = None) -> str:
    """The table as text, with colours where the standard output is a terminal that wants them."""
    return plain_text(lambda width: renderable(profile, view, width))


def markdown(profile: Profile, view: View | None = None) -> str:
    lines = _lines(profile, view or View(), None)
    indent = "\N{NO-BREAK SPACE}"  # other spaces at the beginning of a cell are not shown
    rows = [[name.replace(" ", indent), *(cell.lstrip("█▏▎▍▌▋▊▉ ") for cell in rest)] for name, *rest in lines.rows]
    rule = ["---:" if right else "---" for right in lines.right]
    cells = [lines.headers, rule, *rows, lines.total]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)
    notes = "\n".join(f"- {note}" for note in _notes(profile, view or View(), lines))
    return f"**{profile.model}** on `{profile.inputs}`\n\n{table}\n\n{notes}\n"


def csv(profile: Profile, view: View | None = None) -> str:
    view = view or View(depth=max(row.depth for row in profile))
    file = io.StringIO()
    records = [flat(row) if isinstance(row, Row) else _flat_group(row) for row, _ in _rows(profile, view)]
    writer = csv_format.DictWriter(file, list(records[0]) if records else [])
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def _flat_group(group: Group) -> dict[str, Any]:
    return {"name": group.name, "runs": group.runs} | {name: getattr(group, name) for name in AMOUNTS}


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(profile: Profile, view: View) -> list[tuple[Any, str]]:
    """The rows or groups of a view, each with its name."""
    if view.sort is not None and view.sort not in _COLUMNS:
        raise BadQuery(f"there is no column {view.sort!r} to sort by: write one of {', '.join(COLUMNS)}")
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
        by = _sorted_by(view.sort)
        rows.sort(key=lambda pair: -(getattr(pair[0], by, None) or 0))
    return rows[: view.top]


def _sorted_by(column: str) -> str:
    by = "flops" if column == "share" else column
    if by in ("type", "inputs", "outputs", "dtype"):
        raise BadQuery(f"rows are sorted by a quantity, such as flops or params, not by {column}")
    return by


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
    for name in view.columns:
        if name not in _COLUMNS:
            raise BadQuery(f"there is no column {name!r}: write one of {', '.join(COLUMNS)}")
    pairs = _rows(profile, view)
    names = [name for _, name in pairs]
    wanted = view.columns or tuple(name for name in _ORDER if _has(profile, view, name))
    table = {name: [_COLUMNS[name].cell(row, profile) for row, _ in pairs] for name in wanted}
    whole = {name: _whole(name, profile) for name in wanted}
    chosen = wanted
    if width is not None and not view.columns:
        widths = {name: max(map(len, (_COLUMNS[name].header, whole[name], *table[name])), default=0) for name in wanted}
        first = max(map(len, ("total", *names)), default=0)
        chosen = fitted(wanted, widths, [name for name in ("runs", *_SHOWN) if name in wanted], width - first)
    what = "call" if view.by is None else {"type": "module", "op": "operator"}[view.by]
    return _Lines(
        columns=chosen,
        headers=[what, *(_COLUMNS[name].header for name in chosen)],
        right=[False, *(_COLUMNS[name].right for name in chosen)],
        rows=[[name, *(table[column][at] for column in chosen)] for at, name in enumerate(names)],
        total=["total", *(whole[name] for name in chosen)],
        left_out=tuple(name for name in wanted if name not in chosen),
    )


def _has(profile: Profile, view: View, column: str) -> bool:
    total = profile.total
    if column in ("backward_flops", "saved_bytes"):
        return getattr(total, column) is not None and view.by != "op"
    if view.by is not None:
        return column not in ("type", "outputs", "peak_bytes") and not (view.by == "op" and column == "params")
    return column != "runs"


def _whole(column: str, profile: Profile) -> str:
    return "" if column in ("type", "share", "runs") else _COLUMNS[column].cell(profile.total, profile)


def _shapes(tensors: Sequence[Any]) -> str:
    shown = [shape(tensor.shape) for tensor in tensors[:2]]
    return ", ".join(shown) + (", …" if len(tensors) > 2 else "")


def _params(row: Any) -> str:
    shared = getattr(row, "shared_params", 0)
    return f"({count(shared)})" if shared and not row.params else count(row.params)


# -- what the numbers rest on ------------------------------------------------------------------------------------------


def _notes(profile: Profile, view: View, lines: _Lines) -> list[str]:
    total, coverage = profile.total, profile.coverage
    notes = [
        f"{total.params:,} parameters ({total.trainable_params:,} trainable, {size(total.param_bytes)}); "
        f"{_known(total, 'macs', 'MACs')}; {_known(total, 'flops', 'FLOPs')} ({profile.convention} convention)",
        f"counted: {coverage.fraction:.1%} of {coverage.ops:,} operators, on {profile.how}",
    ]
    if coverage.unknown:
        names = ", ".join(f"{op.name} ({op.runs})" for op in coverage.unknown[:6])
        notes.append(f"no formula is known for {names}{', …' if len(coverage.unknown) > 6 else ''}")
    if coverage.never_ran:
        names = ", ".join(coverage.never_ran[:6])
        notes.append(f"never ran: {names}{', …' if len(coverage.never_ran) > 6 else ''}")
    if any(row.shared_params for row in profile):
        notes.append("parameters in brackets are counted elsewhere: tied weights, or a module that runs again")
    if view == View() and _depth(profile) < max(row.depth for row in profile):
        notes.append(f"shown to depth {_depth(profile)} of {max(row.depth for row in profile)}")
    if lines.left_out:
        notes.append(f"no room for: {', '.join(lines.left_out)}")
    return notes


def _known(total: Amounts, name: str, unit: str) -> str:
    number = getattr(total, name)
    return f"no {unit}" if number is None else f"{number:,} {unit}"
