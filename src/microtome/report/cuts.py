"""Cuts as a table: on a terminal, as text, as Markdown, as CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from microtome.errors import printable
from microtome.report.spreadsheet import csv_text
from microtome.report.terminal import bar, code, escaped, fitted, plain_text, shortened
from microtome.results.cuts import Cut, Cuts, Live
from microtome.units import count, shape, size

#: A table that is not told how deep to go shows at most about this many rows beside those that are marked.
_ROWS = 60
#: How many reasons for refusing are told, and how many places of each.
_REASONS, _PLACES = 4, 3
#: The widest and the narrowest that names of what crosses are shown, and to what a single name may be shortened.
_NAMES, _FEW, _READABLE = 48, 10, 16
_MARK = "*"
#: How long the bar of the most bytes is.
_BAR = 8
_INPUT, _OUTPUT = "(input)", "(output)"


@dataclass(frozen=True)
class CutSelection:
    """Which cuts are shown.

    Attributes:
        depth: Those at calls down to here; None: as deep as there is room for, and those that are marked.
        every: All of them.
    """

    depth: int | None = None
    every: bool = False


@dataclass(frozen=True)
class _Column:
    header: tuple[str, str]
    cell: Callable[[Cut], str]


_COLUMNS = {
    "type": _Column(("", "module"), lambda cut: printable(cut.type)),
    "bytes": _Column(("", "bytes"), lambda cut: size(cut.nbytes)),
    "head_macs": _Column(("head", "MACs"), lambda cut: count(cut.head_macs)),
    "tail_macs": _Column(("tail", "MACs"), lambda cut: count(cut.tail_macs)),
    "head_params": _Column(("head", "params"), lambda cut: count(cut.head_params)),
    "tail_params": _Column(("tail", "params"), lambda cut: count(cut.tail_params)),
}
#: The first are left out last where a terminal is too narrow; the kind of module is shown where there is room to spare.
_IMPORTANCE = ("bytes", "head_macs", "crosses", "bar", "tail_params", "tail_macs", "head_params")


def renderable(cuts: Cuts, view: CutSelection | None = None, width: int = 140) -> Any:
    """What rich draws: the table, and under it what it rests on, with the places that are refused."""
    view = view or CutSelection()
    rows = rows_of(cuts, view)
    layout = _layout(cuts, rows, width)
    notes = [*notes_of(cuts, view, rows), *_of_terminal(layout, rows), *_refusals(cuts)]
    parts: list[Any] = [Text(printable(title_of(cuts)), style="italic")]
    if rows:
        parts.append(_table(cuts, rows, layout))
    return Stack(*parts, Text("\n".join(map(printable, notes)), style="dim"))


def text(cuts: Cuts, view: CutSelection | None = None) -> str:
    """The table as text, with colours where the standard output is a terminal that wants them."""
    return plain_text(lambda width: renderable(cuts, view, width))


def details(cut: Cut, cuts: Cuts) -> str:
    """One cut, with everything that crosses it, as text."""
    return plain_text(lambda width: _one(cut, cuts))


def markdown(cuts: Cuts, view: CutSelection | None = None) -> str:
    """All cuts, or those down to a depth, with the full names of what crosses."""
    view = view or CutSelection()
    rows = rows_of(cuts, CutSelection(view.depth, every=view.depth is None))
    headers = ["cut", *map(_header, _COLUMNS), "crosses"]
    lines = [headers, ["---", "---", *["---:"] * (len(_COLUMNS) - 1), "---"]]
    for cut in rows:
        name = f"**{code(cut.at)}**" if cut.dominates else code(cut.at)
        crossing = ", ".join(code(live.name) for live in cut.live)
        lines.append([name, *(escaped(column.cell(cut)) for column in _COLUMNS.values()), crossing])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"- {escaped(note)}" for note in [*notes_of(cuts, view, rows, "bold"), *_refusals(cuts)])
    return f"**{escaped(title_of(cuts))}**\n\n{table}\n\n{notes}\n"


def csv(cuts: Cuts) -> str:
    """A line a place, raw numbers, those that are refused included, in the order of the run."""
    places = sorted((*cuts.offered, *cuts.refused), key=lambda cut: cut.index)
    records = [{name: getattr(cut, name) for name in _FIELDS if name != "live"} for cut in places]
    live = (" ".join(one.name for one in cut.live) for cut in places)
    return csv_text(_FIELDS, (record | {"live": names} for record, names in zip(records, live, strict=True)))


_FIELDS = ("at", "type", "depth", "live", "nbytes", "head_macs", "tail_macs", "head_params", "tail_params", "head_param_bytes", "tail_param_bytes", "dominates", "refused")  # fmt: skip  # noqa: E501


# -- the table ---------------------------------------------------------------------------------------------------------


def rows_of(cuts: Cuts, view: CutSelection) -> list[Cut]:
    if view.every:
        return list(cuts)
    if view.depth is not None:
        return [cut for cut in cuts if cut.depth <= view.depth]
    depth = _depth(cuts)
    return [cut for cut in cuts if cut.depth <= depth or cut.dominates]


def _depth(cuts: Cuts) -> int:
    """As deep as there is room for."""
    depths = [cut.depth for cut in cuts]
    fitting = [deepest for deepest in set(depths) if sum(depth <= deepest for depth in depths) <= _ROWS]
    return max(fitting, default=min(depths, default=1))


def _table(cuts: Cuts, rows: Sequence[Cut], layout: _CutLayout) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("\ncut", no_wrap=True, min_width=layout.where + 2)
    for name in layout.columns:
        left: Any = "left" if name in ("type", "bar", "crosses") else "right"
        ink = "green" if name == "bar" else ""
        table.add_column(_header(name, "\n"), justify=left, style=ink, no_wrap=True, min_width=layout.widths[name])
    most = max(cuts.input_bytes, cuts.output_bytes, *(cut.nbytes for cut in rows))

    def add(name: str, nbytes: int, values: dict[str, str], style: str = "") -> None:
        values |= {"bytes": size(nbytes), "bar": bar(nbytes, most, _BAR)}
        table.add_row(*map(Text, (name, *(values.get(column, "") for column in layout.columns))), style=style)

    room = layout.widths["crosses"]
    taken = _names([printable(live.name) for live in cuts.inputs], room)
    add(f"  {_INPUT}", cuts.input_bytes, {"crosses": taken}, "dim")
    for cut in rows:
        values = {name: column.cell(cut) for name, column in _COLUMNS.items()}
        values["crosses"] = _names(_crossing(cut), room)
        marked = f"{_MARK if cut.dominates else ' '} {shortened(printable(cut.at), layout.where)}"
        add(marked, cut.nbytes, values, "bold" if cut.dominates else "")
    add(f"  {_OUTPUT}", cuts.output_bytes, {}, "dim")
    return table


@dataclass(frozen=True)
class _CutLayout:
    """What a terminal has room for.

    Attributes:
        where: The width of addresses.
        columns: The names of the others.
        widths: Of each.
    """

    where: int
    columns: tuple[str, ...]
    widths: dict[str, int]

    @property
    def left_out(self) -> list[str]:
        return [_header(name) for name in (*_COLUMNS, "crosses") if name not in self.columns]


def _layout(cuts: Cuts, rows: Sequence[Cut], width: int) -> _CutLayout:
    widths = {name: _width(column, rows) for name, column in _COLUMNS.items()}
    widths["bytes"] = max(widths["bytes"], len(size(cuts.input_bytes)), len(size(cuts.output_bytes)))
    wanted = min(max((len(", ".join(_crossing(cut))) for cut in rows), default=0), _NAMES)
    widths |= {"crosses": _FEW, "bar": _BAR}
    longest = max((len(cut.at) for cut in rows), default=0)
    where = max(min(longest, width * 9 // 20), len(_OUTPUT))
    room = width - where - 2
    every = ("type", "bytes", "bar", *(name for name in _COLUMNS if name not in ("type", "bytes")), "crosses")
    columns = fitted(every, widths, _IMPORTANCE, room)
    if "crosses" in columns:
        room -= sum(widths[name] + 3 for name in columns) - _FEW
        widths["crosses"] = max(_FEW, min(wanted, room))
        if room - widths["crosses"] >= widths["type"] + 3:
            columns = ("type", *columns)
    return _CutLayout(where, columns, widths)


def _width(column: _Column, rows: Sequence[Cut]) -> int:
    return max(*map(len, column.header), *(len(column.cell(cut)) for cut in rows), 0)


def _header(name: str, between: str = " ") -> str:
    words = _COLUMNS[name].header if name in _COLUMNS else ("", "" if name == "bar" else name)
    return between.join(words) if between == "\n" else between.join(filter(None, words))


def _crossing(cut: Cut) -> list[str]:
    """The names of what crosses; the cut's own output first, without its address, which stands beside it."""
    own = [f"itself{live.name.removeprefix(cut.at)}" for live in cut.live if live.source == cut.at]
    return list(map(printable, own + [live.name for live in cut.live if live.source != cut.at]))


