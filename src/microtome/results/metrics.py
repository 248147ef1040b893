"""The metrics of a profile: one table, which every table, file, page and command reads.

To add a metric, declare it here and compute it in `microtome.profile`. A metric that is stored is a field of `Amounts`
or `CallAmounts`; one that follows from others is an entry of `_DERIVED`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from microtome.errors import BadQuery, describe_error
from microtome.results.metric import (
    BACKWARD,
    BACKWARD_DEVICE,
    BACKWARD_TIME,
    DEVICE_TIME,
    ENERGY,
    LOAD,
    MEMORY,
    TIME,
    Metric,
    Requirement,
)
from microtome.units import Unit

if TYPE_CHECKING:
    from microtome.results.profile import Profile
    from microtome.results.rows import Row


def _field(label: str, unit: Unit, description: str, *, default: Any = 0, **options: Any) -> Any:
    """A dataclass field that is a metric."""
    about = {"label": label, "unit": unit, "description": description, **options}
    return field(default=default, metadata={"metric": about})


def _measured(label: str, unit: Unit, description: str, requires: Requirement, **options: Any) -> Any:
    return _field(label, unit, description, default=None, requires=requires, **options)


@dataclass(frozen=True, slots=True)
class Amounts:
    """Metrics that add up: those of the parts make those of the whole. None: not counted, or not measured."""

    params: int = _field(
        "params",
        "count",
        "parameters; a shared one counts where it is first used",
        diff="params",
        is_compared_by_layer=True,
        is_ranked=True,
    )
    trainable_params: int = _field("trainable", "count", "parameters that require a gradient", shown="file")
    param_bytes: int = _field("weights", "bytes", "bytes of the parameters", shown="page")
    buffer_bytes: int = _field("buffers", "bytes", "bytes of the buffers", shown="file")
    macs: int | None = _field(
        "MACs",
        "count",
        "multiply-accumulates of the forward",
        known_of="ops",
        diff="macs",
        is_compared_by_layer=True,
        is_ranked=True,
        counted_by="macs",
    )
    flops: int | None = _field(
        "FLOPs",
        "count",
        "floating-point operations of the forward, by the convention",
        known_of="ops",
        share="share",
        diff="flops",
        counted_by="flops",
    )
    madds: int | None = _field(
        "MAdds",
        "count",
        "multiplications and additions of the forward, each counted",
        known_of="ops",
        shown="file",
        counted_by="madds",
    )
    time_s: float | None = _measured(
        "time",
        "seconds",
        "seconds of the host for the forward, the median of the passes",
        TIME,
        column="time",
        share="time_share",
        interval="spread",
        diff="time",
        is_compared_by_layer=True,
        is_ranked=True,
    )
    device_s: float | None = _measured(
        "device time",
        "seconds",
        "seconds that the GPU worked for the forward",
        DEVICE_TIME,
        header="device",
        column="device_time",
        share="device_share",
        interval="device_spread",
        diff="device",
        is_compared_by_layer=True,
        is_ranked=True,
    )
    backward_macs: int | None = _measured(
        "backward MACs",
        "count",
        "multiply-accumulates of the backward, with what it computes again",
        BACKWARD,
        shown="file",
        header="bwd MACs",
        counted_by="",
    )
    backward_flops: int | None = _measured(
        "backward FLOPs",
        "count",
        "floating-point operations of the backward",
        BACKWARD,
        header="bwd FLOPs",
        diff="backward",
        counted_by="",
    )
    backward_s: float | None = _measured(
        "backward time",
        "seconds",
        "seconds of the host for the backward",
        BACKWARD_TIME,
        header="bwd time",
        column="backward_time",
        diff="backward_time",
        is_compared_by_layer=True,
    )
    backward_device_s: float | None = _measured(
        "backward device time",
        "seconds",
        "seconds that the GPU worked for the backward",
        BACKWARD_DEVICE,
        header="bwd device",
        column="backward_device",
    )
    energy_j: float | None = _measured(
        "energy",
        "joules",
        "joules of a pass, the backward included if there was one",
        ENERGY,
        column="energy",
        share="energy_share",
        interval="energy_spread",
        diff="energy",
        is_compared_by_layer=True,
        is_ranked=True,
    )
    net_energy_j: float | None = _measured(
        "net energy", "joules", "joules of a pass above what is drawn when nothing runs", ENERGY, column="net_energy"
    )
    saved_bytes: int | None = _measured("saved", "bytes", "bytes that the forward keeps for the backward", BACKWARD)
    read_bytes: int = _field(
        "read", "bytes", "bytes that operators read; a view reads nothing", known_of="ops", shown="file"
    )
    write_bytes: int = _field(
        "written",
        "bytes",
        "bytes that operators write; a value changed in place counts once",
        known_of="ops",
        shown="file",
    )

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte moved; None where none is."""
        return None if self.flops is None or not self.moved_bytes else self.flops / self.moved_bytes


