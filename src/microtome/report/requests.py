"""The table of the parts of many requests to a server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from microtome.report.table import Column, Line, Medium, Report, Table
from microtome.results.requests import CutMove, RequestLog, record
from microtome.units import UNKNOWN, joules, ratio, seconds, size

#: The most reasons and moves that are listed.
_FEW = 5


def report(log: RequestLog, medium: Medium = "terminal") -> Report:
    """The median and the 95th percentile of each part of a request."""
    lines = tuple(Line(cells, style="bold" if cells[0] == "total" else "") for cells in _rows(log))
    columns = (Column("a request", right=False), Column("median"), Column("95 %"))
    return Report(_title(log), (Table(columns, lines),), tuple(_notes(log)))


def records(log: RequestLog) -> list[dict[str, Any]]:
    """A record for each request."""
    return list(map(record, log.requests))


def place(at: str | None, codec: str = "raw") -> str:
    """Describe where a model is cut.

    >>> place(None), place(""), place("layer1", "zstd")
    ('all here', 'all there', 'layer1, zstd')
    """
    if at is None:
        return "all here"
    return (at or "all there") + (f", {codec}" if codec != "raw" else "")


def short(reason: str) -> str:
    """Shorten the reason why there is no energy, since it names every sensor.

    >>> short("no sensor: rapl: /sys/class/powercap is not there")
    'no sensor; `microtome doctor` says what is missing'
    """
    return "no sensor; `microtome doctor` says what is missing" if reason.startswith("no sensor: ") else reason


def _rows(log: RequestLog) -> Iterator[tuple[str, ...]]:
    for tables, write in ((log.phases(), seconds), (log.sizes(), size)):
        for name, middle in tables.items():
            if middle is None:
                yield name, UNKNOWN, UNKNOWN
            else:
                yield name, *(write(round(value) if write is size else value) for value in middle)


def _title(log: RequestLog) -> str:
    of = f" of {ratio(log.samples / len(log.requests))} samples" if log.samples > len(log.requests) > 0 else ""
    return (
        f"{log.model} at {log.server} ({log.device}), {_where(log)}: {_count(len(log.requests), 'request')}{of} in "
        f"{seconds(log.wall_s)}, {ratio(log.rate_per_s)} a second"
    )


def _where(log: RequestLog) -> str:
    ways = list(dict.fromkeys(place(sent.at, sent.codec) for sent in log.requests))
    return f"cut at {ways[0]}" if len(ways) == 1 and log.requests[0].at else " then ".join(ways[:_FEW]) or "not run"


def _notes(log: RequestLog) -> Iterator[str]:
    kept = len(log.on_edge)
    if kept:
        yield f"{_count(kept, 'request')} of {len(log.requests)} ended here"
    for reason, times in list(log.reasons.items())[:_FEW]:
        yield f"  {times} of them: {reason}"
    again = sum(sent.attempts > 1 for sent in log.requests)
    if again:
        yield f"{_count(again, 'request')} had to be sent again"
    yield from map(_move, log.moves[:_FEW])
    if len(log.moves) > _FEW:
        yield f"and the cut moved {len(log.moves) - _FEW} times more"
    if log.energy_j is not None:
        yield f"energy of this device: {joules(log.energy_per_request_j)} a request ({log.energy})"
    elif log.energy:
        yield f"energy is not known: {short(log.energy)}"
    yield f"at most {_count(log.window, 'request')} on the way at once: what waits for another counts to the wire"


def _move(move: CutMove) -> str:
    when = datetime.fromtimestamp(move.when_s).astimezone().strftime("%H:%M:%S")
    return f"{when} {place(move.at, move.codec)}: {move.why}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
