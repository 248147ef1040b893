"""The metrics of a profile: one table, which every table, file, page and command reads.

To add a metric, declare it here and compute it in `microtome.profile`. A metric that is stored is a field of `Amounts`
or `CallAmounts`; one that is computed from others is an entry of `_DERIVED`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from microtome.errors import BadQuery, describe_error
from microtome.units import Unit

if TYPE_CHECKING:
    from microtome.results.profile import Profile
    from microtome.results.rows import Row


#: The options of the running command, empty if they are not known; None: the caller is Python.
_OPTIONS: ContextVar[frozenset[str] | None] = ContextVar("_OPTIONS", default=None)
_OPTION = re.compile(r"--[a-z][a-z-]*")
#: Options of `microtome profile` that the output of other commands advises.
_OF_PROFILE = frozenset(
    ("--time", "--memory", "--energy", "--energy-model", "--load", "--depth", "--repeat", "--backward")
)


@contextmanager
def on_command_line(options: Iterable[str] = ()) -> Iterator[None]:
    """Make `advise` name options of the command line inside the block.

    Args:
        options: Those of the running command; if there are none, all are taken for its own.
    """
    token = _OPTIONS.set(frozenset(options))
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def advise(argument: str, option: str) -> str:
    """Return what to write, in the interface in use: Python, or the command line.

    Options of `microtome profile` that the running command does not have are named with the command.

    >>> advise('measure=["time"]', "--time")
    'measure=["time"]'
    >>> with on_command_line():
    ...     advise('measure=["time"]', "--time")
    '--time'
    >>> with on_command_line(["--cuts"]):
    ...     advise('measure=["time"]', "--time")
    '--time of `microtome profile`'
    """
    own = _OPTIONS.get()
    if own is None:
        return argument
    named = list(_OPTION.finditer(option))
    others = {match[0] for match in named} - own
    if not own or not others or not others <= _OF_PROFILE or option.startswith("microtome "):
        return option
    end = named[-1].end()
    return f"{option[:end]} of `microtome profile`{option[end:]}"


def own_options(*options: str) -> list[str]:
    """Return those of the options that the running command has; all if its options are not known."""
    own = _OPTIONS.get()
    return [option for option in options if not own or option in own]


@dataclass(frozen=True)
class Requirement:
    """The option without which a profile does not have a metric.

    Attributes:
        name: The measurement, as `Profile.unavailable` names it.
        option: The option of the command line.
        argument: The argument in Python.
        done: How the metric is obtained.
    """

    name: str
    option: str
    argument: str
    done: Literal["measured", "counted"] = "measured"

    @property
    def advice(self) -> str:
        """The argument or option that adds it."""
        return advise(self.argument, self.option)


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
        shown: Where it is shown by default: in tables, as a choice on the page, in files only, or nowhere unless a
            caller names it.
        header: The name in tables, where it is shorter than the label.
        column: The name for `--columns` and `--sort`, where it differs from the field.
        share: The name of the column with the share of the total; "": there is none.
        interval: The name of the column with the 95 % interval; "": there is none.
        diff: The name in a `Diff` and for `--fail-over`; "": it is not compared.
        is_compared_by_layer: Whether a `Diff` compares layers by it.
        is_ranked: Whether `microtome top` has a section for it.
        requires: The option that gives it; None: it is always counted.
        counted_by: The field of an operator that is None where it has no formula; "" where only the backward has one.
        unknown: The reason why a single call may lack it, where it is not that of the requirement.
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
        """Return the value of a row or group, with the calls inside it; None: unknown, or an own column raised."""
        if self.value is None:
            return getattr(row, self.name, None)
        try:
            return self.value(row)
        except Exception:
            if self.shown != "named":
                raise
            return None

    def why_raised(self, rows: Iterable[Any]) -> str | None:
        """Return what an own column raised, at the first of these rows where it did; None: nothing."""
        if self.shown != "named" or self.value is None:
            return None
        for row in rows:
            try:
                self.value(row)
            except Exception as error:  # noqa: BLE001  a caller's function may raise anything
                return f"the column {self.name!r} raised {describe_error(error)} at {row.address or '(root)'!r}"
        return None

    def own(self, row: Row) -> Any:
        """Return the value of a call without the calls inside it; if it does not add up, only of a call without any."""
        if self.adds_up == "sum":
            return self.of(row.own)
        return self.of(row) if row.height == 1 else None

    @property
    def is_measured(self) -> bool:
        """Whether it is measured in real runs, possibly not of every call; False: it is counted."""
        return self.requires is not None and self.requires.done == "measured"

    @property
    def titles(self) -> tuple[str, ...]:
        """Names by which a caller may choose it: its field, its column, its header and label, and its name in diffs."""
        return (self.name, self.column, self.header, self.label, *filter(None, (self.diff,)))

    @property
    def share_titles(self) -> tuple[str, ...]:
        """The name and the header of the column with the share of the total; () if there is none."""
        return (self.share, f"{self.header} share") if self.share else ()

    @property
    def why_not_each(self) -> str:
        """The reason why a single call may lack it."""
        if self.unknown or (self.requires is None and self.counted_by is None):
            return self.unknown
        if self.counted_by is not None:
            return "no formula is known for its operators"
        return "the call was not measured by itself"


def _field(label: str, unit: Unit, description: str, *, default: Any = 0, **options: Any) -> Any:
    """Declare a dataclass field that is a metric."""
    about = {"label": label, "unit": unit, "description": description, **options}
    return field(default=default, metadata={"metric": about})


def _measured(label: str, unit: Unit, description: str, requires: Requirement, **options: Any) -> Any:
    return _field(label, unit, description, default=None, requires=requires, **options)


#: The options of a metric that a `Diff` compares layer by layer and `microtome top` ranks.
_PER_LAYER: dict[str, Any] = {"is_compared_by_layer": True, "is_ranked": True}


# A table: the options of a metric share a line.
# fmt: off
@dataclass(frozen=True, slots=True)
class Amounts:
    """Metrics that add up: those of the parts sum to those of the whole. None: not counted, or not measured."""

    params: int = _field(
        "params", "count", "parameters; a shared one counts where it is first used", diff="params", **_PER_LAYER)
    trainable_params: int = _field("trainable", "count", "parameters that require a gradient", shown="file")
    param_bytes: int = _field("weights", "bytes", "bytes of the parameters", shown="page")
    buffer_bytes: int = _field("buffers", "bytes", "bytes of the buffers", shown="file")
    macs: int | None = _field(
        "MACs", "count", "multiply-accumulates of the forward",
        known_of="ops", counted_by="macs", diff="macs", **_PER_LAYER)
    flops: int | None = _field(
        "FLOPs", "count", "floating-point operations of the forward, by the convention",
        known_of="ops", counted_by="flops", diff="flops", share="share", is_compared_by_layer=True)
    madds: int | None = _field(
        "MAdds", "count", "multiplications and additions of the forward, each counted",
        known_of="ops", counted_by="madds", shown="file")
    time_s: float | None = _measured(
        "time", "seconds", "seconds of the host for the forward, the median of the passes", TIME,
        column="time", share="time_share", interval="spread", diff="time", **_PER_LAYER)
    device_s: float | None = _measured(
        "device time", "seconds", "seconds that the GPU worked for the forward", DEVICE_TIME, header="device",
        column="device_time", share="device_share", interval="device_spread", diff="device", **_PER_LAYER)
    backward_macs: int | None = _measured(
        "backward MACs", "count", "multiply-accumulates of the backward, with what it computes again", BACKWARD,
        header="bwd MACs", counted_by="", shown="file")
    backward_flops: int | None = _measured(
        "backward FLOPs", "count", "floating-point operations of the backward", BACKWARD,
        header="bwd FLOPs", counted_by="", diff="backward", is_compared_by_layer=True)
    backward_s: float | None = _measured(
        "backward time", "seconds", "seconds of the host for the backward", BACKWARD_TIME,
        header="bwd time", column="backward_time", diff="backward_time", is_compared_by_layer=True)
    backward_device_s: float | None = _measured(
        "backward device time", "seconds", "seconds that the GPU worked for the backward", BACKWARD_DEVICE,
        header="bwd device", column="backward_device")
    energy_j: float | None = _measured(
        "energy", "joules", "joules of a pass, the backward included if there was one", ENERGY,
        column="energy", share="energy_share", interval="energy_spread", diff="energy", **_PER_LAYER)
    net_energy_j: float | None = _measured(
        "net energy", "joules", "joules of a pass above what is drawn when nothing runs", ENERGY, column="net_energy")
    saved_bytes: int | None = _measured(
        "saved", "bytes",
        "bytes that the forward keeps for the backward, at the call that computed them, whichever call saves them; "
        "inputs and weights of the model are not counted", BACKWARD)
    read_bytes: int = _field(
        "read", "bytes", "bytes that operators read; a view reads nothing", known_of="ops", shown="file")
    write_bytes: int = _field(
        "written", "bytes", "bytes that operators write; a value changed in place counts once",
        known_of="ops", shown="file")

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte moved; None where none is."""
        return None if self.flops is None or not self.moved_bytes else self.flops / self.moved_bytes


