"""The difference between two profiles: in the totals, and layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from os import PathLike
from typing import Any, Literal, NamedTuple, Self

from microtome.errors import BadQuery
from microtome.files.reading import File
from microtome.results.base import Result, load_result, render
from microtome.results.metrics import METRICS, Metric, compared_metrics, find_compared
from microtome.results.profile import Profile
from microtome.results.rows import AMOUNTS, Row
from microtome.units import plural, shape, some, write

ChangeKind = Literal["added", "removed", "changed"]
#: The most operators that the note of a layer names.
_OPERATORS = 3


class MetricChange(NamedTuple):
    """A metric before and after.

    Attributes:
        quantity: The name of the metric in comparisons: `"macs"`, `"time"`.
        before: None: not known, or the layer was not there.
        is_noise: Whether the repeated passes before and after overlap, in their middle halves or in the 95 % intervals
            of their medians, so that nothing shows a change; None where no passes are known.
    """

    quantity: str
    before: float | None
    after: float | None
    is_noise: bool | None = None

    @property
    def growth(self) -> float | None:
        """The growth as a fraction of before; None where one side is not known."""
        if self.before is None or self.after is None:
            return None
        if self.before == self.after:
            return 0.0
        return (self.after - self.before) / self.before if self.before else inf


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A call that was added, removed or changed.

    Attributes:
        type: The type of its module.
        changes: The changes of its costs: in `Diff.layers` without the calls inside it, in `Diff.modules` with them.
        note: Other changes: its type, the shape and the dtype of its output, the operators that its own code runs.
        parent: The address of the call that contains it; None for the root, and in files of an older microtome.
        calls: In `Diff.modules`, the number of calls inside it if all were added, or all were removed; else None.
        is_own: Whether the changes are without the calls inside it; None in files of an older microtome.
    """

    address: str
    type: str
    what: ChangeKind
    changes: tuple[MetricChange, ...]
    note: str = ""
    parent: str | None = None
    calls: int | None = None
    is_own: bool | None = None


@dataclass(frozen=True)
class Diff(Result, kind="diff"):
    """The difference between two profiles.

    Attributes:
        before: The model and the inputs of the first profile; `after`: of the second.
        totals: The changes of the whole model, in every metric that one of the two has.
        layers: The calls that changed by themselves, those with the largest share of the whole first: in their type,
            their output, their own operators or their own costs. A call is not listed for changes inside it.
        modules: The calls that have calls inside and changed, or contain calls that changed.
        unchanged: The number of calls of both that are not in `layers`.
        noise: The number of calls whose time changed within the noise of repeated passes.
        notes: Other differences: inputs, conventions, machines.
        uncounted: Operators without a formula that the second runs more often than the first: its counts leave more
            out, and cannot be compared with a limit.
    """

    before: str
    after: str
    totals: tuple[MetricChange, ...]
    layers: tuple[LayerChange, ...]
    unchanged: int
    noise: int
    notes: tuple[str, ...]
    uncounted: tuple[str, ...] = ()
    modules: tuple[LayerChange, ...] = ()

    def __getitem__(self, quantity: str) -> MetricChange:
        """Return the change of a metric of the whole model, by its name here or in tables."""
        quantity = find_compared(quantity)
        metric = compared_metrics()[quantity]
        change = next((change for change in self.totals if change.quantity == quantity), None)
        if change is None or change.growth is None:
            verbs = {"measured": "measure", "counted": "count"}
            hint = f": {verbs[needs.done]} both with {needs.advice}" if (needs := metric.requires) else ""
            raise BadQuery(f"{quantity} is not known of both profiles{hint}")
        if self.uncounted and metric.counted_by is not None:
            raise BadQuery(
                f"{quantity} of {self.after} leaves out {', '.join(self.uncounted)}, which has no formula: "
                "add one with microtome.register_formula"
            )
        return change

    def show(
        self,
        *,
        depth: int | None = None,
        sort: str | None = None,
        top: int | None = None,
        columns: Iterable[str] = (),
        expand: bool = False,
    ) -> None:
        """Print the tables; in a notebook, display them.

        Args:
            depth: Show layers down to this depth, with the changes of all calls inside them.
            sort: Order layers by the absolute change of this metric, the largest first.
            top: Show so many layers.
            columns: Show the changes of these metrics, such as `["macs", "time"]`.
            expand: Show each call inside added and removed modules, not their sum.
        """
        selected: dict[str, Any] = {"depth": depth, "sort": sort, "top": top, "columns": columns, "expand": expand}
        render("formats.show", self, "diff.ChangeSelection", **selected)

    def over(self, limits: Mapping[str, float | str]) -> tuple[MetricChange, ...]:
        """Return the metrics of the whole model that grew by more than a limit, noise not counted.

        Args:
            limits: The limit for each metric, as a percentage, `{"macs": "5%"}`, or as a fraction below 1, `0.05`.
        """
        if not isinstance(limits, Mapping):
            raise BadQuery(f'expected limits as a dict, such as {{"macs": "5%"}}, got {limits!r:.80}')
        changes = [(self[quantity], parse_limit(quantity, limit)) for quantity, limit in limits.items()]
        return tuple(change for change, limit in changes if (change.growth or 0.0) > limit and not change.is_noise)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return super().from_dict({"uncounted": []} | data)  # files of an older microtome lack it

    def check(self) -> None:
        known = compared_metrics()
        layers = (*self.layers, *self.modules)
        for change in (*self.totals, *(change for layer in layers for change in layer.changes)):
            if change.quantity not in known:
                raise ValueError(f"expected a quantity of {', '.join(known)}, got {change.quantity!r:.80}")

    def __repr__(self) -> str:
        return f"<Diff of {self.before} and {self.after}: {plural(len(self.layers), 'call')} changed>"


