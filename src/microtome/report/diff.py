"""What changed between two profiles: on a terminal, as text, as Markdown, as CSV."""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf
from typing import Any

from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from microtome.errors import printable
from microtome.report.spreadsheet import csv_text
from microtome.report.terminal import code, escaped, plain_text, shortened
from microtome.results.diff import Diff, LayerChange, MetricChange
from microtome.results.metrics import compared_metrics
from microtome.units import UNKNOWN, write

#: How many layers are shown on a terminal and in Markdown.
_LAYERS = 30
#: From how many on they are folded away in Markdown.
_FOLDED = 12
_MINUS = "\N{MINUS SIGN}"


def renderable(diff: Diff, width: int = 140) -> Any:
    """What rich draws: the whole, the layers, and under them what there is to say."""
    parts: list[Any] = [Text(_title(diff), style="italic"), _totals(diff)]
    if diff.layers:
        parts += [Text(""), _layers(diff, width)]
    return Stack(*parts, Text("\n".join(_notes(diff)), style="dim"))


def text(diff: Diff) -> str:
    """As text, with colours where the standard output is a terminal that wants them."""
    return plain_text(lambda width: renderable(diff, width))


def markdown(diff: Diff) -> str:
    """For a pull request: the whole, and the layers, folded away where there are many."""
    head = ["| | before | after | change |", "| --- | ---: | ---: | ---: |"]
    whole = [f"| {name_of(one)} | {' | '.join(_cells(one))} |" for one in diff.totals]
    parts = [f"**{escaped(_title(diff))}**", "\n".join([*head, *whole])]
    if diff.layers:
        lines = ["| layer | | before | after | change |", "| --- | --- | ---: | ---: | ---: |"]
        for layer in diff.layers[:_LAYERS]:
            lines += [
                f"| {code(name)} | {escaped(what)} | {' | '.join(cells)} |" for name, what, cells, _ in _lines(layer)
            ]
        table = "\n".join(lines)
        folded = f"<details><summary>{_changed(diff)}</summary>\n\n{table}\n\n</details>"
        parts.append(folded if len(diff.layers) >= _FOLDED else table)
    parts.append("\n".join(f"- {escaped(note)}" for note in _notes(diff)))
    return "\n\n".join(parts) + "\n"


def csv(diff: Diff) -> str:
    """A line a change, raw numbers; those of the whole have no address."""
    header = ["address", "type", "what", "quantity", "before", "after", "growth", "is_noise"]
    changes = [(["", "", "total"], one) for one in diff.totals]
    changes += [([layer.address, layer.type, layer.what], one) for layer in diff.layers for one in layer.changes]
    rows = ([*about, one.quantity, one.before, one.after, one.growth, one.is_noise] for about, one in changes)
    return csv_text(header, rows)


def name_of(change: MetricChange) -> str:
    return compared_metrics()[change.quantity].label


def growth(change: MetricChange, *, is_new: bool = False) -> str:
    """By how much, in words.

    Args:
        is_new: Whether the layer was not there on the side where nothing is known.

    >>> growth(MetricChange("macs", 100, 105)), growth(MetricChange("macs", 0, 5))
    ('+5.0 %', 'new')
    """
    if change.growth is None:
        if not is_new:
            return "not known"
        return "new" if change.before is None and change.after else "gone" if change.before else UNKNOWN
    if change.growth == 0:
        return "same"
    if change.is_noise:
        return "noise"
    if isinf(change.growth):
        return "new"
    per_cent = f"{abs(100 * change.growth):,.1f} %"
    return f"{'+' if change.growth > 0 else _MINUS}{per_cent}"


def _cells(change: MetricChange, *, is_new: bool = False) -> tuple[str, str, str]:
    unit = compared_metrics()[change.quantity].unit
    return write(change.before, unit), write(change.after, unit), growth(change, is_new=is_new)


def _totals(diff: Diff) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("total")
    for header in ("before", "after", "change"):
        table.add_column(header, justify="right", no_wrap=True)
    for one in diff.totals:
        table.add_row(name_of(one), *map(Text, _cells(one)[:2]), Text(growth(one), style=_ink(one)))
    return table


def _layers(diff: Diff, width: int) -> Table:
    shown = diff.layers[:_LAYERS]
    longest = max(len(_address(layer)) for layer in shown)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    table.add_column("", overflow="fold")
    for header in ("before", "after", "change"):
        table.add_column(header, justify="right", no_wrap=True)
    for layer in shown:
        for name, what, (before, after, grown), ink in _lines(layer):
            where = Text(shortened(printable(name), max(min(longest, width - 54), 16)))
            table.add_row(where, Text(printable(what)), Text(before), Text(after), Text(grown, style=ink))
    return table


def _lines(layer: LayerChange) -> Iterator[tuple[str, str, tuple[str, str, str], str]]:
    """The rows of a layer: its name in the first, what is told, and the cells."""
    name = _address(layer)
    said = layer.note if layer.what == "changed" else f"{layer.type} {layer.what}"
    if said:
        yield name, said, ("", "", ""), ""
    for at, one in enumerate(layer.changes):
        yield (
            "" if at or said else name,
            compared_metrics()[one.quantity].header,
            _cells(one, is_new=layer.what != "changed"),
            _ink(one),
        )


def _address(layer: LayerChange) -> str:
    return layer.address or "(root)"


def _ink(change: MetricChange) -> str:
    if change.is_noise or not change.growth:
        return "dim"
    return "red" if change.growth > 0 else "green"


def _title(diff: Diff) -> str:
    return diff.after if diff.before == diff.after else f"{diff.before}, then {diff.after}"


def _changed(diff: Diff) -> str:
    counts = {what: sum(layer.what == what for layer in diff.layers) for what in ("added", "removed", "changed")}
    told = ", ".join(f"{many} {what}" for what, many in counts.items() if many)
    return f"{told or 'no layer changed'}; {diff.unchanged} as before"


def _notes(diff: Diff) -> Iterator[str]:
    yield f"layers: {_changed(diff)}"
    if len(diff.layers) > _LAYERS:
        yield f"shown: the {_LAYERS} layers that changed the most"
    if diff.noise:
        yield f"{diff.noise} layers took another time within what repeated passes spread by: noise"
    if any(one.is_noise and one.growth for one in diff.totals):
        yield "noise: the middle halves of the passes before and after meet, so nothing says that it changed"
    yield from diff.notes
