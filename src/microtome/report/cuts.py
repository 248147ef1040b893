"""The table of the cuts of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import inf
from typing import Any, get_args

from microtome.report.capping import cap, with_gaps
from microtome.report.row_selection import fitting_depth
from microtome.report.table import Bar, Cell, Column, Line, Medium, Names, Note, Report, Table, gap
from microtome.results.cuts import By, Cut, Cuts, Live
from microtome.results.metrics import find_choice
from microtome.results.rows import group
from microtome.units import count, plural, shape, size, some

#: The most rows, about, of a table without an explicit depth, not counting marked cuts.
_ROWS = 60
#: The most reasons for refusals in the notes, and the most places of each.
_REASONS, _PLACES = 4, 3
_MARK = "*"
#: The column of the bytes that cross for each token after the prompt.
_TOKEN = "per token"
#: The width of the bar of the most bytes.
_BAR = 8
#: The most rows and names in a notebook.
_NOTEBOOK_ROWS, _NOTEBOOK_NAMES = 40, 3


@dataclass(frozen=True)
class CutSelection:
    """The cuts that a table shows.

    Attributes:
        depth: Those at calls down to this depth; None: as deep as there is room for, and those that are marked.
        every: All of them.
        sort: Order by this quantity, the least first, and by default show all.
        top: Show only the first rows.
        columns: The names of the columns; () for those that fit the terminal.
    """

    depth: int | None = None
    every: bool = False
    sort: str | None = None
    top: int | None = None
    columns: tuple[str, ...] = ()


def report(cuts: Cuts, view: CutSelection | None = None, medium: Medium = "terminal") -> Report:
    """Describe the cuts and the refused places; Markdown has every cut."""
    view = _resolve_sort(view or CutSelection())
    if medium == "markdown" and view.depth is None:
        view = replace(view, every=True)
    selected = _select_rows(cuts, view)
    # The fewer bytes cross, the better is a cut.
    costs = [inf if cut.dominates else -cut.nbytes for cut in selected]
    kept = cap(costs, _NOTEBOOK_ROWS) if medium == "html" else range(len(selected))
    rows = [selected[index] for index in kept]
    most = max(cuts.input_bytes, cuts.output_bytes, *(cut.nbytes for cut in rows), 1)
    columns = _columns(cuts, most, medium)
    table = Table.of(
        columns, rows, lambda cut: _MARK if cut.dominates else " ", lambda cut: "bold" if cut.dominates else ""
    )
    filled = with_gaps(kept, table.lines, len(selected))
    lines = tuple(line if isinstance(line, Line) else gap(line, len(columns) - 1) for line in filled)
    table = replace(table, lines=lines)
    notes: list[str | Note] = [*_notes(cuts, view, rows, _MARK if medium == "terminal" else "bold")]
    if len(rows) < len(cuts):
        where = _describe_depth(cuts, view, medium) if len(selected) < len(cuts) else ""
        notes.append(f"shown: {len(rows)} of {plural(len(cuts), 'cut')}{where}")
    if medium == "terminal":
        if view.sort is None:
            table = replace(table, lines=_between_ends(cuts, table, most))
        if any(live.source == cut.at for cut in rows for live in cut.live):
            notes.append(Note(_explain_itself(rows), (columns[-1],)))
    table = table.with_columns(view.columns)
    if view.sort is not None:
        table = table.with_kept_column(view.sort)
    figures = [("cuts", str(len(cuts))), ("input", size(cuts.input_bytes)), ("output", size(cuts.output_bytes))]
    figures += [("fewest bytes", f"{size(cuts.best().nbytes)} at {cuts.best().at}")] if len(cuts) else []
    return Report(_title(cuts), (table,) if rows else (), (*notes, *_refusals(cuts)), figures=tuple(figures))


def details(cut: Cut, cuts: Cuts) -> Report:
    """Describe one cut, with everything that crosses it."""
    columns = (
        Column("crosses", lambda live: live.name, "left", is_name=True, wraps=True),
        Column("shape", lambda live: shape(live.shape), "left"),
        Column("dtype", lambda live: live.dtype, "left"),
        Column("bytes", lambda live: size(live.nbytes)),
    )
    crossing = f"{size(cut.nbytes)} cross; the input has {size(cuts.input_bytes)}"
    head = f"{count(cut.head_macs)} MACs, {count(cut.head_params)} parameters ({size(cut.head_param_bytes)})"
    tail = f"{count(cut.tail_macs)} MACs, {count(cut.tail_params)} parameters ({size(cut.tail_param_bytes)})"
    title = f"{cuts.title} cut at {cut.at} ({cut.type}): {crossing}"
    return Report(title, (Table.of(columns, cut.live),), (f"head: {head}", f"tail: {tail}"))


def records(cuts: Cuts) -> list[dict[str, Any]]:
    """Return a record for each place, refused ones included, in the order of the run."""
    places = sorted((*cuts.offered, *cuts.refused), key=lambda cut: cut.index)
    names = [name for name in Cut.__dataclass_fields__ if name != "index"]
    return [
        {name: getattr(cut, name) for name in names}
        | {"token_bytes": cuts.token_bytes(cut.at)}
        | {"live": " ".join(live.name for live in cut.live)}
        for cut in places
    ]


# -- the table ---------------------------------------------------------------------------------------------------------


def _columns(cuts: Cuts, most: int, medium: Medium) -> tuple[Column, ...]:
    """On a narrow terminal the kind of module is dropped first, and the bytes last."""

    def amount(header: str, field: str, importance: int) -> Column:
        return Column(header, lambda cut: count(getattr(cut, field)), importance=importance)

    def bar(cut: Cut) -> Bar:
        return Bar(cut.nbytes / most, "" if medium == "terminal" else size(cut.nbytes))

    if medium == "terminal":
        nbytes = [
            Column("bytes", lambda cut: size(cut.nbytes), importance=0),
            Column("", bar, "left", importance=3, style="green", bar_width=_BAR),
        ]
    else:
        nbytes = [Column("bytes", bar)]
    return (
        Column("cut", lambda cut: cut.at, "left", is_name=True),
        Column("module", lambda cut: cut.type, "left", importance=7),
        *nbytes,
        *(_phase_columns(cuts) if cuts.token is not None else ()),
        amount("head\nMACs", "head_macs", 1),
        amount("tail\nMACs", "tail_macs", 5),
        amount("head\nparams", "head_params", 6),
        amount("tail\nparams", "tail_params", 4),
        Column("crosses", lambda cut: Names(_crossing(cut, medium)), "left", importance=2),
    )


def _phase_columns(cuts: Cuts) -> tuple[Column, ...]:
    """Return the columns of a language model: bytes that cross for each token, and bytes of its cache."""
    return (
        Column(_TOKEN, lambda cut: size(cuts.token_bytes(cut.at)), importance=1),
        Column("head\ncache", lambda cut: size(cut.head_state_bytes), importance=2),
        Column("tail\ncache", lambda cut: size(cut.tail_state_bytes), importance=2),
    )


def _between_ends(cuts: Cuts, table: Table, most: int) -> tuple[Line, ...]:
    """Put the cuts between rows for the input and the output."""

    def end(name: str, nbytes: int, token_bytes: int | None, crosses: Cell) -> Line:
        known: dict[str, Cell] = {"cut": name, "bytes": size(nbytes), "": Bar(nbytes / most), "crosses": crosses}
        known |= {} if token_bytes is None else {_TOKEN: size(token_bytes)}
        return Line(tuple(known.get(column.title, "") for column in table.columns), mark=" ", style="dim")

    inputs, step = Names(tuple(live.name for live in cuts.inputs)), cuts.decode
    return (
        end("(input)", cuts.input_bytes, None if step is None else step.input_bytes, inputs),
        *table.lines,
        end("(output)", cuts.output_bytes, None if step is None else step.output_bytes, ""),
    )


def _crossing(cut: Cut, medium: Medium) -> tuple[str, ...]:
    """Return the names of what crosses; on a terminal the cut's own output first, without the address beside it."""
    if medium == "terminal":
        own = [f"itself{live.name.removeprefix(cut.at)}" for live in cut.live if live.source == cut.at]
        return (*own, *(live.name for live in cut.live if live.source != cut.at))
    names = tuple(live.name for live in cut.live)
    if medium == "html" and len(names) > _NOTEBOOK_NAMES:
        names = (*names[:_NOTEBOOK_NAMES], f"and {len(names) - _NOTEBOOK_NAMES} more")
    return names


