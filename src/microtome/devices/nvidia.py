"""Read clocks, throttling, utilization and power of a GPU from NVIDIA's driver."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Self

import torch

from microtome.errors import SensorFailed, describe_error

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


class Gpu:
    """A CUDA device of torch in NVML.

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
            uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception as error:
            self.close()
            raise SensorFailed(f"cannot query GPU {index}: {describe_error(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """Return the fraction of time in which kernels ran, in the driver's last period, and of memory in use."""
        memory = self.query("nvmlDeviceGetMemoryInfo")
        return self.query("nvmlDeviceGetUtilizationRates").gpu / 100, memory.used / memory.total

    def watts(self) -> float:
        return float(self.query("nvmlDeviceGetPowerUsage")) / 1000

    def state(self) -> dict[str, str]:
        """Describe the driver, and the current clocks and throttling, as far as the driver exposes them."""
        queries = {
            "driver": lambda: self._nvml.nvmlSystemGetDriverVersion(),
            "gpu_clock": lambda: f"{self._clock('NVML_CLOCK_SM')} MHz",
            "gpu_memory_clock": lambda: f"{self._clock('NVML_CLOCK_MEM')} MHz",
            "gpu_temperature": lambda: f"{self.query('nvmlDeviceGetTemperature', 0)} C",
            "gpu_power_limit": lambda: f"{self.query('nvmlDeviceGetEnforcedPowerLimit') / 1000:g} W",
            "gpu_throttling": self.throttling,
        }
        found: dict[str, str] = {}
        for name, query in queries.items():
            try:
                found[name] = query()
            except (SensorFailed, self._nvml.NVMLError):
                continue
        return found

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
