"""Times and outputs of layers, measured in the run itself, and the records that report them under tracr's names."""

from __future__ import annotations

from collections import Counter
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.devices.base import Backend, backend_of
from microtome.engine import Call, Probe, Stopped
from microtome.engine.pytree import tensors_in
from microtome.inputs import device_of
from microtome.results.profile import Profile
from microtome.results.rows import Row

_NAMES = frozenset(
    {
        *("inference_time", "output_bytes", "output_shape", "output_dtype"),
        *("processing_energy", "communication_energy", "total_energy", "power_reading", "host_battery_energy_mwh"),
        *("gpu_utilization", "memory_utilization", "cpu_utilization"),
    }
)


class LayerRecord(dict[str, Any]):
    """The record of one layer in one run, which has only what was measured.

    For a name of tracr's that was not measured, `record[name]` is None and `record.get(name, 0)` is the default, so
    that code which compares `record.get("power_reading", 0) > 0` works.

    >>> record = LayerRecord(layer_id=0, output_bytes=64)
    >>> record["output_bytes"], record["power_reading"], record.get("power_reading", 0)
    (64, None, 0)
    """

    def __missing__(self, name: str) -> None:
        if name not in _NAMES:
            raise KeyError(name)


class MetricsCollector:
    """The records of a wrapped model's last run, where tracr's code expects them; it measures nothing itself.

    Attributes:
        energy_monitor: None: the energy of one layer in one run cannot be measured.
        current_split_point: The layer passed to `set_split_point` last.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.energy_monitor = None
        self.current_split_point: int | None = None

    @property
    def layer_metrics(self) -> dict[int, LayerRecord]:
        return self.get_all_layer_metrics()

    def get_all_layer_metrics(self) -> dict[int, LayerRecord]:
        metrics: dict[int, LayerRecord] = self._wrapped.get_layer_metrics()
        return metrics

    def set_split_point(self, split_point: int) -> None:
        self.current_split_point = split_point


class LayerRun(NamedTuple):
    """One call of a layer.

    Attributes:
        begin: A timestamp of the backend.
        output: Properties of its output, under tracr's names.
        backend: The backend that measured the time; None if the layer computed on another device.
    """

    begin: Any
    end: Any
    output: dict[str, Any]
    backend: Backend | None

    @property
    def seconds(self) -> float | None:
        return None if self.backend is None else self.backend.elapsed_s(self.begin, self.end)


class LayerObserver(Probe):
    """Records the times and outputs of calls in this thread."""

    def __init__(self, model: nn.Module) -> None:
        self._device = torch.device(device_of(model))
        self._backend = backend_of(self._device)
        self._thread = get_ident()
        self._begins: dict[Call, Any] = {}
        self._runs: dict[str, list[LayerRun | None]] = {}

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.phase == "forward" and get_ident() == self._thread:
            self._begins[call] = self._backend.timestamp(self._device)

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call in self._begins:
            end = self._backend.timestamp(self._device)
            tensors = list(tensors_in(output))
            is_timed = self._backend.has_timestamps and all(tensor.device == self._device for tensor in tensors)
            backend = self._backend if is_timed else None
            run = LayerRun(self._begins.pop(call), end, _describe_output(output, tensors), backend)
            self._runs.setdefault(call.path, []).append(run)

    def fail(self, call: Call, error: BaseException) -> None:
        if isinstance(error, Stopped) and error.call.module is call.module:  # the run stops after this layer
            self.exit(call, (), {}, error.output)
        elif self._begins.pop(call, None) is not None:
            self._runs.setdefault(call.path, []).append(None)

    def by_address(self, profile: Profile, resumed_after: str | None) -> dict[str, LayerRun]:
        """Return the runs of layers by their addresses in a run of the whole model.

        Args:
            profile: The profile of the whole model.
            resumed_after: The address of the call after which the run resumed. The outermost calls before it were
                observed and skipped, and those inside them were not observed.
        """
        self._backend.synchronize(self._device)
        addresses: dict[str, list[str]] = {}
        for row in profile:
            addresses.setdefault(row.path, []).append(row.address)
        before, observed = ((), ()) if resumed_after is None else _calls_before(profile, resumed_after)
        first_call, first_run = (Counter(row.path for row in rows) for rows in (before, observed))
        found: dict[str, LayerRun] = {}
        for path, runs in self._runs.items():
            pairs = zip(addresses.get(path, ())[first_call[path] :], runs[first_run[path] :], strict=False)
            found |= {address: run for address, run in pairs if run is not None}
        return found


def _describe_output(output: Any, tensors: list[Tensor]) -> dict[str, Any]:
    properties: dict[str, Any] = {"output_bytes": sum(tensor.nbytes for tensor in tensors)}
    if isinstance(output, Tensor):
        properties |= {"output_shape": list(output.shape), "output_dtype": str(output.dtype)}
    return properties


def _calls_before(profile: Profile, address: str) -> tuple[list[Row], list[Row]]:
    """Return the calls that end with or before a call, and the outermost of them."""
    rows, last = list(profile), profile[address]
    containing: set[str | None] = set()
    row = last
    while row.parent is not None:
        containing.add(row.parent)
        row = profile[row.parent]
    after = rows.index(last) + 1
    while after < len(rows) and rows[after].depth > last.depth:  # inside the last call
        after += 1
    before = [row for row in rows[:after] if row.address not in containing]
    return before, [row for row in before if row.parent in containing]