def _explain_itself(cuts: Sequence[Cut]) -> str:
    names = (live.name.removeprefix(cut.at) for cut in cuts for live in cut.live if live.source == cut.at)
    argument = next((name for name in names if name.startswith("(args")), None)
    other = "" if argument is None else f"; itself{argument}: its argument, after the call changed it in place"
    return f"itself: the output of the call at the cut{other}"


def _select_rows(cuts: Cuts, view: CutSelection) -> list[Cut]:
    """Return the selected cuts; those dominate that send fewer bytes than every selected cut before them."""
    rows = list(cuts)
    if view.depth is not None:
        rows = [cut for cut in cuts if cut.depth <= view.depth]
    elif not view.every and view.sort is None:
        depth = _depth(cuts)
        rows = [cut for cut in cuts if cut.depth <= depth or cut.dominates]
    fewest = accumulate((cut.nbytes for cut in rows), min, initial=inf)
    rows = [replace(cut, dominates=cut.nbytes < least) for cut, least in zip(rows, fewest, strict=False)]
    if view.sort is not None:
        rows = sorted(rows, key=partial(_sort_key, by=view.sort))
    return rows[: view.top]


def _resolve_sort(view: CutSelection) -> CutSelection:
    """Replace a header by the name of the quantity; raise if it is unknown."""
    if view.sort is None:
        return view
    return replace(view, sort=find_choice(view.sort, dict.fromkeys(get_args(By), ()), purpose=" to sort by"))


