"""The interface of device backends, and finding the backend of a device.

No other package names a backend. To support another one, add a file like `cuda.py` and its class to `BACKENDS`; other
devices get an `Accelerator`, which relies on `torch.accelerator` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from microtome.errors import SensorFailed, Unsupported

if TYPE_CHECKING:
    from microtome.devices.activity import Activity


class Driver(ABC):
    """The interface of a device's driver. Its methods raise `SensorFailed` if the driver does not answer."""

    @abstractmethod
    def utilization(self) -> tuple[float, float]:
        """Return the fraction of time in which kernels ran, in the driver's last period, and of memory in use."""

    @abstractmethod
    def watts(self) -> float:
        """Return the power draw."""

    @abstractmethod
    def state(self) -> dict[str, str]:
        """Describe the driver, and the current clocks and throttling, as far as the driver exposes them."""

    @abstractmethod
    def close(self) -> None:
        """Release the driver."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Backend:
    """A type of device. The defaults are those of a CPU, which is synchronous and has no driver to ask.

    Attributes:
        type: The `torch.device.type`.
        has_streams: Whether copies to host memory can run on a separate stream.
        has_activity: Whether `watch_activity` reports kernels and allocations.
        has_timestamps: Whether `timestamp` measures the device's own time.
        widest_float: The floating-point type of the most bits.
    """

    type = "cpu"
    has_streams = False
    has_activity = False
    has_timestamps = True
    widest_float = torch.float64

    def name(self, device: torch.device) -> str:
        return str(device)

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work submitted to the device."""

    def is_capturing(self) -> bool:
        """Return whether the current stream captures a graph, so that tensors have no values."""
        return False

    def default_generator(self, device: torch.device) -> torch.Generator | None:
        """Return the generator of random operators; None if torch does not expose it."""
        return torch.default_generator

    def timestamp(self, device: torch.device) -> Any:
        """Return the time at which the device reaches this point, for `elapsed_s`."""
        return perf_counter_ns()

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two timestamps of a synchronized device."""
        return (end - begin) / 1e9

    def event(self) -> Any:
        """Create an event to record in a graph."""
        raise self._unsupported("events")

    def capture_graph(self, device: torch.device, run: Callable[[], object]) -> Any:
        """Capture the work of a function in a graph, which can be replayed."""
        raise self._unsupported("graphs")

    def watch_activity(self, *, memory: bool = False) -> AbstractContextManager[Activity]:
        """Collect kernels, and allocations if `memory`, until the block ends."""
        raise self._unsupported("kernel durations")

    def allocated_bytes(self, nbytes: int) -> int:
        """Return the bytes that the allocator takes for a storage of that size."""
        return nbytes

    def driver(self, device: torch.device) -> Driver:
        """Open the driver of the device.

        Raises:
            SensorFailed: It is not supported, or cannot be opened.
        """
        raise SensorFailed(f"the driver of {self.type} devices is not supported")

    def uuid(self, device: torch.device) -> str | None:
        """Return the identifier of the device in its driver, if it has one."""
        return None

    def environment(self, devices: Sequence[torch.device]) -> dict[str, str]:
        """Describe the devices, and the state of the first as of now.

        Notes under profiles show `gpu`, the names; `gpu_runtime`, such as `"CUDA 12.8"`; `driver`; `gpu_clock`; and
        `gpu_throttling`.
        """
        return {}

    def _unsupported(self, feature: str) -> Unsupported:
        return Unsupported(f"{feature} are not supported on {self.type} devices")


class Accelerator(Backend):
    """A device without a backend of its own, such as MPS: host time and live tensors are measured."""

    has_timestamps = False

    def __init__(self, device_type: str) -> None:
        self.type = device_type
        self.widest_float = torch.float32 if device_type == "mps" else torch.float64

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def default_generator(self, device: torch.device) -> torch.Generator | None:
        generators = getattr(torch.get_device_module(device), "default_generators", ())
        index = device.index or 0
        return generators[index] if index < len(generators) else None


def _cuda() -> Backend:
    from microtome.devices.cuda import Cuda  # imports this module

    return Cuda()


#: Creates the backend of a type of device; other types get an `Accelerator`.
BACKENDS: dict[str, Callable[[], Backend]] = {"cpu": Backend, "meta": Backend, "cuda": _cuda}


def backend_of(device: torch.device | str) -> Backend:
    return _backend(device.partition(":")[0] if isinstance(device, str) else device.type)


@cache
def _backend(device_type: str) -> Backend:
    return BACKENDS.get(device_type, partial(Accelerator, device_type))()


def accelerators_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the devices of tensors other than the CPU, in order."""
    return sorted({tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}, key=str)


def default_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Return the default generators of the CPU and of these devices, each once."""
    generators = (backend_of(device).default_generator(device) for device in sorted(set(devices), key=str))
    return list(dict.fromkeys(filter(None, (torch.default_generator, *generators))))


def available_accelerators() -> list[torch.device]:
    """Return the accelerator devices of this machine."""
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return []
    return [torch.device(current.type, index) for index in range(torch.accelerator.device_count())]
