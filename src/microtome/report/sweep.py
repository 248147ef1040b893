"""The table and the chart of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.text import Text

from microtome.report.palette import CLOUD, EDGE, LINK
from microtome.report.requests import short
from microtome.report.table import Column, Medium, Report, Table
from microtome.report.text import StackedBar, colour_characters, sample, stacked_bars
from microtome.results.metrics import advise
from microtome.results.sweep import CutTiming, Sweep
from microtome.units import UNKNOWN, plural, rate, ratio, seconds, size, some, write

#: The most cuts of a table beside those that are always shown, and of a chart.
_ROWS, _BARS = 12, 24
#: A bar longer than this many times the shortest is cut off.
LONGEST = 6
_HEAD, _BETWEEN, _TAIL = "█", "░", "▓"
_COLOURS = {_HEAD: EDGE, _BETWEEN: LINK, _TAIL: CLOUD}
_BEST, _PLANNED = "*", "p"
#: How many times a planned time differs from the measured one where its profile was disturbed.
_FAR = 3


def report(sweep: Sweep, medium: Medium = "terminal") -> Report:
    """Describe the best cut, the cuts and the chart; files have every cut."""
    rows = _select_rows(sweep) if medium == "terminal" else list(sweep)
    table = Table.of(
        [Column("cut", lambda row: row.name, "left"), *_columns(sweep)],
        rows,
        lambda row: f"{_mark(sweep, row):<2}",
        lambda row: "bold green" if row is sweep.best else "dim" if row.failed else "",
    )
    notes = (*_compare(sweep, medium), *_notes(sweep, rows))
    return Report(_title(sweep), (table,), notes, chart=lambda width: _chart(sweep, width))


def records(sweep: Sweep) -> list[dict[str, Any]]:
    """Return a record for each cut, those that could not be measured included."""
    return [
        {"name": row.name, "best": row is sweep.best, "planned": row is sweep.planned, **asdict(row)} for row in sweep
    ]


# -- the table ---------------------------------------------------------------------------------------------------------


def _select_rows(sweep: Sweep) -> list[CutTiming]:
    """Return the best, the plan's, and the whole model on one side, in the order of the run."""
    best = {id(row) for row in sorted(sweep.measured, key=lambda row: row.total_s)[:_ROWS]}
    if len(sweep) <= _ROWS + 3:
        return list(sweep)
    return [row for row in sweep if id(row) in best or not row.at or row is sweep.planned]


#: The cells of a cut, by the header of their column.
CELLS: dict[str, Callable[[CutTiming], str]] = {
    "sent": lambda row: size(row.sent_bytes),
    "received": lambda row: size(row.received_bytes),
    "head": lambda row: write(row.head_s, "seconds"),
    "encode": lambda row: write(row.encode_s, "seconds"),
    "codec": lambda row: write(row.encode_s + row.codec_there_s + row.decode_s, "seconds"),
    "wire": lambda row: write(row.wire_s, "seconds"),
    "queue": lambda row: write(row.queue_s, "seconds"),
    "tail": lambda row: write(row.tail_s, "seconds"),
    "codec there": lambda row: write(row.codec_there_s, "seconds"),
    "decode": lambda row: write(row.decode_s, "seconds"),
    "total": lambda row: write(row.total_s, "seconds"),
    "planned": lambda row: write(row.planned_s, "seconds"),
    "energy": lambda row: write(row.energy_j, "joules"),
}
#: The columns that a run without a server has, too.
_LOCAL = ("head", "total", "planned", "energy")
#: The columns of the table by importance: on a narrow terminal the last are dropped first.
_IMPORTANCE = ("total", "planned", "head", "wire", "tail", "sent", "energy", "codec", "queue")


def cell(row: CutTiming, name: str) -> str:
    is_missing = row.failed is not None or (row.at is None and name not in _LOCAL)
    return UNKNOWN if is_missing else CELLS[name](row)


def has_energy(sweep: Sweep) -> bool:
    return any(row.energy_j is not None for row in sweep)