def parse_limit(quantity: str, limit: float | str) -> float:
    """Parse the limit of a metric as a fraction; a number of 1 or more may be meant as a percentage, and is refused.

    >>> parse_limit("macs", "250%"), parse_limit("macs", 0.05)
    (2.5, 0.05)
    """
    try:
        if isinstance(limit, str):
            fraction, upper = (float(limit.removesuffix("%")) / 100, inf) if limit.endswith("%") else (inf, inf)
        else:
            fraction, upper = float(limit), 1.0
    except (TypeError, ValueError):
        fraction, upper = inf, inf
    if not 0 <= fraction < upper:
        raise BadQuery(f"expected a limit of {quantity} such as '5%', or a fraction below 1, got {limit!r}")
    return fraction


def diff(before: Profile, after: Profile | File) -> Diff:
    """Compare two profiles, the second possibly in a file, call by call, by their addresses.

    >>> import torch
    >>> import microtome as mt
    >>> small, large = (mt.profile(torch.nn.Sequential(torch.nn.Linear(4, n)), "1x4") for n in (8, 16))
    >>> changed = small.diff(large)
    >>> changed["macs"].growth, [(layer.address, layer.note) for layer in changed.layers]
    (1.0, [('0', 'output 1x8 to 1x16'), ('', 'output 1x8 to 1x16')])
    """
    if isinstance(after, str | PathLike):
        after = load_result(after)
    if not isinstance(after, Profile):
        raise BadQuery(f"expected a profile to compare with, or a file of one, got a {type(after).__name__}")
    old, new = ({row.address: row for row in profile} for profile in (before, after))
    layers, noise = [], 0
    for address in dict.fromkeys((*old, *new)):
        layer = _compare(before, after, old.get(address), new.get(address), own_costs)
        if layer.changes or layer.note or layer.what != "changed":
            real = [change for change in layer.changes if not change.is_noise]
            noise += len(real) < len(layer.changes)
            if real or layer.note or layer.what != "changed":
                layers.append(layer)
    totals = tuple(_totals(before, after))
    layers.sort(key=lambda layer: -weight(layer, totals))
    return Diff(
        before=_title(before),
        after=_title(after),
        totals=totals,
        layers=tuple(layers),
        unchanged=len(set(old) & set(new)) - sum(layer.what == "changed" for layer in layers),
        noise=noise,
        notes=tuple(_notes(before, after)),
        uncounted=tuple(op for op, runs in _uncounted(after).items() if runs > _uncounted(before).get(op, 0)),
        modules=tuple(_modules(before, after, layers)),
    )


def _totals(before: Profile, after: Profile) -> Iterator[MetricChange]:
    for name, metric in compared_metrics().items():
        old, new = metric.of(before.total), metric.of(after.total)
        if metric.name == "peak_bytes" and _has_backward(before) and _has_backward(after):
            old, new = before.peak_bytes, after.peak_bytes
        if old is not None or new is not None:
            yield MetricChange(name, old, new, is_noise(before.total, after.total, metric.name))


