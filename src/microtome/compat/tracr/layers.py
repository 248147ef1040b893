"""The calls of a model that are its layers, and the records of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    """A record of one layer in one run, which holds only what was measured.

    Under a name of tracr's that was not measured, `record[name]` is None and `record.get(name, 0)` the default: code
    that compares `record.get("power_reading", 0) > 0` meets a number.

    >>> record = LayerRecord(layer_id=0, output_bytes=64)
    >>> record["output_bytes"], record["power_reading"], record.get("power_reading", 0)
    (64, None, 0)
    """

    def __missing__(self, name: str) -> None:
        if name not in _NAMES:
            raise KeyError(name)


class MetricsCollector:
    """The records of a wrapped model's last run, where tracr's code looks for them; it measures nothing itself.

    Attributes:
        energy_monitor: None: the energy of one layer in one run cannot be read.
        current_split_point: The layer that was set last.
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


def layers_in(profile: Profile, row: Row, depth: int) -> Iterator[Row]:
    """The calls inside a call that are layers: those that deep, and those above with no calls inside."""
    for child in profile.children(row):
        if child.height == 1 or child.path.count(".") + 1 >= depth:
            yield child
        else:
            yield from layers_in(profile, child, depth)
