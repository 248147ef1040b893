"""The table of the phases of many requests to a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from microtome.addresses import INPUT
from microtome.report.table import Column, Medium, Report, Table
from microtome.results.requests import CutMove, Percentiles, RequestLog, RequestRecord, record
from microtome.units import UNKNOWN, joules, plural, ratio, seconds, size, write

#: The most reasons and moves in the notes.
_FEW = 5


class _Phase(NamedTuple):
    name: str
    percentiles: Percentiles | None
    write: Callable[[float], str]

    def cell(self, index: int) -> str:
        return UNKNOWN if self.percentiles is None else self.write(self.percentiles[index])


def report(log: RequestLog, medium: Medium = "terminal") -> Report:
    """Describe the median and the 95th percentile of each phase of a request."""
    rows = [_Phase(name, percentiles, partial(write, unit="seconds")) for name, percentiles in log.phases().items()]
    rows += [_Phase(name, percentiles, lambda value: size(round(value))) for name, percentiles in log.sizes().items()]
    columns = (
        Column("a request", lambda row: row.name, "left"),
        Column("median", lambda row: row.cell(0)),
        Column("95 %", lambda row: row.cell(1)),
    )
    table = Table.of(columns, rows, style=lambda row: "bold" if row.name == "total" else "")
    return Report(_title(log), (table,), tuple(_notes(log)))


def records(log: RequestLog) -> list[dict[str, Any]]:
    """Return a record for each request, with the phases of each stage of a chain in columns such as `run_s from X`."""
    return list(map(_flat, log.requests))


def _flat(sent: RequestRecord) -> dict[str, Any]:
    flat = {name: value for name, value in record(sent).items() if name not in ("later", "hops")}
    flat["at"] = None if sent.at is None else place(sent.at, later=sent.later)
    for hop in sent.hops:
        flat |= {f"{name} from {hop.at or INPUT}": value for name, value in asdict(hop).items() if name != "at"}
    return flat


def place(at: str | None, codec: str = "raw", later: Sequence[str] = ()) -> str:
    """Describe where a model is cut.

    >>> place(None), place(""), place("layer1", "zstd"), place("stem", later=["layer1"])
    ('all here', '(input)', 'layer1, zstd', 'stem → layer1')
    """
    if at is None:
        return "all here"
    return " → ".join([at or INPUT, *later]) + (f", {codec}" if codec != "raw" else "")


def short(reason: str) -> str:
    """Shorten the reason why there is no energy, since it names every sensor.

    >>> short("no sensor: rapl: /sys/class/powercap is not there")
    'no sensor; `microtome doctor` says what is missing'
    """
    return "no sensor; `microtome doctor` says what is missing" if reason.startswith("no sensor: ") else reason


def _title(log: RequestLog) -> str:
    places = list(dict.fromkeys(place(sent.at, sent.codec, sent.later) for sent in log.requests))
    is_one_cut = len(places) == 1 and log.requests[0].at is not None
    where = f"cut at {places[0]}" if is_one_cut else " then ".join(places[:_FEW]) or "not run"
    count = len(log.requests)
    samples = f" of {ratio(log.samples / count)} samples" if log.samples and log.samples > count > 0 else ""
    return (
        f"{log.title} at {log.server} ({log.device}), {where}: {plural(count, 'request')}{samples} in "
        f"{seconds(log.wall_s)}, {ratio(log.rate_per_s)} a second"
    )


def _notes(log: RequestLog) -> Iterator[str]:
    if log.on_edge:
        yield f"{plural(len(log.on_edge), 'request')} of {len(log.requests):,} ended here"
    for reason, times in list(log.reasons.items())[:_FEW]:
        yield f"  {times:,} of them: {reason}"
    answered = len(log.requests) - len(log.on_edge)
    if log.on_edge and answered:
        yield f"rows of servers, such as wire, run and sent, are of {plural(answered, 'request')}: those they answered"
    retried = sum(sent.attempts > 1 for sent in log.requests)
    if retried:
        yield f"{plural(retried, 'request')} had to be sent again"
    yield from map(_move, log.moves[:_FEW])
    if len(log.moves) > _FEW:
        yield f"and the cut moved {plural(len(log.moves) - _FEW, 'time')} more"
    if log.energy_j is not None:
        yield f"energy of this device: {joules(log.energy_per_request_j)} a request ({log.energy})"
    elif log.energy:
        yield f"energy is not known: {short(log.energy)}"
    waiting = "as wire" if len(log.on_edge) < len(log.requests) else "in the total"
    yield f"at most {plural(log.window, 'request')} in flight: waiting for another counts {waiting}"


def _move(move: CutMove) -> str:
    when = datetime.fromtimestamp(move.when_s).astimezone().strftime("%H:%M:%S")
    return f"{when} {place(move.at, move.codec)}: {move.why}"
