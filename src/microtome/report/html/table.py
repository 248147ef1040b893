"""The tables of the page as plain HTML: the layers, for readers without JavaScript, and the live values at the peak."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from html import escape
from typing import NamedTuple

from microtome.report.call_columns import write_metric
from microtome.report.call_tree import TreeRow, tree_rows
from microtome.report.html.data import bar_base, header, shown_metrics
from microtome.report.notes import interval, interval_name
from microtome.report.row_selection import fitting_depth
from microtome.results.measurements import Alive, Timeline
from microtome.results.metrics import Metric
from microtome.results.profile import Profile
from microtome.results.rows import Row
from microtome.units import UNKNOWN, shape, share, size, write

#: The most rows, about, of a table without JavaScript.
_ROWS = 600
#: A lone surrogate is invalid in a link; the script replaces it by the same character.
_SURROGATE = re.compile("[\ud800-\udfff]")


def full_bar(profile: Profile, metric: Metric) -> float | None:
    """Return the value of a full bar: that of the whole model, or the largest of any call if it does not add up."""
    if metric.adds_up == "sum":
        whole: float | None = metric.of(profile.total)
        return whole
    return max((value for row in profile if (value := metric.of(row)) is not None), default=None)


class _Scaled(NamedTuple):
    """A metric, and the values of an empty and of a full bar."""

    metric: Metric
    base: float
    full: float | None

    def part(self, value: float) -> float:
        """Return the length of a bar, from 0 to 100."""
        whole = (self.full or 0) - self.base
        return 100 * min(max((value - self.base) / whole, 0), 1) if whole else 0


def layer_table(profile: Profile) -> str:
    metrics = shown_metrics(profile)
    rows = _rows(profile)
    heads = "".join(
        f'<th scope="col" class="n" title="{escape(metric.description)}">{escape(header(metric))}' for metric in metrics
    )
    scaled = [_Scaled(metric, bar_base(profile, metric), full_bar(profile, metric)) for metric in metrics]
    body = "\n".join(_row(row, scaled) for row in rows)
    return (
        '<div class="scroll" id="grid" tabindex="0" role="region" aria-label="Layer table"><table id="layers">'
        '<caption class="sr">What each call costs, with all calls inside it; in parentheses, operators between them'
        "</caption>"
        f'<thead><tr><th scope="col">call<th scope="col">module<th scope="col">output{heads}</thead>'
        f"<tbody>\n{body}</tbody></table></div>{_left_out(profile, rows)}"
    )


def _rows(profile: Profile) -> Sequence[TreeRow]:
    deepest = fitting_depth([row.depth for row in profile], _ROWS)
    return [one for one in tree_rows(profile, expand=True) if one.depth <= deepest][: 2 * _ROWS]


def _left_out(profile: Profile, rows: Sequence[TreeRow]) -> str:
    count = sum(not one.is_own for one in rows)
    if count == len(profile):
        return ""
    return f'<p class="dim nojs">{count:,} of {len(profile):,} calls are listed; with JavaScript all are.</p>'


def _row(one: TreeRow, scaled: Sequence[_Scaled]) -> str:
    """Render a row without optional closing tags, since there may be hundreds."""
    row = one.row
    cells = "".join(_cell(row, metric) for metric in scaled)
    output = ", ".join(shape(tensor.shape) for tensor in row.outputs)
    title = f"{row.address or '(root)'} {one.name}" if one.is_own else row.address
    name = f'<th scope="row" class="d{min(one.depth, 32)}" title="{escape(title)}">{_anchor(one)}'
    texts = "".join(f'<td title="{escape(text)}">{escape(text)}' for text in (row.type, output))
    return f"<tr>{name}{texts}{cells}"


def _anchor(one: TreeRow) -> str:
    """Render the name of a call, the target of a permalink. It is not an id, which may clash with those of the page."""
    name = escape(one.name)
    whole = "" if one.is_own else _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", one.row.address)
    return f'<a name="{escape(whole)}">{name}</a>' if whole else name


def _cell(row: Row, scaled: _Scaled) -> str:
    metric = scaled.metric
    value = metric.of(row)
    if value is None:
        return f'<td class="n" title="{escape(metric.why_not_each)}">{UNKNOWN}'
    text = write_metric(metric, row, partial(write, unit=metric.unit))
    return f'<td class="n b{round(scaled.part(value))}">{text}{_whisker(row, scaled)}'


def _whisker(row: Row, scaled: _Scaled) -> str:
    """Render the interval as a line over the bar."""
    metric = scaled.metric
    spread = row.spreads.get(metric.name)
    if spread is None or not scaled.full:
        return ""
    low, high = (round(scaled.part(end), 1) for end in (spread.low, spread.high))
    title = escape(f"{interval_name(spread)}: {interval(spread, partial(write, unit=metric.unit))}")
    return f'<svg class="w"><title>{title}</title><line x1="{low}%" x2="{high}%" y1="50%" y2="50%"/></svg>'


# -- small tables ------------------------------------------------------------------------------------------------------


def small_table(headers: Sequence[str], rows: str) -> str:
    """Render a table whose first column holds names and the others numbers."""
    first, *others = headers
    heads = f'<th scope="col">{first}' + "".join(f'<th scope="col" class="n">{header}' for header in others)
    return f'<div class="scroll short"><table><thead><tr>{heads}</thead><tbody>{rows}</tbody></table></div>'


_KINDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "input": "input",
    "constant": "constant of the model",
    "op": "computed in",
    "rest": "smaller tensors",
}


def alive_table(line: Timeline) -> str:
    """Render the values that are live at the peak of memory: the largest, and the sum of the others."""
    if line.peak is None:
        return ""
    whole = line.live_bytes[line.peak]
    rows = "".join(
        f'<tr><th scope="row">{_live_name(one)}<td class="n b{round(100 * one.nbytes / whole) if whole else 0}">'
        f'{size(one.nbytes)}<td class="n">{share(one.nbytes, whole)}'
        for one in _largest(line.alive, whole)
    )
    phase = "" if line.peak < line.forward else " of the backward"
    return (
        f"<details><summary>Tensors alive at the peak: {size(whole)}, at operator {line.peak + 1:,} of "
        f"{len(line.live_bytes):,}{phase}</summary>{small_table(('tensor', 'bytes', 'share'), rows)}</details>"
    )


#: The most values at the peak that are listed, and the least share of the peak of each.
_LISTED, _LEAST_SHARE = 12, 0.01


def _largest(alive: Sequence[Alive], whole: int) -> list[Alive]:
    """Return the largest values, and the sum of the others."""
    large = [one for one in alive if one.kind != "rest" and one.nbytes >= _LEAST_SHARE * whole]
    small = [one for one in alive if one.kind == "rest" or one.nbytes < _LEAST_SHARE * whole]
    listed, others = large[:_LISTED], [*large[_LISTED:], *small]
    if len(others) < 2:
        return list(alive)
    return [*listed, Alive("rest", "", sum(one.nbytes for one in others), sum(one.count for one in others))]


def _live_name(one: Alive) -> str:
    kind = _KINDS[one.kind]
    if one.kind == "op":
        return f"{kind} {escape(one.name or '(root)')}"
    return f"{kind} {escape(one.name)}" if one.name else f"{one.count:,} {kind}" if one.count > 1 else kind