@dataclass(frozen=True, slots=True)
class CallAmounts(Amounts):
    """Metrics of a single call, which do not add up."""

    output_bytes: int = _field(
        "output bytes", "bytes", "bytes that the call returns",
        adds_up="none", shown="page", header="output", diff="output", is_compared_by_layer=True)
    peak_bytes: int = _field(
        "peak memory", "bytes",
        "the most bytes that live at once while the call runs, weights and inputs included, computed",
        adds_up="max", header="peak", diff="memory", is_ranked=True)
    measured_peak_bytes: int | None = _measured(
        "measured peak", "bytes", "the same, measured", MEMORY, adds_up="max", column="measured_peak", is_ranked=True)


_DERIVED = (
    Metric("moved_bytes", "memory moved", "bytes", "bytes that operators read and write",
           known_of="ops", header="moved"),
    Metric("intensity", "FLOPs/B", "ratio", "operations for each byte moved", "none",
           known_of="ops", shown="page", counted_by="flops", unknown="it moves no bytes, or no formula is known",
           file_name="intensity_flops_per_byte"),
)
# fmt: on


def _load(name: str, label: str, description: str, unit: Unit = "fraction", *, column: str = "") -> Metric:
    def value(row: Any) -> float | None:
        return getattr(getattr(row, "load", None), name, None)

    return Metric(
        f"load_{name}", label, unit, description, "none", "calls", column=column or name, requires=LOAD, value=value
    )


