"""The description of one metric, and of the option that gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from microtome.units import Unit

if TYPE_CHECKING:
    from microtome.results.rows import Row


@dataclass(frozen=True)
class Requirement:
    """The option that gives a metric.

    Attributes:
        name: The measurement, as `Profile.unavailable` names it.
        option: Of the command line.
        argument: In Python.
        done: How the metric is obtained.
    """

    name: str
    option: str
    argument: str
    done: Literal["measured", "counted"] = "measured"


TIME = Requirement("time", "--time", 'measure=["time"]')
DEVICE_TIME = Requirement("time", "--time, on a GPU", 'measure=["time"], on a GPU')
BACKWARD = Requirement("backward", "--backward", "backward=True", "counted")
BACKWARD_TIME = Requirement("time", "--time --backward", 'measure=["time"], backward=True')
BACKWARD_DEVICE = Requirement("time", "--time --backward, on a GPU", 'measure=["time"], backward=True, on a GPU')
ENERGY = Requirement("energy", "--energy", 'measure=["energy"]')
MEMORY = Requirement("memory", "--memory", 'measure=["memory"]')
LOAD = Requirement("load", "--load", 'measure=["load"]')


@dataclass(frozen=True)
class Metric:
    """A quantity of calls.

    Attributes:
        name: The field of a row, and the name in files.
        label: The name on pages and in comparisons.
        unit: None: any number, or text.
        description: One noun phrase.
        adds_up: How the value of a call follows from those of the calls inside it.
        known_of: The smallest things that have it: operators, modules (so also groups of them), or single calls.
        shown: Where it is shown without being asked for: in tables, as a choice on the page, in files alone, or nowhere
            unless it is named.
        header: The name in tables, where it is shorter than the label.
        column: The name for `--columns` and `--sort`, where it differs from the field.
        share: The name of the column with the share of the total; "": there is none.
        interval: The name of the column with the 95 % interval; "": there is none.
        diff: The name in a `Diff` and for `--fail-over`; "": it is not compared.
        is_compared_by_layer: Whether a `Diff` lists layers by it.
        is_ranked: Whether `microtome top` has a section of it.
        requires: The option that gives it; None: it is always counted.
        counted_by: The field of an operator that is None where it has no formula; "" where only the backward has one.
        unknown: The reason why a single call may have none, where it is not that of the requirement.
        value: Computes it from a row or a group, where no field holds it.
        file_name: The name in files, where it differs from the field.
    """

    name: str
    label: str
    unit: Unit | None
    description: str
    adds_up: Literal["sum", "max", "none"] = "sum"
    known_of: Literal["ops", "modules", "calls"] = "modules"
    shown: Literal["table", "page", "file", "named"] = "table"
    header: str = ""
    column: str = ""
    share: str = ""
    interval: str = ""
    diff: str = ""
    is_compared_by_layer: bool = False
    is_ranked: bool = False
    requires: Requirement | None = None
    counted_by: str | None = None
    unknown: str = ""
    value: Callable[[Any], Any] | None = None
    file_name: str = ""

    def __post_init__(self) -> None:
        for name, default in (("header", self.label), ("column", self.name), ("file_name", self.name)):
            object.__setattr__(self, name, getattr(self, name) or default)

    def of(self, row: Any) -> Any:
        """The value of a row or group, with the calls inside it; None: not known."""
        return getattr(row, self.name, None) if self.value is None else self.value(row)

    def own(self, row: Row) -> Any:
        """The value of a call without the calls inside it; of what does not add up, only calls without any have one."""
        if self.adds_up == "sum":
            return self.of(row.own)
        return self.of(row) if row.height == 1 else None

    @property
    def why_not_each(self) -> str:
        """The reason why a single call may have none."""
        if self.unknown or (self.requires is None and self.counted_by is None):
            return self.unknown
        return _NO_FORMULA if self.counted_by is not None else "the call was not measured by itself"


_NO_FORMULA = "no formula is known for its operators"