def _columns(sweep: Sweep) -> list[Column]:
    names = [name for name in CELLS if name in _IMPORTANCE and (name != "energy" or has_energy(sweep))]
    return [Column(name, partial(cell, name=name), importance=_IMPORTANCE.index(name)) for name in names]


def _mark(sweep: Sweep, row: CutTiming) -> str:
    return (_BEST if row is sweep.best else "") + (_PLANNED if row is sweep.planned else "")


# -- the chart ---------------------------------------------------------------------------------------------------------


def _chart(sweep: Sweep, width: int) -> Text:
    """Draw the time of each cut in the order of the run as stacked bars; of many, an even sample."""
    bars = []
    for row in sample(sweep.measured, _BARS, lambda one: one is sweep.best or one is sweep.planned):
        parts = ((_HEAD, row.head_s, True), (_BETWEEN, row.between_s, False), (_TAIL, row.tail_s, True))
        bars.append(StackedBar(row.name, f"{_mark(sweep, row):<2}", row.total_s, parts))
    legend = f"in the order of the run: {_HEAD} head {_BETWEEN} codec, wire, queue {_TAIL} tail"
    drawn = stacked_bars(bars, LONGEST * sweep.best.total_s, width, _COLOURS)
    return Text("\n").join([colour_characters(legend, _COLOURS), *drawn])


# -- title and notes ---------------------------------------------------------------------------------------------------


def _title(sweep: Sweep) -> str:
    link = sweep.link
    return (
        f"{sweep.title} on {sweep.inputs}, the rest at {sweep.server} ({sweep.device}): {sweep.best.name} is the best, "
        f"{seconds(sweep.best.total_s)} ({sweep.codec}; {rate(link.up_bytes_per_s)} there, rtt {seconds(link.rtt_s)})"
    )


def _compare(sweep: Sweep, medium: Medium) -> Iterator[str]:
    """Compare the best cut with the plan's, by their marks; media other than a terminal draw the best in bold."""
    best, planned = sweep.best, sweep.planned
    if planned is None:
        yield f"no plan: {sweep.no_plan or 'it knows none of these cuts'}"
        return
    has_marks, says = medium == "terminal", f"it says {seconds(planned.planned_s)}"
    if planned is best:
        yield f"{_BEST + _PLANNED if has_marks else 'bold:'} the best, and the plan's: {says}"
    else:
        slower = f"{ratio(planned.total_s / best.total_s)} times the best ({_BEST if has_marks else 'bold'})"
        mark = _PLANNED if has_marks else f"{planned.name}:"
        yield f"{mark} the plan's: {says}, and it took {seconds(planned.total_s)}, {slower}"


def planned_notes(sweep: Sweep) -> Iterator[str]:
    """Yield what the planned times rest on, and whether they can be."""
    if sweep.planned is None:
        return
    yield "planned: from a profile on each side and codec costs, taken after the requests"
    here = next((row for row in sweep.measured if row.at is None), None)
    if here is not None and here.planned_s and not 1 / _FAR < here.planned_s / here.total_s < _FAR:
        yield (
            f"the plan is of a busy machine: all here took {seconds(here.total_s)}, and its profile says "
            f"{seconds(here.planned_s)}. Close other programs, or, where both sides share a machine, give each its "
            "threads with OMP_NUM_THREADS"
        )


def _notes(sweep: Sweep, shown: Sequence[CutTiming]) -> Iterator[str]:
    if sweep.tied:
        yield f"cannot be told from the best: {some([row.name for row in sweep.tied], 3)}"
    yield f"medians of {plural(sweep.repeat, 'request')} a cut, taken in turns, one on its way at a time"
    yield from planned_notes(sweep)
    if len(shown) < len(sweep):
        files = advise("to_csv, to_json and to_html", "--csv, --json and --html")
        yield f"shown: {len(shown)} of {len(sweep)}; {files} have all"
    failed = [row for row in sweep if row.failed]
    if failed:
        yield f"{len(failed)} could not be measured: such as {failed[0].name}: {failed[0].failed}"
    if has_energy(sweep):
        yield f"energy of this device: {sweep.energy}"
    else:
        yield f"energy is not known: {short(sweep.energy)}"
