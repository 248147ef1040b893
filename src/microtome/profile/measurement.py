"""The measured half of a profile: runs of their own, each as light as what it measures allows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import psutil
from torch import Tensor, nn

from microtome.devices.environment import environment
from microtome.devices.load import LoadSampler
from microtome.devices.meters import Meter, check, pick
from microtome.devices.statistics import spreads
from microtome.errors import BadQuery, SensorFailed
from microtome.inputs import Inputs
from microtome.profile import cuda, energy, timing
from microtome.profile.call_tree import CallTree
from microtome.profile.energy import Energies, EnergyModel
from microtome.profile.load import sample_load
from microtome.profile.repeats import Passes, Schedule, check_calls, passes, whole_number
from microtome.results.methods import EnergyUse, MemoryUse, Sampling, Timing
from microtome.results.rows import Row
from microtome.results.spread import Spread

QUANTITIES = ("time", "memory", "energy", "load")


@dataclass(frozen=True)
class MeasurementSpec:
    """What is to be measured, and how.

    Attributes:
        measure: Which quantities.
        schedule: How many passes.
        depth: How deep in the tree of calls to look.
        device_time: How the times of a GPU are taken.
        energy: How energies are: `"share"`, `"replay"`, or what an estimate is made with.
        meter: What is read for them.
    """

    measure: frozenset[str]
    schedule: Schedule
    depth: int | None = None
    device_time: cuda.Way = "kernels"
    energy: str | EnergyModel = "share"
    meter: Meter | str | None = None

    @property
    def energy_needs_time(self) -> bool:
        return not isinstance(self.energy, EnergyModel) or bool(self.energy.watts)

    def __post_init__(self) -> None:
        for name in self.measure - set(QUANTITIES):
            raise BadQuery(f"{name!r} cannot be measured: write {', '.join(map(repr, QUANTITIES))}")
        if self.device_time not in cuda.METHODS:
            raise BadQuery(f"device_time is one of {', '.join(map(repr, cuda.METHODS))}, got {self.device_time!r}")
        if not isinstance(self.energy, EnergyModel) and self.energy not in ("share", "replay"):
            raise BadQuery(f"energy is 'share', 'replay' or an EnergyModel, got {self.energy!r}")
        check(self.meter)
        if self.depth is not None and whole_number(self.depth, "depth") < 0:
            raise BadQuery(f"depth is a number from 0 on, got {self.depth}")


def wished(measure: Collection[str]) -> frozenset[str]:
    """The quantities, from what a user gave."""
    try:
        return frozenset((measure,) if isinstance(measure, str) else measure)
    except TypeError as error:
        raise BadQuery(f"measure is one or several of {', '.join(map(repr, QUANTITIES))}, got {measure!r}") from error


@dataclass
class Measurements:
    """What was found: of each call, and how."""

    rows: list[Row]
    environment: dict[str, str] = field(default_factory=dict)
    timing: Timing | None = None
    energy: EnergyUse | None = None
    memory: MemoryUse | None = None
    sampling: Sampling | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    def how(self) -> dict[str, Any]:
        """All but the rows."""
        return {name: value for name, value in vars(self).items() if name != "rows"}


def measure(
    rows: Sequence[Row], model: nn.Module, inputs: Inputs, wish: MeasurementSpec, *, backward: bool
) -> Measurements:
    """The rows with what was measured of them."""
    tree = CallTree(rows, wish.depth)
    found = Measurements(list(rows))
    if wish.measure == {"energy"} and isinstance(wish.energy, EnergyModel) and not wish.energy.watts:
        estimated = energy.estimate(tree, wish.energy, [None] * len(tree), backward=backward)
        _put_energies(found, tree, estimated)
        return found
    with passes(model, inputs, backward=backward) as runs:
        runs.look(tree)
        if "time" in wish.measure or ("energy" in wish.measure and wish.energy_needs_time):
            _time(found, runs, tree, wish)
        if "memory" in wish.measure and runs.devices:
            _device_memory(found, runs, tree)
        if "energy" in wish.measure:
            _energy(found, runs, tree, wish)
        if "load" in wish.measure:
            loads, found.sampling = sample_load(runs, tree, wish.schedule, wish.meter)
            for at, load in zip(tree.at, loads, strict=True):
                found.rows[at] = replace(found.rows[at], load=load)
        found.environment = environment(runs.devices)
    return found


# -- time --------------------------------------------------------------------------------------------------------------


def _time(found: Measurements, runs: Passes, tree: CallTree, wish: MeasurementSpec) -> None:
    schedule = wish.schedule
    times, how = timing.time_forward(runs, tree, schedule)
    _put(found, tree, "time_s", spreads(times.calls, timing.METHOD))
    _put_until(found, tree, "until_s", times.until)
    if runs.backward:
        own, how = timing.time_backward(runs, tree, schedule, how)
        _put(found, tree, "backward_s", spreads(tree.inclusive(own), timing.BACKWARD_METHOD))
    if runs.devices:
        how = _device_time(found, runs, tree, wish, how)
    found.timing = how


def _device_time(found: Measurements, runs: Passes, tree: CallTree, wish: MeasurementSpec, how: Timing) -> Timing:
    take = cuda.kernel_times if wish.device_time == "kernels" else cuda.graph_times
    times = take(runs, tree, wish.schedule)
    method = cuda.METHODS[wish.device_time]
    _put(found, tree, "device_s", spreads(tree.inclusive(times.forward), method))
    _put_until(found, tree, "until_device_s", times.until)
    bare = spreads(times.bare, f"{method}, of bare passes")[0]
    backward = None
    if times.backward is not None and times.bare_backward is not None:
        _put(found, tree, "backward_device_s", spreads(tree.inclusive(times.backward), method))
        backward = spreads(times.bare_backward, f"{method}, of bare passes")[0]
    ratio = median(times.forward.sum(1).tolist()) / bare.median
    return replace(how, device=bare, device_backward=backward, device_ratio=ratio)


def _put(found: Measurements, tree: CallTree, name: str, of_calls: Sequence[Spread]) -> None:
    """Write a quantity into the rows. What a call takes itself is what is left of it without the calls inside."""
    own = tree.own([spread.median for spread in of_calls])
    for at, spread, alone in zip(tree.at, of_calls, own, strict=True):
        row = found.rows[at]
        row = replace(row, spreads=row.spreads | {name: spread})
        found.rows[at] = _with(row, name, spread.median, alone)


def _put_until(found: Measurements, tree: CallTree, name: str, until: Tensor) -> None:
    """Write into the rows how far the run was when each call ended, which does not add up."""
    for at, seconds in zip(tree.at, until.quantile(0.5, dim=0).tolist(), strict=True):
        change: dict[str, Any] = {name: seconds}
        found.rows[at] = replace(found.rows[at], **change)


def _with(row: Row, name: str, whole: float | None, own: float | None) -> Row:
    amount: dict[str, Any] = {name: whole}
    own_amount: dict[str, Any] = {name: own}
    return replace(row, own=replace(row.own, **own_amount), **amount)


# -- memory ------------------------------------------------------------------------------------------------------------


def _device_memory(found: Measurements, runs: Passes, tree: CallTree) -> None:
    before = psutil.Process().memory_info().rss
    with LoadSampler() as sampler:
        peaks = cuda.peak_bytes(runs, tree)
    there = runs.resident_bytes()
    for at, peak in zip(tree.at, peaks, strict=True):
        found.rows[at] = replace(found.rows[at], measured_peak_bytes=there + peak)
    method = "the moves of the CUDA allocator, and what weights and inputs take of it"
    found.memory = MemoryUse(method, before, sampler.rss_peak_bytes)


def host_memory(found: Measurements, wish: MeasurementSpec, real_rows: Callable[[], Sequence[Row]]) -> None:
    """On a CPU: the tensors that live at each moment of a real run.

    Args:
        real_rows: Makes the same rows of a real run.
    """
    before = psutil.Process().memory_info().rss
    with LoadSampler() as sampler:
        rows = real_rows()
    check_calls([row.address for row in rows], [row.address for row in found.rows])
    for at in CallTree(found.rows, wish.depth).at:
        found.rows[at] = replace(found.rows[at], measured_peak_bytes=rows[at].peak_bytes)
    found.memory = MemoryUse("the tensors that live at each moment of a real run", before, sampler.rss_peak_bytes)


# -- energy ------------------------------------------------------------------------------------------------------------


def _energy(found: Measurements, runs: Passes, tree: CallTree, wish: MeasurementSpec) -> None:
    rows = [found.rows[at] for at in tree.at]
    own_s = [_seconds(row) for row in rows]
    if isinstance(wish.energy, EnergyModel):
        _put_energies(found, tree, energy.estimate(tree, wish.energy, own_s, backward=runs.backward))
        return
    method = energy.share if wish.energy == "share" else energy.replay
    try:
        meter = pick(wish.meter, runs.devices)
        try:
            seconds = [time or 0.0 for time in own_s]
            _put_energies(found, tree, method(runs, tree, meter, wish.schedule, seconds))
        finally:
            if meter is not wish.meter:
                meter.close()
    except SensorFailed as error:
        found.unavailable["energy"] = str(error)


def _seconds(row: Row) -> float | None:
    """What a call itself takes of whatever does the work."""
    own = row.own
    times = (own.time_s, own.backward_s) if own.device_s is None else (own.device_s, own.backward_device_s)
    return None if row.own.time_s is None else sum(time for time in times if time is not None)


def _put_energies(found: Measurements, tree: CallTree, energies: Energies) -> None:
    found.energy = energies.use
    columns = {"energy_j": energies.own, "net_energy_j": energies.net}
    for name, own in columns.items():
        sums = tree.known_sums(own)
        for at, alone, whole in zip(tree.at, own, sums, strict=True):
            found.rows[at] = _with(found.rows[at], name, whole, alone)
    for at, spread in zip(tree.at, energies.spreads, strict=True):
        if spread is not None:
            row = found.rows[at]
            found.rows[at] = replace(row, spreads=row.spreads | {"energy_j": spread})
