"""The tables of the changes between two profiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isinf
from typing import Any

from microtome.report.table import Column, Line, Medium, Report, Styled, Table
from microtome.results.diff import Diff, LayerChange, MetricChange, weight
from microtome.results.metrics import advise, compared_metrics, find_compared
from microtome.units import UNKNOWN, plural, write

#: The most layers on a terminal and in Markdown.
_LAYERS = 30
#: The least number of layers that Markdown folds away.
_FOLDED = 12
_MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class ChangeSelection:
    """The changes that the table of layers shows.

    Attributes:
        depth: Layers down to this depth, with the changes of all calls inside them.
        sort: Order layers by the absolute change of this metric, the largest first; leave out those without it.
        top: Show so many layers.
        columns: Show the changes of these metrics.
        expand: Show each call inside added and removed modules, not their sum.
    """

    depth: int | None = None
    sort: str | None = None
    top: int | None = None
    columns: tuple[str, ...] = ()
    expand: bool = False


def report(diff: Diff, view: ChangeSelection | None = None, medium: Medium = "terminal") -> Report:
    """Describe the totals, and the layers that changed the most; Markdown folds a long list of them."""
    view = _resolve_columns(view or ChangeSelection())
    every = _layers_or_modules(diff, view)
    layers = _select_layers(every, view)
    most = _LAYERS if view.top is None else view.top
    changes = (Column("before"), Column("after"), Column("change"))
    shown = [change for change in diff.totals if not view.columns or change.quantity in view.columns]
    totals = tuple(Line((name_of(change), *_cells(change))) for change in shown)
    tables = [Table((Column("total", align="left"), *changes), totals)]
    if layers:
        columns = (
            Column("layer", align="left", is_name=True),
            Column("what changed", align="left", wraps=True),
            *changes,
        )
        containers = {module.address for module in diff.modules}
        brief = [_without_flops(layer, view) for layer in layers[:most]]
        lines = tuple(line for layer in brief for line in _lines(layer, has_calls=layer.address in containers))
        tables.append(Table(columns, lines, summary=_changed(diff) if len(layers) >= _FOLDED else ""))
    title = diff.after if diff.before == diff.after else f"{diff.before}, then {diff.after}"
    changed = [(name_of(change), growth(change)) for change in diff.totals if change.growth]
    figures = (*changed, ("layers", _changed(diff)))
    notes = (*_selection_notes(diff, view, every, len(layers), most), *_notes(diff))
    return Report(title, tuple(tables), notes, figures=figures)


def _resolve_columns(view: ChangeSelection) -> ChangeSelection:
    columns = tuple(find_compared(name, "column") for name in view.columns)
    sort = None if view.sort is None else find_compared(view.sort, "column")
    return replace(view, columns=columns, sort=sort)


def _layers_or_modules(diff: Diff, view: ChangeSelection) -> list[LayerChange]:
    """Return the changed layers, or in place of several the module that stands for them; the largest changes first.

    A module stands for the layers inside it at the selected depth, and if all of them were added, or all were removed.
    """
    modules = {module.address: module for module in diff.modules}
    found: dict[str, LayerChange] = {}
    for layer in diff.layers:
        around = ((depth, modules[at]) for depth, at in enumerate(_path(layer, modules)) if at in modules)
        stands = (one for depth, one in around if depth == view.depth or (one.calls is not None and not view.expand))
        one = next(stands, layer)
        found[one.address] = one
    return sorted(found.values(), key=lambda layer: -weight(layer, diff.totals))


def _path(layer: LayerChange, modules: dict[str, LayerChange]) -> list[str]:
    """Return the addresses of the calls around a layer, from the root to the layer."""
    path, above = [layer.address], layer.parent
    while above is not None and above not in path:
        path.append(above)
        above = modules[above].parent if above in modules else None
    return path[::-1]


def _select_layers(layers: list[LayerChange], view: ChangeSelection) -> list[LayerChange]:
    if view.columns:
        chosen = [
            replace(layer, changes=tuple(change for change in layer.changes if change.quantity in view.columns))
            for layer in layers
        ]
        layers = [layer for layer in chosen if layer.changes]
    if view.sort is not None:
        sizes = {layer.address: _change_of(layer, view.sort) for layer in layers}
        layers = [layer for layer in layers if sizes[layer.address] is not None]
        layers.sort(key=lambda layer: -(sizes[layer.address] or 0))
    return layers


def _change_of(layer: LayerChange, quantity: str) -> float | None:
    """Return the absolute change of a metric of a layer; None if it did not change."""
    for change in layer.changes:
        if change.quantity == quantity:
            return abs((change.after or 0) - (change.before or 0))
    return None


def records(diff: Diff) -> list[dict[str, Any]]:
    """Return a record for each change.

    Those of the totals have no address. Those of a call that contains calls include them, and are `own_…` without them.
    """
    changes = [(("", "", "total"), change) for change in diff.totals]
    modules = [module for module in diff.modules if module.parent is not None]  # the totals are those of the root
    for layer in (*modules, *_with_own_names(diff)):
        changes += [((layer.address, layer.type, layer.what), change) for change in layer.changes]
    names = ("quantity", "before", "after", "growth", "is_noise")
    return [
        dict(zip(("address", "type", "what"), where, strict=True)) | {name: getattr(change, name) for name in names}
        for where, change in changes
    ]


def _with_own_names(diff: Diff) -> Iterator[LayerChange]:
    """Yield the layers; the changes of calls that contain calls are renamed as in files of profiles: `own_macs`."""
    containers = {module.address for module in diff.modules}
    for layer in diff.layers:
        if layer.address not in containers:
            yield layer
            continue
        sums = [change for change in layer.changes if compared_metrics()[change.quantity].adds_up == "sum"]
        yield replace(layer, changes=tuple(change._replace(quantity=f"own_{change.quantity}") for change in sums))


def name_of(change: MetricChange) -> str:
    return compared_metrics()[change.quantity].label


def growth(change: MetricChange, *, is_new: bool = False) -> str:
    """Format the growth of a metric.

    Args:
        is_new: Whether an unknown value means that the layer did not exist.

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