_LOADS = (
    _load("cpu", "CPU", "how busy the CPUs were while the call ran"),
    _load("gpu", "GPU", "how busy the GPU was"),
    _load("memory", "RAM", "how much of the machine's memory was in use", column="ram"),
    _load("gpu_memory", "GPU memory", "how much of the memory of the GPU was in use"),
    _load("watts", "power", "watts of the machine, where there is a sensor", "watts"),
)

_SUMS = [Metric(one.name, **one.metadata["metric"]) for one in fields(Amounts)]
_OF_CALLS = [Metric(one.name, known_of="calls", **one.metadata["metric"]) for one in fields(CallAmounts)[len(_SUMS) :]]
#: Every metric by its name, in the order of columns.
METRICS = {metric.name: metric for metric in (*_SUMS, *_DERIVED, *_OF_CALLS, *_LOADS)}

#: Columns by importance: where a terminal is too narrow, the last are dropped first, and before them all others.
IMPORTANCE = (
    "runs", "flops", "time", "device_time", "energy", "measured_peak", "device_share", "time_share", "backward_time",
    "bound", "net_energy", "cpu", "gpu", "watts", "backward_flops", "params", "saved_bytes", "type", "share", "macs",
    "outputs", "moved_bytes", "peak_bytes", "backward_device", "energy_share", "ram", "gpu_memory",
)  # fmt: skip


def page_metrics() -> list[Metric]:
    """Return the metrics of the page of a profile."""
    return [metric for metric in METRICS.values() if metric.shown in ("table", "page")]


def compared_metrics() -> dict[str, Metric]:
    """Return the metrics of a `Diff`, by their names there."""
    return {metric.diff: metric for metric in METRICS.values() if metric.diff}


def find_compared(name: str, noun: str = "metric") -> str:
    """Return the name in a `Diff` of the metric with this name or header.

    >>> find_compared("peak memory"), find_compared("MACs")
    ('memory', 'macs')
    """
    titles = {compared: metric.titles for compared, metric in compared_metrics().items()}
    return find_choice(name, titles, noun, " to compare")