#: Costs of a call before and after; None: unknown, or there is no such call.
Costs = tuple[float | None, float | None]
Cost = Callable[[Profile, Profile, Row | None, Row | None, Metric], Costs]


def _compare(before: Profile, after: Profile, old: Row | None, new: Row | None, cost: Cost) -> LayerChange:
    row = new or old
    assert row is not None
    changes = []
    for metric in compared_metrics().values():
        if not metric.is_compared_by_layer:
            continue
        one, two = cost(before, after, old, new, metric)
        if old is None or new is None:
            differs = (one or 0) != (two or 0)
        else:  # a metric that was not measured on one side shows no change; one that was not counted does
            differs = one != two and (None not in (one, two) or _is_counted_in_both(metric, before, after))
        if differs:
            noise = None if old is None or new is None else is_noise(old, new, metric.name)
            changes.append(MetricChange(metric.diff, one, two, noise))
    what: ChangeKind = "added" if old is None else "removed" if new is None else "changed"
    notes = [] if old is None or new is None else list(_differences(old, new))
    if old is not None and new is not None and not changes and not notes:
        notes = list(_other_costs(old, new))
    return LayerChange(
        row.address, row.type, what, tuple(changes), "; ".join(notes), row.parent, is_own=cost is own_costs
    )


def _modules(before: Profile, after: Profile, layers: Iterable[LayerChange]) -> Iterator[LayerChange]:
    """Yield the calls that have calls inside and are changed layers, or contain some."""
    old, new = ({row.address: row for row in profile} for profile in (before, after))
    found: set[str] = set()
    for layer in layers:
        address: str | None = layer.address
        while address is not None and address not in found:
            found.add(address)
            address = (new.get(address) or old[address]).parent
    for address in [address for address in dict.fromkeys((*old, *new)) if address in found]:
        one, two = old.get(address), new.get(address)
        removed, added = _addresses_inside(before, one), _addresses_inside(after, two)
        if removed or added:
            module = _compare(before, after, one, two, _inclusive)
            is_whole = not (removed and added) and removed.isdisjoint(new) and added.isdisjoint(old)
            has_total = module.parent is None  # a row for the root would repeat it
            yield module if has_total or not is_whole else _with_calls(module, removed, added)


def _with_calls(module: LayerChange, removed: set[str], added: set[str]) -> LayerChange:
    """Return a module with the number of calls inside it, of which either all were removed or all were added."""
    calls = plural(len(removed or added), "call")
    inside = f"{calls} {'removed' if removed else 'added'}" if module.what == "changed" else f"with {calls} inside"
    note = f"{module.note}; {inside}" if module.note else inside
    return replace(module, note=note, calls=len(removed or added))


def _addresses_inside(profile: Profile, row: Row | None) -> set[str]:
    children = profile.children(row) if row is not None else ()
    return {child.address for child in children}.union(*(_addresses_inside(profile, child) for child in children))


def _is_counted(metric: Metric) -> bool:
    """Whether it is computed from the operators of a run, so that it is exact of every call, and adds up."""
    return metric.adds_up == "sum" and not metric.is_measured


def _is_counted_in_both(metric: Metric, before: Profile, after: Profile) -> bool:
    """Whether both profiles count it: on request, it is known at least of the whole."""
    is_requested = metric.requires is not None
    return _is_counted(metric) and not (is_requested and None in (metric.of(before.total), metric.of(after.total)))


def own_costs(before: Profile, after: Profile, old: Row | None, new: Row | None, metric: Metric) -> Costs:
    """Return the costs of a call by itself; if the metric does not add up, such as the output's bytes, of the call.

    A measured one only of calls without calls inside that both measured, since a difference of medians has no spread.
    """
    if _is_counted(metric):
        return None if old is None else metric.own(old), None if new is None else metric.own(new)
    if metric.adds_up == "sum" and has_known_calls(before, after, old, new, metric):
        return None, None
    return _inclusive(before, after, old, new, metric)


def has_known_calls(before: Profile, after: Profile, old: Row | None, new: Row | None, metric: Metric) -> bool:
    """Whether a metric is known of a call inside a call, both before and after if the call is in both."""
    known = [
        {child.address for child in profile.children(row) if metric.of(child) is not None}
        for profile, row in ((before, old), (after, new))
        if row is not None
    ]
    return bool(set.intersection(*known))


def _inclusive(before: Profile, after: Profile, old: Row | None, new: Row | None, metric: Metric) -> Costs:
    """Return the costs of a call with the calls inside it."""
    return metric.of(old), metric.of(new)


