"""The columns of a table of calls: descriptions of a call, and each metric with its share and its interval.

To add a number, declare it in results/metrics.py; only text columns are declared here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from microtome.report.notes import NOISE, interval, is_noise
from microtome.results.metrics import METRICS, Metric
from microtome.results.profile import Profile
from microtome.units import UNKNOWN, shape, share, some, write

Write = Callable[[Any], str]


@dataclass(frozen=True)
class CallColumn:
    """A column of a table of calls or of groups of calls.

    Attributes:
        metric: None: the column is text.
        part: The value of the metric, its share of the total, or its interval.
        text: Returns the cell of a row in a column without a metric.
        field: The name in files, where it is not that of the metric.
        is_default: Whether a table shows it by default.
        needs: The metric without which a table does not show it by default.
    """

    header: str
    metric: Metric | None = None
    part: Literal["value", "share", "interval"] = "value"
    text: Callable[[Any], str] = lambda row: ""
    field: str = ""
    known_of: Literal["ops", "modules", "calls", "groups"] = "calls"
    is_default: bool = False
    needs: str = ""

    @property
    def titles(self) -> tuple[str, ...]:
        """Further names of the column: its header, and the label of its metric."""
        return (self.header,) if self.metric is None or self.part != "value" else (self.header, self.metric.label)

    def cell(self, row: Any, profile: Profile) -> str:
        """Return the cell of a row, each number in a unit of its own."""
        if self.metric is None:
            return self.text(row)
        if self.part == "share":
            value = self.metric.of(row)
            return NOISE if is_noise(self.metric, value) else share(value, self.metric.of(profile.total))
        unit = self.metric.unit
        if self.part == "interval":
            return interval(getattr(row, "spreads", {}).get(self.metric.name), partial(write, unit=unit))
        return write_metric(self.metric, row, partial(write, unit=unit))

    def raw(self, row: Any, record: dict[str, Any], profile: Profile) -> dict[str, Any]:
        """Return the fields of a file, with raw numbers.

        Args:
            record: The row with all its fields, as `flat` returns it.
        """
        if self.metric is None:
            return {self.field: record.get(self.field, self.text(row))}
        name, value = self.metric.file_name, self.metric.of(row)
        if self.part == "share":
            whole = self.metric.of(profile.total)
            return {self.field: None if value is None or not whole else value / whole}
        if self.part == "interval":
            return {f"{name}_{end}": record.get(f"{name}_{end}") for end in ("low", "high")}
        return {name: value}

    def is_of(self, by: str | None) -> bool:
        """Whether the column exists for calls, or for groups by `"module"`, `"type"` or `"op"`."""
        if by is None:
            return self.known_of != "groups"
        return self.known_of in {"op": ("ops", "groups")}.get(by, ("ops", "modules", "groups"))

    def is_shown(self, profile: Profile) -> bool:
        """Whether a table shows the column by default."""
        return self.is_default and (not self.needs or METRICS[self.needs].of(profile.total) is not None)


def write_metric(metric: Metric, row: Any, write_: Write) -> str:
    """Format the value of a metric by `write_`; parameters that count elsewhere are in brackets."""
    text = NOISE if is_noise(metric, metric.of(row)) else write_(metric.of(row))
    shared = metric.name == "params" and getattr(row, "shared_params", None)
    if not shared:
        return text
    return f"{text} (+{write_(shared)})" if row.params else f"({write_(shared)})"


#: A property of groups, which calls do not have.
_RUNS = Metric("runs", "runs", None, "how many calls, or runs of the operator")


def call_columns() -> dict[str, CallColumn]:
    """Return every column by its name, in the order of the table."""
    columns = {
        "type": CallColumn("module", text=lambda row: row.type, field="type", is_default=True),
        "runs": CallColumn("runs", _RUNS, known_of="groups", is_default=True),
        "inputs": CallColumn("input", text=lambda row: _shapes(row.inputs), field="input_shapes"),
        "outputs": CallColumn("output", text=lambda row: _shapes(row.outputs), field="output_shapes", is_default=True),
        "dtype": CallColumn("dtype", text=_dtypes, field="dtypes"),
    }
    for metric in METRICS.values():
        column = partial(
            CallColumn, metric=metric, known_of=metric.known_of, needs=metric.name if metric.requires else ""
        )
        columns[metric.column] = column(metric.header, is_default=metric.shown == "table")
        if metric.share:
            columns[metric.share] = column(f"{metric.header} share", part="share", field=metric.share, is_default=True)
        if metric.interval:
            columns[metric.interval] = column(f"{metric.header} 95 %", part="interval", known_of="calls")
        if metric.name == "device_s":
            columns["bound"] = CallColumn("bound", text=_bound, field="bound", is_default=True, needs="device_s")
    return columns


def columns_of(by: str | None) -> dict[str, CallColumn]:
    """Return the columns of a table of calls, or of groups by `"module"`, `"type"` or `"op"`."""
    return {name: column for name, column in call_columns().items() if column.is_of(by)}


def _shapes(tensors: Sequence[Any]) -> str:
    return some([shape(tensor.shape) for tensor in tensors], 2)


def _dtypes(row: Any) -> str:
    return " ".join(dict.fromkeys(tensor.dtype for tensor in row.outputs))


def _bound(row: Any) -> str:
    return {None: UNKNOWN, True: "launch", False: "device"}[row.is_launch_bound]


#: The suffix of the type of a row without the calls inside it.
OWN = "(own)"
AT_LEAST = "≥ "


def at_least(cell: str) -> str:
    """Mark a number that leaves out operators without a formula."""
    return cell if cell == UNKNOWN else AT_LEAST + cell


def leaves_out(profile: Profile, metric: Metric, by: str | None) -> Callable[[Any], bool]:
    """Return a predicate of rows or groups: whether some of their operators have no formula."""
    if metric.counted_by:
        own = {row.address for row in profile if any(getattr(op, metric.counted_by) is None for op in row.ops)}
    else:
        own = {address for op in profile.coverage.unknown for address in op.calls}
    within = set(own)
    for row in reversed(profile.calls):  # the calls inside a call begin after it
        if row.address in within and row.parent is not None:
            within.add(row.parent)
    if by is None:
        return lambda row: row.address in (own if row.type.endswith(OWN) else within)
    names = {
        "type": {row.type for row in profile if row.address in own},
        "module": {row.path for row in profile if row.address in within},
        "op": set(),  # either all or nothing is known of an operator
    }[by]
    return lambda group: group.name in names