def why_unknown(profile: Profile, metric: Metric) -> str:
    """Return the reason why a profile lacks a metric, and what to do about it."""
    needs = metric.requires
    if metric.shown == "named":
        return metric.why_raised(profile) or "the column returned None"
    if needs is not None and needs.name in profile.unavailable:
        return profile.unavailable[needs.name]
    if needs is LOAD and profile.sampling is not None:
        return "; ".join(dict.fromkeys(profile.sampling.missing.values())) or "it was not sampled"
    if metric.counted_by == "" and profile.total.saved_bytes is not None and profile.total.backward_flops is None:
        return f"the {profile.convention} convention does not define the FLOPs of a backward"
    if needs is not None:
        return f"add {needs.advice}"
    unknown = ", ".join(op.name for op in profile.coverage.unknown)
    return f"no formula is known for {unknown}" if unknown else f"the {profile.convention} convention counts none"


def why_missing(profile: Profile, metric: Metric) -> str | None:
    """Return the reason why a profile lacks a metric; None: it has it."""
    if metric.of(profile.total) is not None:
        return None
    why = why_unknown(profile, metric)
    return why if metric.requires is None else f"not {metric.requires.done}: {why}"


#: The unit that tables write after a header, such as "KiB" or "ms", after `_normalize`.
_UNIT = re.compile("_([kmgtpe]|([kmgtpe]i)?b|[mun]?[sjw])$")


def find_choice(name: str, choices: Mapping[str, Iterable[str]], noun: str = "column", purpose: str = "") -> str:
    """Return the choice of this name, or with this header; case, spaces and a unit after it do not matter.

    Args:
        choices: The headers of each choice, by its name.
        noun: What is chosen, for the error.
        purpose: What it is chosen for, for the error.

    >>> find_choice("FLOPs share", {"flops": ["FLOPs"], "share": ["FLOPs share"]})
    'share'
    >>> find_choice("time ms", {"time": ()})
    'time'
    """
    if name in choices:
        return name
    pairs = [(title, choice) for choice, headers in choices.items() for title in (choice, *headers)]
    known = {_normalize(title): choice for title, choice in reversed(pairs)}
    wanted = _normalize(str(name))
    for title in (wanted, _UNIT.sub("", wanted)):
        if title in known:
            return known[title]
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.7)
    hint = f"did you mean {known[near[0]]!r}? " if near else ""
    raise BadQuery(f"no {noun} {name!r}{purpose}: {hint}expected one of {', '.join(choices)}")


def _normalize(title: str) -> str:
    return "_".join(title.lower().split())


def register_metric(metric: Metric) -> None:
    """Add a metric to the table."""
    used = {name for known in METRICS.values() for name in (known.name, known.column, known.share, known.interval)}
    if metric.column in used | _TEXT_COLUMNS or not metric.column.isidentifier():
        raise BadQuery(f"expected the name of a column to be an unused identifier, got {metric.column!r}")
    METRICS[metric.name] = metric


#: Columns of tables and fields of files that are not metrics.
_TEXT_COLUMNS = {
    "address", "name", "runs", "type", "depth", "inputs", "outputs", "dtype", "bound", "shared_params", "elapsed_s",
    "elapsed_device_s", "input_shapes", "output_shapes", "dtypes",
}  # fmt: skip


def register_column(name: str, value: Callable[[Row], Any], header: str | None = None) -> None:
    """Add a column to the tables and files of profiles, shown where `columns` names it.

    Args:
        value: Computes the cell of a call: a number, a string, or None. A cell for which it raises is unknown.
        header: The header of the column; by default its name.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> mt.register_column("flops_per_param", lambda row: row.flops / row.params if row.params else None)
    >>> from microtome.report.formats import csv
    >>> from microtome.report.row_selection import RowSelection
    >>> csv(mt.profile(*zoo.build("tiny-resnet")), RowSelection(columns=("flops_per_param",), top=1)).split()
    ['address,flops_per_param', ',1742.0194209674519']
    >>> unregister_column("flops_per_param")
    """
    if not isinstance(name, str) or not callable(value) or not isinstance(header, str | None):
        got = ", ".join(type(argument).__name__ for argument in (name, value, header))
        raise BadQuery(f"expected a name, a function of a row and a header, register_column('name', f), got {got}")
    register_metric(Metric(name, header or name, None, "", "none", known_of="calls", shown="named", value=value))


def unregister_column(name: str) -> None:
    """Remove a column that was registered."""
    if name not in METRICS or METRICS[name].shown != "named":
        raise BadQuery(f"no column is registered as {name!r}")
    del METRICS[name]
