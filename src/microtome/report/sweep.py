"""The table and the chart of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from microtome.report.chart import StackedBar, sample, stacked_bars
from microtome.report.requests import short
from microtome.report.table import Column, Line, Medium, Report, Table
from microtome.results.sweep import CutTiming, Sweep
from microtome.units import UNKNOWN, joules, rate, ratio, seconds, size

#: The most cuts of a table beside those that are always there, and of a chart.
_ROWS, _BARS = 12, 24
#: A bar longer than this many times the shortest is cut off.
_LONGEST = 6
_HEAD, _BETWEEN, _TAIL = "█", "░", "▓"
_BEST, _PLANNED = "*", "p"


def report(sweep: Sweep, medium: Medium = "terminal") -> Report:
    """The best cut, the cuts and the chart; files have every cut."""
    rows = _shown(sweep) if medium == "terminal" else list(sweep)
    cells = _cells(sweep)
    columns = (Column("cut", right=False), *(Column(name, importance=_IMPORTANCE.index(name)) for name in cells))
    lines = tuple(
        Line(
            (row.name, *(_cell(cell, name, row) for name, cell in cells.items())),
            mark=f"{_mark(sweep, row):<2}",
            style="bold green" if row is sweep.best else "dim" if row.failed else "",
        )
        for row in rows
    )
    notes = tuple(_notes(sweep, rows))
    return Report(_title(sweep), (Table(columns, lines),), notes, chart=lambda width: _chart(sweep, width))


def records(sweep: Sweep) -> list[dict[str, Any]]:
    """A record for each cut, those that could not be measured included."""
    return [
        {"name": row.name, "best": row is sweep.best, "planned": row is sweep.planned, **asdict(row)} for row in sweep
    ]


# -- the table ---------------------------------------------------------------------------------------------------------


def _shown(sweep: Sweep) -> list[CutTiming]:
    """The best, the plan's, and the whole model on one side, in the order of the run."""
    best = {id(row) for row in sorted(sweep.measured, key=lambda row: row.total_s)[:_ROWS]}
    kept = [row for row in sweep if id(row) in best or not row.at or row is sweep.planned]
    return kept if len(sweep) > _ROWS + 3 else list(sweep)


def _cells(sweep: Sweep) -> dict[str, Callable[[CutTiming], str]]:
    """The functions that write the cells of each column."""
    cells: dict[str, Callable[[CutTiming], str]] = {
        "sent": lambda row: size(row.sent_bytes),
        "head": lambda row: seconds(row.head_s),
        "codec": lambda row: seconds(row.encode_s + row.codec_there_s + row.decode_s),
        "wire": lambda row: seconds(row.wire_s),
        "queue": lambda row: seconds(row.queue_s),
        "tail": lambda row: seconds(row.tail_s),
        "total": lambda row: seconds(row.total_s),
        "planned": lambda row: seconds(row.planned_s),
    }
    if any(row.energy_j is not None for row in sweep):
        cells["energy"] = lambda row: joules(row.energy_j)
    return cells


def _cell(cell: Callable[[CutTiming], str], name: str, row: CutTiming) -> str:
    missing = row.failed is not None or (row.at is None and name not in _HERE)
    return UNKNOWN if missing else cell(row)


#: The columns of a run without a server.
_HERE = ("head", "total", "planned", "energy")
#: The first are left out last where a terminal is too narrow.
_IMPORTANCE = ("total", "planned", "head", "wire", "tail", "sent", "energy", "codec", "queue")


def _mark(sweep: Sweep, row: CutTiming) -> str:
    return (_BEST if row is sweep.best else "") + (_PLANNED if row is sweep.planned else "")


# -- the chart ---------------------------------------------------------------------------------------------------------


def _chart(sweep: Sweep, width: int) -> str:
    """The time of each cut in the order of the run, as bars in parts; of many, of some evenly."""
    bars = []
    for row in sample(sweep.measured, _BARS, lambda one: one is sweep.best or one is sweep.planned):
        between = max(row.total_s - row.head_s - row.tail_s, 0.0)
        parts = ((_HEAD, row.head_s, True), (_BETWEEN, between, False), (_TAIL, row.tail_s, True))
        bars.append(StackedBar(row.name, f"{_mark(sweep, row):<2}", row.total_s, parts))
    legend = f"in the order of the run: {_HEAD} head {_BETWEEN} codec, wire, queue {_TAIL} tail"
    return "\n".join([legend, *stacked_bars(bars, _LONGEST * sweep.best.total_s, width)])


# -- in words ----------------------------------------------------------------------------------------------------------


def _title(sweep: Sweep) -> str:
    link = sweep.link
    return (
        f"{sweep.model} on {sweep.inputs}, the rest at {sweep.server} ({sweep.device}): {sweep.best.name} is the best, "
        f"{seconds(sweep.best.total_s)} ({sweep.codec}; {rate(link.up_bytes_per_s)} there, rtt {seconds(link.rtt_s)})"
    )


def _notes(sweep: Sweep, shown: Sequence[CutTiming]) -> Iterator[str]:
    best, planned = sweep.best, sweep.planned
    if planned is None:
        yield f"no plan: {sweep.no_plan or 'it knows none of these cuts'}"
    elif planned is best:
        yield f"{_BEST}{_PLANNED} the best, and the plan's: it says {seconds(planned.planned_s)}"
    else:
        yield (
            f"{_PLANNED} the plan's: it says {seconds(planned.planned_s)}, and it took {seconds(planned.total_s)}, "
            f"{ratio(planned.total_s / best.total_s)} times the best ({_BEST})"
        )
    if sweep.tied:
        names = ", ".join(row.name for row in sweep.tied[:3]) + (", …" if len(sweep.tied) > 3 else "")
        yield f"cannot be told from the best: {names}"
    yield f"medians of {sweep.repeat} requests a cut, taken in turns, one on its way at a time"
    if len(shown) < len(sweep):
        yield f"shown: {len(shown)} of {len(sweep)}; --csv, --json and --html have all"
    failed = [row for row in sweep if row.failed]
    if failed:
        yield f"{len(failed)} could not be measured: such as {failed[0].name}: {failed[0].failed}"
    known = any(row.energy_j is not None for row in sweep)
    yield f"energy of this device: {sweep.energy}" if known else f"energy is not known: {short(sweep.energy)}"