@dataclass(frozen=True, slots=True)
class CallAmounts(Amounts):
    """Metrics of a single call; those that do not add up are here."""

    output_bytes: int = _field(
        "output bytes",
        "bytes",
        "bytes that the call returns",
        adds_up="none",
        known_of="calls",
        shown="page",
        header="output",
        diff="output",
        is_compared_by_layer=True,
    )
    peak_bytes: int = _field(
        "peak memory",
        "bytes",
        "the most bytes that live at once while the call runs, weights and inputs included, computed",
        adds_up="max",
        known_of="calls",
        header="peak",
        diff="memory",
        is_ranked=True,
    )
    measured_peak_bytes: int | None = _measured(
        "measured peak",
        "bytes",
        "the same, measured",
        MEMORY,
        adds_up="max",
        known_of="calls",
        column="measured_peak",
        is_ranked=True,
    )


def _load(name: str, label: str, description: str, unit: Unit = "fraction") -> Metric:
    def value(row: Any) -> float | None:
        return getattr(getattr(row, "load", None), name, None)

    return Metric(
        f"load_{name}", label, unit, description, "none", known_of="calls", column=name, requires=LOAD, value=value
    )


_DERIVED = (
    Metric(
        "moved_bytes", "memory moved", "bytes", "bytes that operators read and write", known_of="ops", header="moved"
    ),
    Metric(
        "intensity",
        "FLOPs/B",
        "ratio",
        "operations for each byte moved",
        "none",
        known_of="ops",
        shown="page",
        counted_by="flops",
        unknown="it moves no bytes, or no formula is known",
        file_name="intensity_flops_per_byte",
    ),
)
_LOADS = (
    _load("cpu", "CPU", "how busy the CPUs were while the call ran"),
    _load("gpu", "GPU", "how busy the GPU was"),
    _load("memory", "memory", "how much of the memory was in use"),
    _load("gpu_memory", "GPU memory", "how much of the memory of the GPU was in use"),
    _load("watts", "power", "watts of the machine, where there is a sensor", "watts"),
)


def _stored(cls: type[Amounts]) -> dict[str, Metric]:
    return {one.name: Metric(one.name, **one.metadata["metric"]) for one in fields(cls)}


_AMOUNTS = _stored(Amounts)
#: Every metric by its name, in the order of columns.
METRICS: dict[str, Metric] = {
    **_AMOUNTS,
    **{metric.name: metric for metric in _DERIVED},
    **{name: metric for name, metric in _stored(CallAmounts).items() if name not in _AMOUNTS},
    **{metric.name: metric for metric in _LOADS},
}