def _names(names: Sequence[str], room: int) -> str:
    """As many as there is room for, and how many others there are."""
    for shown in range(len(names), 0, -1):
        rest = f" +{len(names) - shown}" if shown < len(names) else ""
        line = ", ".join(names[:shown]) + rest
        if len(line) <= room:
            return line
    rest = f" +{len(names) - 1}" if len(names) > 1 else ""
    if names and room - len(rest) >= _READABLE:
        return shortened(names[0], room - len(rest)) + rest
    return _plural(len(names), "value") if names else "nothing"


# -- one cut -----------------------------------------------------------------------------------------------------------


def _one(cut: Cut, cuts: Cuts) -> Any:
    title = (
        f"{cuts.model} cut at {cut.at} ({cut.type}): {size(cut.nbytes)} cross; the input has {size(cuts.input_bytes)}"
    )
    table = Table(show_edge=False, pad_edge=False)
    for at, header in enumerate(("crosses", "shape", "dtype", "bytes")):
        table.add_column(header, justify="right" if at == 3 else "left", overflow="fold")
    for live in cut.live:
        table.add_row(*map(Text, (printable(live.name), shape(live.shape), live.dtype, size(live.nbytes))))
    sides = [
        f"head: {count(cut.head_macs)} MACs, {count(cut.head_params)} parameters ({size(cut.head_param_bytes)})",
        f"tail: {count(cut.tail_macs)} MACs, {count(cut.tail_params)} parameters ({size(cut.tail_param_bytes)})",
    ]
    return Stack(Text(printable(title), style="italic"), table, Text("\n".join(sides), style="dim"))