def is_noise(old: Row, new: Row, name: str) -> bool | None:
    """Whether the passes of both overlap, without the outer quarters."""
    if name not in old.spreads or name not in new.spreads:
        return None
    (low, high), (other_low, other_high) = (
        (min(spread.low, spread.q1), max(spread.high, spread.q3)) for spread in (old.spreads[name], new.spreads[name])
    )
    return low <= other_high and other_low <= high


def _differences(old: Row, new: Row) -> Iterator[str]:
    if old.type != new.type:
        yield f"{old.type} to {new.type}"
    shapes = [", ".join(shape(tensor.shape) for tensor in row.outputs) for row in (old, new)]
    dtypes = [", ".join(dict.fromkeys(tensor.dtype for tensor in row.outputs)) for row in (old, new)]
    for one, two in (shapes, dtypes) if all(dtypes) else (shapes,):
        if one != two:
            yield f"output {one or 'none'} to {two or 'none'}"
    if old.type == new.type:
        yield from _other_operators(old, new)


def _other_operators(old: Row, new: Row) -> Iterator[str]:
    """Yield how often the call's own code runs which operators; views, which neither compute nor copy, do not count."""
    runs = [{op.name: op.runs for op in row.ops if op.flops or op.moved_bytes} for row in (old, new)]
    names = [name for name in dict.fromkeys((*runs[0], *runs[1])) if runs[0].get(name) != runs[1].get(name)]
    changed = [f"{name} {runs[0].get(name, 0)} to {runs[1].get(name, 0)} times" for name in names]
    if changed:
        yield f"runs {some(changed, _OPERATORS)}"


def _other_costs(old: Row, new: Row) -> Iterator[str]:
    """Yield the changes of own costs that are counted and not compared, such as the bytes of weights in bfloat16."""
    for metric in (METRICS[name] for name in AMOUNTS):
        if _is_counted(metric) and not metric.is_compared_by_layer:
            one, two = metric.own(old), metric.own(new)
            if None not in (one, two) and one != two:
                yield f"{metric.label} {write(one, metric.unit)} to {write(two, metric.unit)}"


def weight(layer: LayerChange, totals: Iterable[MetricChange]) -> float:
    """Return the largest change of a layer, as a fraction of the whole."""
    wholes = {total.quantity: max(total.before or 0, total.after or 0) for total in totals}
    parts = [0.0]
    for change in layer.changes:
        whole = wholes.get(change.quantity)
        if whole and not change.is_noise and compared_metrics()[change.quantity].adds_up == "sum":
            parts.append(abs((change.after or 0) - (change.before or 0)) / whole)
    return max(parts)


def _title(profile: Profile) -> str:
    return profile.heading


def _have_equal_tensors(before: Profile, after: Profile) -> bool:
    """Whether profiles whose inputs are written differently, since one is of an older microtome, have the same."""
    is_older = [profile.inputs.startswith("Inputs(") for profile in (before, after)]
    return is_older[0] != is_older[1] and before.total.inputs == after.total.inputs


def _uncounted(profile: Profile) -> dict[str, int]:
    """Return how often each operator without a formula ran."""
    return {op.name: op.runs for op in profile.coverage.unknown}


def _has_backward(profile: Profile) -> bool:
    return profile.total.saved_bytes is not None and profile.timeline is not None


def _notes(before: Profile, after: Profile) -> Iterator[str]:
    for when, profile in (("before", before), ("after", after)):
        coverage = profile.coverage
        if coverage.unknown:
            yield f"{when}, {coverage}, are counted: no formula for {', '.join(_uncounted(profile))}"
    if None not in (before.gradients, after.gradients) and before.gradients != after.gradients:
        when = "before" if before.gradients else "after"
        yield f"memory is not comparable: {when}, it holds what a backward needs"
    if _has_backward(before) != _has_backward(after):
        yield "memory is that of the forward: one of the two has no backward"
    if before.inputs != after.inputs and not _have_equal_tensors(before, after):
        yield f"the inputs differ: {before.inputs} and {after.inputs}"
    if before.convention != after.convention:
        yield f"the counts are not comparable: they are of the conventions {before.convention} and {after.convention}"
    for name in ("cpu", "gpu", "threads", "torch"):
        old, new = before.environment.get(name), after.environment.get(name)
        if None not in (old, new) and old != new:
            yield f"measured with other {name}: {old} and {new}"
