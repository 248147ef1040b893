"""Measure a profile's calls, in separate runs with as little overhead as each quantity allows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import psutil
from torch import Tensor, nn

from microtome.devices.load import LoadSampler
from microtome.devices.machine import environment
from microtome.devices.meters import Meter, check, pick
from microtome.devices.statistics import spreads
from microtome.errors import BadQuery, SensorFailed
from microtome.inputs import Inputs
from microtome.profile import device, energy, timing
from microtome.profile.call_tree import CallTree
from microtome.profile.energy import Energies, EnergyModel
from microtome.profile.load import sample_load
from microtome.profile.repeats import Passes, PassSchedule, check_calls, passes, to_integer
from microtome.results.measurements import EnergyUse, MemoryUse, Sampling, Spread, Timing
from microtome.results.rows import Row

QUANTITIES = ("time", "memory", "energy", "load")


@dataclass(frozen=True)
class MeasurementSpec:
    """The quantities to measure, and how.

    Attributes:
        measure: The quantities.
        schedule: The number of passes.
        depth: The maximum depth in the tree of calls.
        device_time: The method for times of an accelerator.
        energy: The method for energies: `"share"`, `"replay"`, or the model of an estimate.
        meter: The meter that energies are read from.
        backward: Whether passes include a backward.
    """

    measure: frozenset[str]
    schedule: PassSchedule
    depth: int | None = None
    device_time: device.DeviceTimeMethod = "kernels"
    energy: str | EnergyModel = "share"
    meter: Meter | str | None = None
    backward: bool = False

    @classmethod
    def parse(cls, measure: Collection[str], schedule: PassSchedule, **options: Any) -> MeasurementSpec | None:
        """Create one from the arguments of `profile`; None if there is nothing to measure."""
        try:
            quantities = frozenset((measure,) if isinstance(measure, str) else measure)
        except TypeError as error:
            expected = ", ".join(map(repr, QUANTITIES))
            raise BadQuery(f"expected measure to be one or several of {expected}, got {measure!r}") from error
        return cls(quantities, schedule, **options) if quantities else None

    @property
    def energy_needs_time(self) -> bool:
        return not isinstance(self.energy, EnergyModel) or bool(self.energy.watts)

    def __post_init__(self) -> None:
        for name in self.measure - set(QUANTITIES):
            raise BadQuery(f"expected measure to be of {', '.join(map(repr, QUANTITIES))}, got {name!r}")
        if self.device_time not in device.METHODS:
            methods = ", ".join(map(repr, device.METHODS))
            raise BadQuery(f"expected device_time to be one of {methods}, got {self.device_time!r}")
        if not isinstance(self.energy, EnergyModel) and self.energy not in ("share", "replay"):
            raise BadQuery(f"expected energy to be 'share', 'replay' or an EnergyModel, got {self.energy!r}")
        check(self.meter)
        if self.depth is not None and to_integer(self.depth, "depth") < 0:
            raise BadQuery(f"expected depth to be 0 or more, got {self.depth}")


@dataclass
class Measurements:
    """The rows with their measurements, and how these were made."""

    rows: list[Row]
    environment: dict[str, str] = field(default_factory=dict)
    timing: Timing | None = None
    energy: EnergyUse | None = None
    memory: MemoryUse | None = None
    sampling: Sampling | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    def methods(self) -> dict[str, Any]:
        """Return all fields but the rows."""
        return {name: value for name, value in vars(self).items() if name != "rows"}


def measure(rows: Sequence[Row], model: nn.Module, inputs: Inputs, spec: MeasurementSpec) -> Measurements:
    """Measure the calls of a profile."""
    tree = CallTree(rows, spec.depth)
    found = Measurements(list(rows))
    if spec.measure == {"energy"} and isinstance(spec.energy, EnergyModel) and not spec.energy.watts:
        estimated = energy.estimate(tree, spec.energy, [None] * len(tree), backward=spec.backward)
        _set_energies(found, tree, estimated)
        return found
    with passes(model, inputs, backward=spec.backward) as runs:
        runs.choose_fast_paths(tree)
        if "time" in spec.measure or ("energy" in spec.measure and spec.energy_needs_time):
            _time(found, runs, tree, spec)
        if "memory" in spec.measure and runs.backend.has_activity:
            _device_memory(found, runs, tree)
        if "energy" in spec.measure:
            _energy(found, runs, tree, spec)
        if "load" in spec.measure:
            loads, found.sampling = sample_load(runs, tree, spec.schedule, spec.meter)
            for at, load in zip(tree.at, loads, strict=True):
                found.rows[at] = replace(found.rows[at], load=load)
        found.environment = environment(runs.devices)
    return found


# -- time --------------------------------------------------------------------------------------------------------------


def _time(found: Measurements, runs: Passes, tree: CallTree, spec: MeasurementSpec) -> None:
    schedule = spec.schedule
    times, overhead = timing.time_forward(runs, tree, schedule)
    _set_spreads(found, tree, "time_s", spreads(times.inclusive, timing.METHOD))
    _set_elapsed(found, tree, "elapsed_s", times.elapsed)
    if runs.backward:
        own, overhead = timing.time_backward(runs, tree, schedule, overhead)
        _set_spreads(found, tree, "backward_s", spreads(tree.inclusive(own), timing.BACKWARD_METHOD))
    if runs.backend.has_activity:
        overhead = _device_time(found, runs, tree, spec, overhead)
    elif runs.devices:
        found.unavailable["device time"] = f"not measured on {runs.backend.type} devices"
    found.timing = overhead


def _device_time(found: Measurements, runs: Passes, tree: CallTree, spec: MeasurementSpec, overhead: Timing) -> Timing:
    times_of = device.kernel_times if spec.device_time == "kernels" else device.graph_times
    times = times_of(runs, tree, spec.schedule)
    method = device.METHODS[spec.device_time]
    _set_spreads(found, tree, "device_s", spreads(tree.inclusive(times.forward), method))
    _set_elapsed(found, tree, "elapsed_device_s", times.elapsed)
    bare = spreads(times.bare, f"{method}, of bare passes")[0]
    backward = None
    if times.backward is not None and times.bare_backward is not None:
        _set_spreads(found, tree, "backward_device_s", spreads(tree.inclusive(times.backward), method))
        backward = spreads(times.bare_backward, f"{method}, of bare passes")[0]
    ratio = median(times.forward.sum(1).tolist()) / bare.median
    return replace(overhead, device=bare, device_backward=backward, device_ratio=ratio)


def _set_spreads(found: Measurements, tree: CallTree, name: str, call_spreads: Sequence[Spread]) -> None:
    """Write a quantity into the rows; a call's own amount excludes the calls inside it."""
    own = tree.own([spread.median for spread in call_spreads])
    for at, spread, own_amount in zip(tree.at, call_spreads, own, strict=True):
        row = found.rows[at]
        row = replace(row, spreads=row.spreads | {name: spread})
        found.rows[at] = _with_amount(row, name, spread.median, own_amount)