#: The columns of a table, those first that are left out last where a terminal is too narrow. Others follow.
IMPORTANCE = (
    "runs",
    "flops",
    "time",
    "device_time",
    "energy",
    "measured_peak",
    "device_share",
    "time_share",
    "backward_time",
    "bound",
    "net_energy",
    "cpu",
    "gpu",
    "watts",
    "backward_flops",
    "params",
    "saved_bytes",
    "type",
    "share",
    "macs",
    "outputs",
    "moved_bytes",
    "peak_bytes",
    "backward_device",
    "energy_share",
    "memory",
    "gpu_memory",
)


def page_metrics() -> list[Metric]:
    """The metrics of the page of a profile."""
    return [metric for metric in METRICS.values() if metric.shown in ("table", "page")]


def compared_metrics() -> dict[str, Metric]:
    """The metrics of a `Diff`, by their names there."""
    return {metric.diff: metric for metric in METRICS.values() if metric.diff}


def why_unknown(profile: Profile, metric: Metric) -> str:
    """Say why nothing is known of a metric, and what to do about it."""
    needs = metric.requires
    if metric.shown == "named":
        return "the column says none"
    if needs is not None and needs.name in profile.unavailable:
        return profile.unavailable[needs.name]
    if needs is LOAD and profile.sampling is not None:
        return "; ".join(dict.fromkeys(profile.sampling.missing.values())) or "it was not sampled"
    if metric.counted_by == "" and profile.total.saved_bytes is not None and profile.total.backward_flops is None:
        return f"the {profile.convention} convention does not say what a backward costs"
    if needs is not None:
        return f"add {needs.option} (in Python {needs.argument})"
    unknown = ", ".join(op.name for op in profile.coverage.unknown)
    return f"no formula is known for {unknown}" if unknown else f"the {profile.convention} convention counts none"


def why_missing(profile: Profile, metric: Metric) -> str | None:
    """Say why a profile has none of a metric; None: it has."""
    if metric.of(profile.total) is not None:
        return None
    why = why_unknown(profile, metric)
    return why if metric.requires is None else f"not {metric.requires.done}: {why}"


def register_metric(metric: Metric) -> None:
    """Add a metric to the table."""
    taken = {name for known in METRICS.values() for name in (known.name, known.column, known.share, known.interval)}
    if metric.column in taken | _TEXT_COLUMNS or not metric.column.isidentifier():
        raise BadQuery(f"a column is named by a word that no other has, got {metric.column!r}")
    METRICS[metric.name] = metric


#: Columns of tables and fields of files that are no metrics.
_TEXT_COLUMNS = {
    "address",
    "name",
    "runs",
    "type",
    "depth",
    "inputs",
    "outputs",
    "dtype",
    "bound",
    "shared_params",
    "elapsed_s",
    "elapsed_device_s",
    "input_shapes",
    "output_shapes",
    "dtypes",
}


def register_column(name: str, value: Callable[[Row], Any], header: str | None = None) -> None:
    """Have a column of your own in the tables and files of profiles, where `columns` names it.

    Args:
        value: Computes the cell of a call: a number, a text, or None.
        header: The header of the column; else the name.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> mt.register_column("flops_per_param", lambda row: row.flops / row.params if row.params else None)
    >>> from microtome.report.formats import csv
    >>> from microtome.report.row_selection import RowSelection
    >>> csv(mt.profile(*zoo.build("tiny-resnet")), RowSelection(columns=("flops_per_param",), top=1)).split()
    ['address,flops_per_param', ',1742.0194209674519']
    >>> unregister_column("flops_per_param")
    """

    def cell(row: Any) -> Any:
        try:
            return value(row)
        except Exception as error:
            raise BadQuery(f"the column {name!r} raised {describe_error(error)} at {row.address!r}") from error

    register_metric(Metric(name, header or name, None, "", "none", known_of="calls", shown="named", value=cell))


def unregister_column(name: str) -> None:
    """Remove a column that was registered."""
    if name not in METRICS or METRICS[name].shown != "named":
        raise BadQuery(f"no column is registered as {name!r}")
    del METRICS[name]
