"""The quantities that the page shows of calls: one list, which the table, the tree and the script all go by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from microtome.results.profile import Profile
from microtome.units import UNKNOWN, count, joules, ratio, seconds, size

WRITERS = {"count": count, "bytes": size, "seconds": seconds, "joules": joules, "ratio": ratio}


@dataclass(frozen=True)
class Metric:
    """A quantity of calls.

    Attributes:
        name: That of the attribute of a row.
        label: What it is called on the page.
        unit: How it is written: a key of `WRITERS`.
        told: What it is, in a sentence.
        is_sum: Whether that of a call is the sum of its parts, so that a tree can be sized by it.
        is_shown: Whether the table has it unasked, where it is known.
        help: What would make it known.
        unknown: Why single calls may not have it.
    """

    name: str
    label: str
    unit: str
    told: str
    is_sum: bool = True
    is_shown: bool = True
    help: str = ""
    unknown: str = ""

    def of(self, row: Any) -> float | None:
        value: float | None = getattr(row, self.name)
        return value

    def write(self, value: float | None) -> str:
        return UNKNOWN if value is None else WRITERS[self.unit](value)

    def scale(self, profile: Profile) -> float | None:
        """What a full bar is: the whole model, or, of what does not add up, the call with the most."""
        if self.is_sum:
            return self.of(profile.total)
        return max((value for row in profile if (value := self.of(row)) is not None), default=None)

    def missing(self, profile: Profile) -> str | None:
        """Why the profile has none of it; None: it has."""
        if self.of(profile.total) is not None:
            return None
        asked = profile.unavailable.get(_ASKED.get(self.name, ""))
        return f"not measured: {asked}" if asked else self.help or "not known"


_ASKED = {
    "time_s": "time",
    "device_s": "time",
    "energy_j": "energy",
    "net_energy_j": "energy",
    "measured_peak_bytes": "memory",
}
_TIME = "not measured: profile with measure='time' (microtome profile --time)"
_DEVICE = "not measured: only a GPU has it, with measure='time' (microtome profile --time --device cuda)"
_BACKWARD = "not counted: profile with backward=True (microtome profile --backward)"
_ENERGY = "not measured: profile with measure='energy' (microtome profile --energy)"
_MEMORY = "not measured: profile with measure='memory' (microtome profile --memory)"
_FORMULA = "no formula is known for its operators"
_DEEP = "the call was not measured by itself"

METRICS = (
    Metric("params", "params", "count", "parameters; a shared one counts where it is first used"),
    Metric("macs", "MACs", "count", "multiply-accumulates of the forward", help=_FORMULA, unknown=_FORMULA),
    Metric("flops", "FLOPs", "count", "floating-point operations of the forward", help=_FORMULA, unknown=_FORMULA),
    Metric("time_s", "time", "seconds", "seconds of the host for the forward, the median", help=_TIME, unknown=_DEEP),
    Metric("device_s", "device time", "seconds", "seconds that the GPU worked", help=_DEVICE, unknown=_DEEP),
    Metric("energy_j", "energy", "joules", "joules of a pass", help=_ENERGY, unknown=_DEEP),
    Metric(
        "net_energy_j",
        "net energy",
        "joules",
        "joules above what is drawn when nothing runs",
        is_shown=False,
        help=_ENERGY,
        unknown=_DEEP,
    ),
    Metric(
        "peak_bytes", "peak memory", "bytes", "the most that lives at once while the call runs, computed", is_sum=False
    ),
    Metric(
        "measured_peak_bytes", "measured peak", "bytes", "the same, measured", is_sum=False, help=_MEMORY, unknown=_DEEP
    ),
    Metric("moved_bytes", "memory moved", "bytes", "bytes that operators read and write"),
    Metric("output_bytes", "output bytes", "bytes", "bytes that the call returns", is_sum=False, is_shown=False),
    Metric("param_bytes", "weights", "bytes", "bytes of the parameters", is_shown=False),
    Metric(
        "intensity",
        "FLOPs/B",
        "ratio",
        "operations for each byte moved",
        is_sum=False,
        is_shown=False,
        help="nothing is moved",
        unknown="it moves no bytes, or no formula is known",
    ),
    Metric(
        "backward_flops",
        "bwd FLOPs",
        "count",
        "floating-point operations of the backward",
        help=_BACKWARD,
        unknown=_FORMULA,
    ),
    Metric("backward_s", "bwd time", "seconds", "seconds of the host for the backward", help=_BACKWARD, unknown=_DEEP),
    Metric(
        "backward_device_s",
        "bwd device",
        "seconds",
        "seconds that the GPU worked in the backward",
        is_shown=False,
        help=_DEVICE.replace("--time", "--time --backward"),
        unknown=_DEEP,
    ),
    Metric("saved_bytes", "saved", "bytes", "bytes kept for the backward", is_shown=False, help=_BACKWARD),
)
BY_NAME = {metric.name: metric for metric in METRICS}
