"""The page of a sweep: bars and a table in one self-contained HTML document without a script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from microtome.report.html.document import read_asset
from microtome.report.palette import variables
from microtome.report.requests import short
from microtome.report.sweep import CELLS, LONGEST, cell, has_energy, planned_notes
from microtome.report.text import shorten
from microtome.results.sweep import CutTiming, Sweep
from microtome.units import plural, rate, ratio, seconds, some

#: Pixels of the chart: of names, of bars, of the figures beside them, and of a row.
_NAMES, _BARS, _FIGURES, _ROW = 250, 560, 90, 18
_LONG_NAME = 36

_COLUMNS = ("sent", "received", "head", "encode", "wire", "queue", "tail", "codec there", "decode", "total", "planned")


def html(sweep: Sweep) -> str:
    """Render the page. Names from a model or a server are escaped."""
    title = escape(f"{sweep.title} at {sweep.server}")
    lines = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{title}</title><style>\n{variables()}\n{read_asset('sweep.css')}</style>",
        f"<h1>{title}: {escape(sweep.best.name)} is the best, {seconds(sweep.best.total_s)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in _summary(sweep)),
        '<p class="key dim"><i style="background:var(--edge)"></i>head<i style="background:var(--link)"></i>'
        'codec, wire and queue<i style="background:var(--cloud)"></i>tail</p>',
        f'<div class="chart">{_chart(sweep)}</div><div class="table">{_table(sweep)}</div>',
        *(f'<p class="dim">{escape(line)}</p>' for line in _footnotes(sweep)),
        "</html>",
    ]
    return "\n".join(lines) + "\n"


# -- the chart ---------------------------------------------------------------------------------------------------------


def _chart(sweep: Sweep) -> str:
    rows = sweep.measured
    whole = min(max(row.total_s for row in rows), LONGEST * sweep.best.total_s) or 1.0
    width, height = _NAMES + _BARS + _FIGURES, _ROW * len(rows) + 4
    drawn = "".join(_drawn(sweep, row, at * _ROW, _BARS / whole) for at, row in enumerate(rows))
    label = f"Time of a request by cut, from {seconds(sweep.best.total_s)} on"
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{drawn}</svg>'
    )


def _drawn(sweep: Sweep, row: CutTiming, top: int, scale: float) -> str:
    """Draw one bar, with its name before and its figure behind it, and its terms as a tooltip."""
    is_best = row is sweep.best
    kind = ' class="best"' if is_best else ""
    name = escape(shorten(row.name, _LONG_NAME) + _mark(sweep, row))
    parts, x = [], 0.0
    for ink, spent in (("h", row.head_s), ("w", row.between_s), ("t", row.tail_s)):
        end = min(x + spent * scale, float(_BARS))
        if end - x >= 0.05:
            left, wide = _number(_NAMES + x), _number(end - x)
            parts.append(f'<rect class="{ink}" x="{left}" y="{top + 3}" width="{wide}" height="{_ROW - 5}"/>')
        x = end
    terms = ", ".join(f"{name} {CELLS[name](row)}" for name in ("head", "codec", "wire", "queue", "tail"))
    figure = cell(row, "total") + (" →" if row.total_s * scale > _BARS + 0.5 else "")
    return (
        f"<g><title>{escape(f'{row.name}: {terms}')}</title>"
        f'<text{kind} x="{_NAMES - 8}" y="{top + 13}" text-anchor="end">{name}</text>'
        f"{''.join(parts)}"
        f'<text class="{"best" if is_best else "dim"}" x="{_number(_NAMES + x + 6)}" y="{top + 13}">{figure}</text></g>'
    )


def _number(value: float) -> str:
    """
    >>> _number(3.0), _number(3.14159)
    ('3', '3.1')
    """
    return f"{value:.1f}".removesuffix(".0")


def _mark(sweep: Sweep, row: CutTiming) -> str:
    return " (plan)" if row is sweep.planned else ""


# -- the table ---------------------------------------------------------------------------------------------------------


def _table(sweep: Sweep) -> str:
    """Render the table without optional closing tags, since there may be hundreds of rows."""
    names = [*_COLUMNS, *(["energy"] if has_energy(sweep) else [])]
    head = "".join(f"<th>{name}" for name in ("cut", *names))
    rows = []
    for row in sweep:
        cells = "".join(f"<td>{cell(row, name)}" for name in names)
        if row.failed is not None:
            cells = f'<td colspan={len(names)} style="text-align:left;white-space:normal">{escape(row.failed)}'
        kind = " class=best" if row is sweep.best else ""
        rows.append(f"<tr{kind}><td>{escape(row.name + _mark(sweep, row))}{cells}")
    body = "\n".join(rows)
    return f"<table><thead><tr>{head}<tbody>\n{body}</table>"


# -- text --------------------------------------------------------------------------------------------------------------


def _summary(sweep: Sweep) -> Iterator[str]:
    best, planned = sweep.best, sweep.planned
    if planned is best:
        yield f"The plan says so too, with {seconds(planned.planned_s)}."
    elif planned is not None:
        yield (
            f"The plan's is {planned.name}, with {seconds(planned.planned_s)}: it took {seconds(planned.total_s)}, "
            f"{ratio(planned.total_s / best.total_s)} times the best."
        )
    else:
        yield f"There is no plan: {sweep.no_plan}."
    if sweep.tied:
        yield f"Cannot be told from the best: {some([row.name for row in sweep.tied], 8)}."


def _footnotes(sweep: Sweep) -> Iterator[str]:
    link = sweep.link
    yield (
        f"On {sweep.inputs}; codec {sweep.codec}; the server computes on {sweep.device}. The way there: "
        f"{rate(link.up_bytes_per_s)}, back {rate(link.down_bytes_per_s)}, round trip {seconds(link.rtt_s)}."
    )
    yield f"Medians of {plural(sweep.repeat, 'request')} a cut, taken in turns, one on its way at a time."
    yield from (f"{note[0].upper()}{note[1:]}." for note in planned_notes(sweep))
    yield f"Energy: {short(sweep.energy)}."
    yield "Here: " + ", ".join(f"{name} {value}" for name, value in sweep.environment.items())
