"""The table of the cuts of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from microtome.report.row_selection import fitting_depth
from microtome.report.table import Bar, Cell, Column, Line, Medium, Names, Note, Report, Table, text
from microtome.results.cuts import Cut, Cuts, Live
from microtome.units import count, shape, size

#: The most rows, about, of a table without an explicit depth, beside those that are marked.
_ROWS = 60
#: The most reasons for a refusal that are listed, and the most places of each.
_REASONS, _PLACES = 4, 3
_MARK = "*"
#: The width of the bar of the most bytes.
_BAR = 8
#: The most rows and names in a notebook.
_NOTEBOOK_ROWS, _NOTEBOOK_NAMES = 40, 3


@dataclass(frozen=True)
class CutSelection:
    """The cuts that a table shows.

    Attributes:
        depth: Those at calls down to here; None: as deep as there is room for, and those that are marked.
        every: All of them.
    """

    depth: int | None = None
    every: bool = False


def report(cuts: Cuts, view: CutSelection | None = None, medium: Medium = "terminal") -> Report:
    """The cuts, and under them the places that are refused; Markdown has every cut."""
    view = view or CutSelection()
    if medium == "markdown":
        view = CutSelection(view.depth, every=view.depth is None)
    rows = _selected(cuts, view)[: _NOTEBOOK_ROWS if medium == "html" else None]
    most = max(cuts.input_bytes, cuts.output_bytes, *(cut.nbytes for cut in rows), 1)
    columns, lines = _terminal(cuts, rows, most) if medium == "terminal" else (_FILE_COLUMNS, _file(rows, most, medium))
    notes: list[str | Note] = [*_notes(cuts, view, rows, _MARK if medium == "terminal" else "bold")]
    if medium == "terminal" and any(live.source == cut.at for cut in rows for live in cut.live):
        notes.append(Note("itself: what the call at the cut returns", (columns[-1],)))
    figures = [("cuts", str(len(cuts))), ("input", size(cuts.input_bytes)), ("output", size(cuts.output_bytes))]
    figures += [("fewest bytes", f"{size(cuts.best().nbytes)} at {cuts.best().at}")] if len(cuts) else []
    tables = (Table(columns, tuple(lines)),) if rows else ()
    return Report(_title(cuts), tables, (*notes, *_refusals(cuts)), figures=tuple(figures))


def details(cut: Cut, cuts: Cuts) -> str:
    """One cut, with everything that crosses it, as text."""
    columns = (Column("crosses", right=False, wraps=True), Column("shape", right=False), Column("dtype", right=False))
    lines = tuple(Line((live.name, shape(live.shape), live.dtype, size(live.nbytes))) for live in cut.live)
    crossing = f"{size(cut.nbytes)} cross; the input has {size(cuts.input_bytes)}"
    head = f"{count(cut.head_macs)} MACs, {count(cut.head_params)} parameters ({size(cut.head_param_bytes)})"
    tail = f"{count(cut.tail_macs)} MACs, {count(cut.tail_params)} parameters ({size(cut.tail_param_bytes)})"
    table = Table((*columns, Column("bytes")), lines)
    return text(
        Report(f"{cuts.model} cut at {cut.at} ({cut.type}): {crossing}", (table,), (f"head: {head}", f"tail: {tail}"))
    )


def records(cuts: Cuts) -> list[dict[str, Any]]:
    """A record for each place, those that are refused included, in the order of the run."""
    places = sorted((*cuts.offered, *cuts.refused), key=lambda cut: cut.index)
    live = [{"live": " ".join(one.name for one in cut.live)} for cut in places]
    return [{name: getattr(cut, name) for name in _FIELDS} | names for cut, names in zip(places, live, strict=True)]


_FIELDS = ("at", "type", "depth", "live", "nbytes", "head_macs", "tail_macs", "head_params", "tail_params", "head_param_bytes", "tail_param_bytes", "dominates", "refused")  # fmt: skip  # noqa: E501


# -- the table ---------------------------------------------------------------------------------------------------------

#: The kind of module is left out first where a terminal is too narrow, and the bytes last.
_COLUMNS = (
    Column("cut", right=False, is_name=True),
    Column("module", right=False, importance=7),
    Column("bytes", importance=0),
    Column("", right=False, importance=3, style="green", bar_width=_BAR),
    Column("head\nMACs", importance=1),
    Column("tail\nMACs", importance=5),
    Column("head\nparams", importance=6),
    Column("tail\nparams", importance=4),
    Column("crosses", right=False, importance=2),
)
_FILE_COLUMNS = tuple(column for column in _COLUMNS if column.header)


def _terminal(cuts: Cuts, rows: Sequence[Cut], most: int) -> tuple[tuple[Column, ...], list[Line]]:
    """The rows between those of the input and the output, with bars of what crosses."""

    def end(name: str, nbytes: int, crosses: Cell) -> Line:
        return Line((name, "", size(nbytes), Bar(nbytes / most), "", "", "", "", crosses), mark=" ", style="dim")

    lines = [end("(input)", cuts.input_bytes, Names(tuple(live.name for live in cuts.inputs)))]
    for cut in rows:
        cells: tuple[Cell, ...] = (
            cut.at,
            cut.type,
            size(cut.nbytes),
            Bar(cut.nbytes / most),
            *_counts(cut),
            Names(_crossing(cut)),
        )
        lines.append(Line(cells, mark=_MARK if cut.dominates else " ", style="bold" if cut.dominates else ""))
    return _COLUMNS, [*lines, end("(output)", cuts.output_bytes, "")]


def _file(rows: Sequence[Cut], most: int, medium: Medium) -> list[Line]:
    """The rows with the full names of what crosses, of which a notebook has some."""
    lines = []
    for cut in rows:
        names = tuple(live.name for live in cut.live)
        if medium == "html" and len(names) > _NOTEBOOK_NAMES:
            names = (*names[:_NOTEBOOK_NAMES], f"and {len(names) - _NOTEBOOK_NAMES} more")
        nbytes = Bar(cut.nbytes / most, size(cut.nbytes))
        cells: tuple[Cell, ...] = (cut.at, cut.type, nbytes, *_counts(cut), Names(names))
        lines.append(Line(cells, style="bold" if cut.dominates else ""))
    return lines


def _counts(cut: Cut) -> tuple[str, ...]:
    return tuple(map(count, (cut.head_macs, cut.tail_macs, cut.head_params, cut.tail_params)))


def _selected(cuts: Cuts, view: CutSelection) -> list[Cut]:
    if view.every:
        return list(cuts)
    if view.depth is not None:
        return [cut for cut in cuts if cut.depth <= view.depth]
    depth = _depth(cuts)
    return [cut for cut in cuts if cut.depth <= depth or cut.dominates]


def _depth(cuts: Cuts) -> int:
    return fitting_depth([cut.depth for cut in cuts], _ROWS)


def _crossing(cut: Cut) -> tuple[str, ...]:
    """The names of what crosses; the cut's own output first, without its address, which stands beside it."""
    own = [f"itself{live.name.removeprefix(cut.at)}" for live in cut.live if live.source == cut.at]
    return (*own, *(live.name for live in cut.live if live.source != cut.at))


# -- in words ----------------------------------------------------------------------------------------------------------


def _title(cuts: Cuts) -> str:
    refused = f", {len(cuts.refused)} places refused" if cuts.refused else ""
    return f"{cuts.model} on {_described(cuts.inputs)}: {_plural(len(cuts), 'cut')}{refused}"


def _described(values: Sequence[Live]) -> str:
    shapes = [
        f"{'' if live.name.startswith('args[') else f'{live.name}='}{shape(live.shape)}:{live.dtype}" for live in values
    ]
    return ", ".join(shapes) or "no tensor"


def _plural(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _notes(cuts: Cuts, view: CutSelection, rows: Sequence[Cut], mark: str) -> Iterator[str]:
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