def _cells(change: MetricChange, *, is_new: bool = False) -> tuple[str, str, Styled]:
    unit = compared_metrics()[change.quantity].unit
    grown = Styled(growth(change, is_new=is_new), _style(change))
    return write(change.before, unit), write(change.after, unit), grown


def _without_flops(layer: LayerChange, view: ChangeSelection) -> LayerChange:
    """Leave out the FLOPs of a layer whose MACs changed, which say the same, unless the view names them."""
    quantities = {change.quantity for change in layer.changes}
    if "macs" not in quantities or "flops" in (*view.columns, view.sort):
        return layer
    return replace(layer, changes=tuple(change for change in layer.changes if change.quantity != "flops"))


def _lines(layer: LayerChange, *, has_calls: bool) -> Iterator[Line]:
    """Yield the rows of a layer, the first with its name; costs without the calls inside it are its own."""
    name = layer.address or "(root)"
    parts = (f"{layer.type} {layer.what}" if layer.what != "changed" else "", layer.note)
    note = ", ".join(filter(None, parts)) or ("" if layer.changes else "calls inside, not their sum")
    if note:
        yield Line((name, note, "", "", ""))
    for at, one in enumerate(layer.changes):
        metric = compared_metrics()[one.quantity]
        is_part = has_calls and layer.is_own and metric.adds_up == "sum"
        header = f"own {metric.header}" if is_part else metric.header
        yield Line(("" if at or note else name, header, *_cells(one, is_new=layer.what != "changed")))


def _style(change: MetricChange) -> str:
    if change.is_noise or not change.growth:
        return "dim"
    return "red" if change.growth > 0 else "green"


def _changed(diff: Diff) -> str:
    counts = {what: sum(layer.what == what for layer in diff.layers) for what in ("added", "removed", "changed")}
    changed = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    # Of a call that contains others, only its own costs are compared: calls inside it may have changed.
    own = ", by their own costs" if changed and diff.modules else ""
    return f"{changed or 'no layer changed'}; {diff.unchanged} as before{own}"


def _selection_notes(
    diff: Diff, view: ChangeSelection, every: list[LayerChange], selected: int, most: int
) -> Iterator[str]:
    yield f"layers: {_changed(diff)}"
    if selected > most:
        yield f"shown: the {plural(most, 'layer')} that changed the most"
    elif selected < len(every):
        yield f"shown: {selected} of {plural(len(every), 'changed layer')}"
    if view.depth is not None and diff.modules:
        yield f"a layer at depth {view.depth} has the changes of all calls inside it"
    if any(layer.calls is not None for layer in every) and not view.expand:
        listed = advise("show(expand=True)", "--all")
        yield f"calls inside added and removed modules are added up; {listed} lists each"


def _notes(diff: Diff) -> Iterator[str]:
    if diff.noise:
        yield f"{plural(diff.noise, 'layer')} took another time within what repeated passes spread by: noise"
    if any(one.is_noise and one.growth for one in diff.totals):
        yield "noise: the middle halves of the passes before and after meet, so nothing says that it changed"
    yield from diff.notes
