"""Many requests to a server, in short: on a terminal, as text, as Markdown, as CSV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from datetime import datetime
from typing import Any

from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from microtome.report.spreadsheet import csv_text
from microtome.report.terminal import escaped, plain_text
from microtome.results.requests import CutMove, RequestLog, record
from microtome.units import UNKNOWN, joules, ratio, seconds, size

#: How many reasons and moves are told.
_FEW = 5


def renderable(ran: RequestLog, width: int | None = None) -> Any:
    """What rich draws: the middle and the far end of each part of a request, and under it what there is to say."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("a request", no_wrap=True)
    for header in ("median", "95 %"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, *cells in _rows(ran):
        table.add_row(Text(name), *map(Text, cells), style="bold" if name == "total" else "")
    return Stack(Text(_title(ran), style="italic"), table, Text("\n".join(_notes(ran)), style="dim"))


def text(ran: RequestLog) -> str:
    """As text, with colours where the standard output is a terminal that wants them."""
    return plain_text(lambda width: renderable(ran, width))


def markdown(ran: RequestLog) -> str:
    lines = [["a request", "median", "95 %"], ["---", "---:", "---:"], *_rows(ran)]
    table = "\n".join("| " + " | ".join(map(escaped, line)) + " |" for line in lines)
    notes = "\n".join(f"- {escaped(note)}" for note in _notes(ran))
    return f"**{escaped(_title(ran))}**\n\n{table}\n\n{notes}\n"


def csv(ran: RequestLog) -> str:
    """A line a request, raw numbers."""
    names = [field.name for field in fields(type(ran.requests[0])) if field.name != "began"] if ran.requests else ["at"]
    return csv_text(names, map(record, ran.requests))


def place(at: str | None, codec: str = "raw") -> str:
    """Where a model is cut, in words.

    >>> place(None), place(""), place("layer1", "zstd")
    ('all here', 'all there', 'layer1, zstd')
    """
    if at is None:
        return "all here"
    return (at or "all there") + (f", {codec}" if codec != "raw" else "")


def short(reason: str) -> str:
    """Why there is no energy, in short: that of every sensor is long.

    >>> short("no sensor: rapl: /sys/class/powercap is not there")
    'no sensor; `microtome doctor` says what is missing'
    """
    return "no sensor; `microtome doctor` says what is missing" if reason.startswith("no sensor: ") else reason


def _rows(ran: RequestLog) -> Iterator[list[str]]:
    for tables, write in ((ran.phases(), seconds), (ran.sizes(), size)):
        for name, middle in tables.items():
            if middle is None:
                yield [name, UNKNOWN, UNKNOWN]
            else:
                yield [name, *(write(round(value) if write is size else value) for value in middle)]


def _title(ran: RequestLog) -> str:
    of = f" of {ratio(ran.samples / len(ran.requests))} samples" if ran.samples > len(ran.requests) else ""
    return (
        f"{ran.model} at {ran.server} ({ran.device}), {_where(ran)}: {_count(len(ran.requests), 'request')}{of} in "
        f"{seconds(ran.wall_s)}, {ratio(ran.rate_per_s)} a second"
    )


def _where(ran: RequestLog) -> str:
    ways = list(dict.fromkeys(place(sent.at, sent.codec) for sent in ran.requests))
    return f"cut at {ways[0]}" if len(ways) == 1 and ran.requests[0].at else " then ".join(ways[:_FEW]) or "not run"


def _notes(ran: RequestLog) -> Iterator[str]:
    kept = len(ran.on_edge)
    if kept:
        yield f"{_count(kept, 'request')} of {len(ran.requests)} ended here"
    for reason, times in list(ran.reasons.items())[:_FEW]:
        yield f"  {times} of them: {reason}"
    again = sum(sent.attempts > 1 for sent in ran.requests)
    if again:
        yield f"{_count(again, 'request')} had to be sent again"
    yield from map(_move, ran.moves[:_FEW])
    if len(ran.moves) > _FEW:
        yield f"and the cut moved {len(ran.moves) - _FEW} times more"
    if ran.energy_j is not None:
        yield f"energy of this device: {joules(ran.energy_per_request_j)} a request ({ran.energy})"
    elif ran.energy:
        yield f"energy is not known: {short(ran.energy)}"
    yield f"at most {_count(ran.window, 'request')} on the way at once: what waits for another counts to the wire"


def _move(move: CutMove) -> str:
    when = datetime.fromtimestamp(move.when_s).astimezone().strftime("%H:%M:%S")
    return f"{when} {place(move.at, move.codec)}: {move.why}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