# -- in words ----------------------------------------------------------------------------------------------------------


def title_of(cuts: Cuts) -> str:
    refused = f", {len(cuts.refused)} places refused" if cuts.refused else ""
    return f"{cuts.model} on {_described(cuts.inputs)}: {_plural(len(cuts), 'cut')}{refused}"


def _described(values: Sequence[Live]) -> str:
    shapes = [
        f"{'' if live.name.startswith('args[') else f'{live.name}='}{shape(live.shape)}:{live.dtype}" for live in values
    ]
    return ", ".join(shapes) or "no tensor"


def _plural(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def notes_of(cuts: Cuts, view: CutSelection, rows: Sequence[Cut], mark: str = _MARK) -> Iterator[str]:
    if cuts.offered:
        best = cuts.best()
        yield f"fewest bytes: {best.at}, {size(best.nbytes)}; {_beside_input(cuts)}"
    if any(cut.dominates for cut in rows):
        yield f"{mark}: sends fewer bytes than every cut before it"
    if len(rows) < len(cuts):
        yield f"shown: {len(rows)} of {len(cuts)} cuts, those {_which(cuts, view)}"
    if not cuts.offered and not cuts.refused:
        yield "a model is cut where a module inside it ends, and none runs inside this one"
    yield f"read from a run on {_how(cuts)}"


def _beside_input(cuts: Cuts) -> str:
    first = next((cut for cut in cuts if cut.nbytes < cuts.input_bytes), None)
    than = f"the input's {size(cuts.input_bytes)}"
    return f"none has fewer than {than}" if first is None else f"the first with fewer than {than}: {first.at}"


def _of_terminal(layout: _CutLayout, rows: Sequence[Cut]) -> Iterator[str]:
    if "crosses" in layout.columns and any(live.source == cut.at for cut in rows for live in cut.live):
        yield "itself: what the call at the cut returns"
    if rows and layout.left_out:
        yield f"no room for: {', '.join(layout.left_out)}"


def _which(cuts: Cuts, view: CutSelection) -> str:
    return f"to depth {_depth(cuts)} and those marked {_MARK}" if view.depth is None else f"to depth {view.depth}"


def _how(cuts: Cuts) -> str:
    stand, _, why = cuts.how.partition(" ")
    return f"{stand} tensors {why}".rstrip()


def _refusals(cuts: Cuts) -> Iterator[str]:
    """The places that are refused, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for cut in cuts.refused:
        reasons.setdefault(cut.refused or "", []).append(cut.at)
    for reason, places in list(reasons.items())[:_REASONS]:
        more = f" and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
        yield f"refused at {', '.join(places[:_PLACES])}{more}: {reason}"
    if len(reasons) > _REASONS:
        left = sum(map(len, list(reasons.values())[_REASONS:]))
        yield f"refused at {_plural(left, 'more place')} for other reasons of the kind"