def _sort_key(cut: Cut, by: str) -> float:
    value = getattr(cut, "nbytes" if by == "bytes" else by)
    return inf if value is None else value


def _depth(cuts: Cuts) -> int:
    return fitting_depth([cut.depth for cut in cuts], _ROWS)


# -- title and notes ---------------------------------------------------------------------------------------------------


def _title(cuts: Cuts) -> str:
    refused = f", {plural(len(cuts.refused), 'place')} refused" if cuts.refused else ""
    inputs = ", ".join(map(_input, cuts.inputs)) or "no tensor"
    return f"{cuts.title} on {inputs}: {plural(len(cuts), 'cut')}{refused}"


def _input(live: Live) -> str:
    name = "" if live.name.startswith("args[") else f"{live.name} "
    return f"{name}{shape(live.shape)}{'' if live.dtype == 'float32' else f':{live.dtype}'}"


def _notes(cuts: Cuts, view: CutSelection, rows: Sequence[Cut], mark: str) -> Iterator[str]:
    if cuts.offered:
        best, limit = cuts.best(), f"the input's {size(cuts.input_bytes)}"
        first = next((cut for cut in cuts if cut.nbytes < cuts.input_bytes), None)
        fewer = f"none has fewer than {limit}" if first is None else f"the first with fewer than {limit}: {first.at}"
        yield f"fewest bytes: {best.at}, {size(best.nbytes)}; {fewer}"
    if any(cut.dominates for cut in rows):
        yield f"{mark}: sends fewer bytes than every cut {'' if view.depth is None else 'to this depth '}before it"
    if cuts.token is not None:
        yield (
            f"bytes: for the prompt of {plural(cuts.prompt_tokens or 0, 'token')}; {_TOKEN}: for each one after it; "
            "cache: after the prompt"
        )
    if cuts.no_decode is not None:
        yield f"{_TOKEN}: not known: {cuts.no_decode}"
    if not cuts.offered and not cuts.refused:
        yield "a model is cut where a module inside it ends, and none runs inside this one"
    tensor_mode, _, why = cuts.how.partition(" ")
    yield f"read from a run on {tensor_mode} tensors {why}".rstrip()


def _describe_depth(cuts: Cuts, view: CutSelection, medium: Medium) -> str:
    """Describe the cuts that were selected by their depth; "" if they were selected otherwise."""
    if view.sort is not None or view.top is not None:
        return ""
    if view.depth is not None:
        return f", those to depth {view.depth}"
    return f", those to depth {_depth(cuts)} and those {f'marked {_MARK}' if medium == 'terminal' else 'in bold'}"


def _refusals(cuts: Cuts) -> Iterator[str]:
    """Describe the refused places, those with the same reason together."""
    reasons = group((cut.refused or "", cut.at) for cut in cuts.refused)
    for reason, places in list(reasons.items())[:_REASONS]:
        yield f"refused at {some(places, _PLACES, ' and {} more')}: {reason}"
    if len(reasons) > _REASONS:
        others = sum(map(len, list(reasons.values())[_REASONS:]))
        yield f"refused at {plural(others, 'more place')} for other reasons of the kind"
