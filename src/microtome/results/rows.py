"""Rows of a profile: calls, and groups of them, and how their metrics add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from microtome.results.methods import Load
from microtome.results.metrics import Amounts, CallAmounts
from microtome.results.spread import Spread

_NOTHING = Amounts()
AMOUNTS = tuple(field.name for field in fields(Amounts))


def add(several: Iterable[Amounts]) -> dict[str, Any]:
    """Sum each metric, by its name. One that is None in all of them is None; elsewhere None adds nothing."""
    columns = zip(*([getattr(amounts, name) for name in AMOUNTS] for amounts in several), strict=True)
    sums = [sum(known) if (known := [value for value in column if value is not None]) else None for column in columns]
    return dict(zip(AMOUNTS, sums, strict=True)) if sums else {}


@dataclass(frozen=True, slots=True)
class Group(Amounts):
    """The sums of several calls or operators.

    Attributes:
        name: The type of the modules, or the name of the operators.
        runs: The number of calls, or of runs of the operator.
    """

    name: str = ""
    runs: int = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """The shape and the dtype of a tensor that goes into a call or comes out of it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Row(CallAmounts):
    """One call, with all calls inside it; `microtome.results.metrics` says what each metric is.

    Attributes:
        parent: The address of the call that contains it; None for the root.
        height: 1 for a call without calls inside, else one more than the highest of those.
        own: What the call costs without the calls inside it.
        ops: The operators that its own code ran in the forward, by name.
        shared_params: Parameters that are used here and counted elsewhere: tied weights, modules that run again.
        elapsed_s: Seconds of the host from the beginning of the run to the end of the call, measured in one run: the
            time of several layers in a row is not the sum of theirs.
        elapsed_device_s: Seconds that the GPU worked for all that was launched by then.
        load: The load of the machine; None: not sampled.
        spreads: The distribution over the passes, and the method, by the name of the metric.
    """

    address: str = ""
    path: str = ""
    type: str = ""
    depth: int = 0
    height: int = 1
    parent: str | None = None
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    shared_params: int = 0
    own: Amounts = _NOTHING
    ops: tuple[Group, ...] = ()
    elapsed_s: float | None = None
    elapsed_device_s: float | None = None
    load: Load | None = None
    spreads: dict[str, Spread] = field(default_factory=dict)

    @property
    def is_launch_bound(self) -> bool | None:
        """Whether the host takes longer to launch the work than the GPU to do it; None without work, or times of it."""
        return self.time_s > self.device_s if self.device_s and self.time_s is not None else None