def _set_elapsed(found: Measurements, tree: CallTree, name: str, elapsed: Tensor) -> None:
    """Write the time from the beginning of the run to the end of each call into the rows."""
    for at, seconds in zip(tree.at, elapsed.quantile(0.5, dim=0).tolist(), strict=True):
        change: dict[str, Any] = {name: seconds}
        found.rows[at] = replace(found.rows[at], **change)


def _with_amount(row: Row, name: str, inclusive: float | None, own: float | None) -> Row:
    amount: dict[str, Any] = {name: inclusive}
    own_amount: dict[str, Any] = {name: own}
    return replace(row, own=replace(row.own, **own_amount), **amount)


# -- memory ------------------------------------------------------------------------------------------------------------


def _device_memory(found: Measurements, runs: Passes, tree: CallTree) -> None:
    before = psutil.Process().memory_info().rss
    with LoadSampler() as sampler:
        peaks = device.peak_bytes(runs, tree)
    resident = runs.resident_bytes()
    for at, peak in zip(tree.at, peaks, strict=True):
        found.rows[at] = replace(found.rows[at], measured_peak_bytes=resident + peak)
    method = "allocations of the device's allocator, including those of weights and inputs"
    found.memory = MemoryUse(method, before, sampler.rss_peak_bytes)


def host_memory(found: Measurements, spec: MeasurementSpec, real_rows: Callable[[], Sequence[Row]]) -> None:
    """Measure the tensors that are alive during a real run, where there are no statistics of an allocator.

    Args:
        real_rows: Returns the rows of a real run.
    """
    before = psutil.Process().memory_info().rss
    with LoadSampler() as sampler:
        rows = real_rows()
    check_calls([row.address for row in rows], [row.address for row in found.rows])
    for at in CallTree(found.rows, spec.depth).at:
        found.rows[at] = replace(found.rows[at], measured_peak_bytes=rows[at].peak_bytes)
    found.memory = MemoryUse("tensors alive during a real run", before, sampler.rss_peak_bytes)


# -- energy ------------------------------------------------------------------------------------------------------------


def _energy(found: Measurements, runs: Passes, tree: CallTree, spec: MeasurementSpec) -> None:
    own_s = [_own_seconds(found.rows[at]) for at in tree.at]
    if isinstance(spec.energy, EnergyModel):
        _set_energies(found, tree, energy.estimate(tree, spec.energy, own_s, backward=runs.backward))
        return
    method = energy.share if spec.energy == "share" else energy.replay
    try:
        meter = pick(spec.meter, runs.devices)
        try:
            seconds = [time or 0.0 for time in own_s]
            _set_energies(found, tree, method(runs, tree, meter, spec.schedule, seconds))
        finally:
            if meter is not spec.meter:
                meter.close()
    except SensorFailed as error:
        found.unavailable["energy"] = str(error)


def _own_seconds(row: Row) -> float | None:
    """Return the own time of a call on the device if measured, else on the host."""
    own = row.own
    times = (own.time_s, own.backward_s) if own.device_s is None else (own.device_s, own.backward_device_s)
    return None if row.own.time_s is None else sum(time for time in times if time is not None)


def _set_energies(found: Measurements, tree: CallTree, energies: Energies) -> None:
    found.energy = energies.use
    columns = {"energy_j": energies.own, "net_energy_j": energies.net}
    for name, own in columns.items():
        inclusive = tree.known_sums(own)
        for at, own_j, inclusive_j in zip(tree.at, own, inclusive, strict=True):
            found.rows[at] = _with_amount(found.rows[at], name, inclusive_j, own_j)
    for at, spread in zip(tree.at, energies.spreads, strict=True):
        if spread is not None:
            row = found.rows[at]
            found.rows[at] = replace(row, spreads=row.spreads | {"energy_j": spread})
