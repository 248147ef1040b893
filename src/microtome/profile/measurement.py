"""Measure a profile's calls, in separate runs with as little overhead as each quantity allows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import psutil
from torch import Tensor, nn

from microtome.devices.machine import environment
from microtome.devices.meters import Meter, check, pick
from microtome.devices.statistics import spreads
from microtome.devices.utilization import LoadSampler
from microtome.errors import BadQuery, SensorFailed
from microtome.flops.conventions import find_convention
from microtome.inputs import Inputs
from microtome.profile import accelerator, energy, timing
from microtome.profile.call_tree import CallTree
from microtome.profile.energy import Energies, EnergyModel
from microtome.profile.passes import Passes, PassSchedule, check_calls, open_passes, to_integer
from microtome.profile.static import ProfileBuilder
from microtome.profile.utilization import sample_load
from microtome.results.measurements import MemoryUse, Spread, Timing
from microtome.results.profile import Profile
from microtome.results.rows import Row
from microtome.trace.trace import record

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
    device_time: accelerator.DeviceTimeMethod = "kernels"
    energy: str | EnergyModel = "share"
    meter: Meter | str | None = None
    backward: bool = False

    @classmethod
    def parse(cls, measure: Collection[str], schedule: PassSchedule, **options: Any) -> MeasurementSpec | None:
        """Check the arguments of `profile`, and return None if there is nothing to measure."""
        try:
            quantities = frozenset((measure,) if isinstance(measure, str) else measure)
        except TypeError as error:
            expected = ", ".join(map(repr, QUANTITIES))
            raise BadQuery(f"expected measure to be one or several of {expected}, got {measure!r}") from error
        spec = cls(quantities, schedule, **options)
        return spec if quantities else None

    @property
    def needs_runs(self) -> bool:
        """Whether the model is run on real tensors: an estimate of energy alone may need no times."""
        return self.measure != {"energy"} or self.energy_needs_time

    @property
    def energy_needs_time(self) -> bool:
        return not isinstance(self.energy, EnergyModel) or bool(self.energy.watts)

    def __post_init__(self) -> None:
        for name in self.measure - set(QUANTITIES):
            raise BadQuery(f"expected measure to be of {', '.join(map(repr, QUANTITIES))}, got {name!r}")
        if self.device_time not in accelerator.METHODS:
            methods = ", ".join(map(repr, accelerator.METHODS))
            raise BadQuery(f"expected device_time to be one of {methods}, got {self.device_time!r}")
        if not isinstance(self.energy, EnergyModel) and self.energy not in ("share", "replay"):
            raise BadQuery(f"expected energy to be 'share', 'replay' or an EnergyModel, got {self.energy!r}")
        check(self.meter)
        if self.depth is not None and to_integer(self.depth, "depth") < 0:
            raise BadQuery(f"expected depth to be 0 or more, got {self.depth}")


def measure(profile: Profile, model: nn.Module, inputs: Inputs, spec: MeasurementSpec) -> Profile:
    """Add measurements to a static profile."""
    return _Measurer(profile, model, inputs, spec).run()


class _Measurer:
    """Measures the calls of a profile: its rows are replaced, and its fields about methods are set."""

    def __init__(self, profile: Profile, model: nn.Module, inputs: Inputs, spec: MeasurementSpec) -> None:
        self._profile = profile
        self._model = model
        self._inputs = inputs
        self._spec = spec
        self._rows = list(profile.calls)
        self._tree = CallTree(profile.calls, spec.depth)
        self._methods: dict[str, Any] = {}
        self._unavailable: dict[str, str] = {}

    def run(self) -> Profile:
        spec, quantities = self._spec, self._spec.measure
        if not spec.needs_runs:
            self._estimate_energy([None] * len(self._tree))
        else:
            with open_passes(self._model, self._inputs, backward=spec.backward) as runs:
                runs.choose_fast_paths(self._tree)
                if "time" in quantities or ("energy" in quantities and spec.energy_needs_time):
                    self._measure_time(runs)
                if "memory" in quantities and runs.backend.has_activity:
                    self._measure_device_memory(runs)
                if "energy" in quantities:
                    self._measure_energy(runs)
                if "load" in quantities:
                    loads, self._methods["sampling"] = sample_load(runs, self._tree, spec.schedule, spec.meter)
                    self._set("load", loads)
                self._methods["environment"] = environment(runs.devices)
            if "memory" in quantities and "memory" not in self._methods:
                self._measure_host_memory()
        return replace(self._profile, calls=tuple(self._rows), unavailable=self._unavailable, **self._methods)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _set(self, name: str, values: Iterable[Any]) -> None:
        """Set a field of the rows of measured calls."""
        for index, value in zip(self._tree.row_indices, values, strict=True):
            self._rows[index] = replace(self._rows[index], **{name: value})

    def _set_amounts(self, name: str, inclusive: Sequence[float | None], own: Sequence[float | None]) -> None:
        """Set a quantity of calls, and of their own part."""
        self._set(name, inclusive)
        owns = [self._rows[index].own for index in self._tree.row_indices]
        self._set("own", [replace(amounts, **{name: value}) for amounts, value in zip(owns, own, strict=True)])  # type: ignore[arg-type]

    def _set_spreads(self, name: str, call_spreads: Sequence[Spread | None]) -> None:
        for index, spread in zip(self._tree.row_indices, call_spreads, strict=True):
            if spread is not None:
                self._rows[index] = replace(self._rows[index], spreads=self._rows[index].spreads | {name: spread})

    def _set_times(self, name: str, times: Tensor, method: str) -> None:
        """Set inclusive times, which have a row for each pass; a call's own excludes the calls inside it."""
        call_spreads = spreads(times, method)
        inclusive = [spread.median for spread in call_spreads]
        self._set_spreads(name, call_spreads)
        self._set_amounts(name, inclusive, self._tree.own(inclusive))

    # -- time ----------------------------------------------------------------------------------------------------------

    def _measure_time(self, runs: Passes) -> None:
        tree, schedule = self._tree, self._spec.schedule
        times, overhead = timing.time_forward(runs, tree, schedule)
        self._set_times("time_s", times.inclusive, timing.METHOD)
        self._set("elapsed_s", times.elapsed.quantile(0.5, dim=0).tolist())
        if runs.backward:
            own, overhead = timing.time_backward(runs, tree, schedule, overhead)
            self._set_times("backward_s", tree.inclusive(own), timing.BACKWARD_METHOD)
        if runs.backend.has_activity:
            overhead = self._measure_device_time(runs, overhead)
        elif runs.devices:
            self._unavailable["device time"] = f"not measured on {runs.backend.type} devices"
        self._methods["timing"] = overhead

    def _measure_device_time(self, runs: Passes, overhead: Timing) -> Timing:
        tree, method = self._tree, accelerator.METHODS[self._spec.device_time]
        measure_times = accelerator.kernel_times if self._spec.device_time == "kernels" else accelerator.graph_times
        times = measure_times(runs, tree, self._spec.schedule)
        self._set_times("device_s", tree.inclusive(times.forward), method)
        self._set("elapsed_device_s", times.elapsed.quantile(0.5, dim=0).tolist())
        bare = spreads(times.bare, f"{method}, of bare passes")[0]
        backward = None
        if times.backward is not None and times.bare_backward is not None:
            self._set_times("backward_device_s", tree.inclusive(times.backward), method)
            backward = spreads(times.bare_backward, f"{method}, of bare passes")[0]
        ratio = median(times.forward.sum(1).tolist()) / bare.median
        return replace(overhead, device=bare, device_backward=backward, device_ratio=ratio)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _measure_device_memory(self, runs: Passes) -> None:
        with self._watch_rss("allocations of the device's allocator, including those of weights and inputs"):
            peaks = accelerator.peak_bytes(runs, self._tree)
        resident = runs.resident_bytes()
        self._set("measured_peak_bytes", [resident + peak for peak in peaks])

    def _measure_host_memory(self) -> None:
        """Measure the tensors that are alive during a real run, where there are no statistics of an allocator."""
        backward = self._spec.backward
        with self._watch_rss("tensors alive during a real run"):
            trace, costs = record(self._model, self._inputs, backward=backward, fake=False)
            convention = find_convention(self._profile.convention)
            rows = ProfileBuilder(trace, costs, self._model, convention, backward=backward).rows()
        check_calls([row.address for row in rows], [row.address for row in self._rows])
        self._set("measured_peak_bytes", [rows[index].peak_bytes for index in self._tree.row_indices])

    @contextmanager
    def _watch_rss(self, method: str) -> Iterator[None]:
        before = psutil.Process().memory_info().rss
        with LoadSampler() as sampler:
            yield
        self._methods["memory"] = MemoryUse(method, before, sampler.rss_peak_bytes)

    # -- energy --------------------------------------------------------------------------------------------------------

    def _measure_energy(self, runs: Passes) -> None:
        spec = self._spec
        own_s = [_own_seconds(self._rows[index]) for index in self._tree.row_indices]
        if isinstance(spec.energy, EnergyModel):
            self._estimate_energy(own_s)
            return
        measure_energies = energy.share if spec.energy == "share" else energy.replay
        try:
            meter = pick(spec.meter, runs.devices)
            try:
                seconds = [time or 0.0 for time in own_s]
                self._set_energies(measure_energies(runs, self._tree, meter, spec.schedule, seconds))
            finally:
                if meter is not spec.meter:
                    meter.close()
        except SensorFailed as error:
            self._unavailable["energy"] = str(error)

    def _estimate_energy(self, own_s: Sequence[float | None]) -> None:
        assert isinstance(self._spec.energy, EnergyModel)
        self._set_energies(energy.estimate(self._tree, self._spec.energy, own_s, backward=self._spec.backward))

    def _set_energies(self, energies: Energies) -> None:
        self._methods["energy"] = energies.use
        self._set_amounts("energy_j", self._tree.known_sums(energies.own), energies.own)
        self._set_amounts("net_energy_j", self._tree.known_sums(energies.net), energies.net)
        self._set_spreads("energy_j", energies.spreads)


def _own_seconds(row: Row) -> float | None:
    """Return the own time of a call on the device if measured, else on the host."""
    own = row.own
    times = (own.time_s, own.backward_s) if own.device_s is None else (own.device_s, own.backward_device_s)
    return None if own.time_s is None else sum(time for time in times if time is not None)
