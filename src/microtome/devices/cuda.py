"""CUDA devices: events, graphs, kernel activity, the caching allocator, and NVIDIA's driver through NVML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from typing import Any

import torch

from microtome.devices.activity import Activity, watch
from microtome.devices.base import Backend, Driver
from microtome.errors import SensorFailed, Unsupported, describe_error

#: The caching allocator allocates whole blocks of this many bytes.
_BLOCK_BYTES = 512


class Cuda(Backend):
    type = "cuda"
    has_streams = True
    has_activity = True

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def default_generator(self, device: torch.device) -> torch.Generator | None:
        return torch.cuda.default_generators[device.index or 0]

    def timestamp(self, device: torch.device) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True, external=True)

    def capture_graph(self, device: torch.device, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except Exception as error:
            # After a failed capture torch's generators stay in capture mode until a capture succeeds.
            torch.cuda.synchronize(device)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device=device)
            raise Unsupported(f"the model cannot be captured in a CUDA graph: {describe_error(error)}") from error
        return graph

    def watch_activity(self, *, memory: bool = False) -> AbstractContextManager[Activity]:
        return watch(self.type, launch_prefix="cu", memory=memory)

    def allocated_bytes(self, nbytes: int) -> int:
        return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES

    def driver(self, device: torch.device) -> NvidiaDriver:
        return NvidiaDriver(device.index or 0)

    def uuid(self, device: torch.device) -> str | None:
        return _uuid(device.index or 0)

    def environment(self, devices: Sequence[torch.device]) -> dict[str, str]:
        names = {"gpu": ", ".join(map(self.name, devices)), "gpu_runtime": f"CUDA {torch.version.cuda}"}
        try:
            with self.driver(devices[0]) as driver:
                return names | driver.state()
        except SensorFailed as error:
            return names | {"gpu_state": f"unknown: {error}"}


#: Descriptions of NVML's throttling reasons.
_REASONS = {
    "SwPowerCap": "power limit",
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "too hot (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
    "SwThermalSlowdown": "too hot",
    "ApplicationsClocksSetting": "application clocks",
    "SyncBoost": "sync boost",
}


class NvidiaDriver(Driver):
    """NVML's interface to a CUDA device of torch.

    Raises:
        SensorFailed: NVML is not available.
    """

    def __init__(self, index: int) -> None:
        try:
            self._nvml: Any = import_module("pynvml")
        except ImportError as error:
            raise SensorFailed("NVML is not installed: pip install nvidia-ml-py") from error
        self._open = False
        try:
            self._nvml.nvmlInit()
            self._open = True
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(_uuid(index))
        except Exception as error:
            self.close()
            raise SensorFailed(f"cannot query GPU {index}: {describe_error(error)}") from error

    def close(self) -> None:
        if self._open:
            self._open = False
            self._nvml.nvmlShutdown()

    def query(self, function: str, *args: Any) -> Any:
        try:
            return getattr(self._nvml, function)(self._handle, *args)
        except (self._nvml.NVMLError, AttributeError) as error:
            raise SensorFailed(f"{function} of the GPU failed: {describe_error(error)}") from error

    def utilization(self) -> tuple[float, float]:
        memory = self.query("nvmlDeviceGetMemoryInfo")
        return self.query("nvmlDeviceGetUtilizationRates").gpu / 100, memory.used / memory.total

    def watts(self) -> float:
        return float(self.query("nvmlDeviceGetPowerUsage")) / 1000

    def state(self) -> dict[str, str]:
        queries = {
            "driver": lambda: self._nvml.nvmlSystemGetDriverVersion(),
            "gpu_clock": lambda: f"{self._clock('NVML_CLOCK_SM')} MHz",
            "gpu_memory_clock": lambda: f"{self._clock('NVML_CLOCK_MEM')} MHz",
            "gpu_temperature": lambda: f"{self.query('nvmlDeviceGetTemperature', 0)} C",
            "gpu_power_limit": lambda: f"{self.query('nvmlDeviceGetEnforcedPowerLimit') / 1000:g} W",
            "gpu_throttling": self.throttling,
        }
        state: dict[str, str] = {}
        for name, query in queries.items():
            with suppress(SensorFailed, self._nvml.NVMLError):
                state[name] = query()
        return state

    def throttling(self) -> str:
        """Return the reasons for reduced clocks, or `none`."""
        bits = self.query("nvmlDeviceGetCurrentClocksEventReasons")
        reasons = (
            text for name, text in _REASONS.items() if bits & getattr(self._nvml, f"nvmlClocksEventReason{name}")
        )
        return ", ".join(reasons) or "none"

    def _clock(self, kind: str) -> str:
        which = getattr(self._nvml, kind)
        return f"{self.query('nvmlDeviceGetClockInfo', which)} of {self.query('nvmlDeviceGetMaxClockInfo', which)}"


def _uuid(index: int) -> str:
    """Return the identifier in NVML of a CUDA device of torch, which may be numbered otherwise there."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
