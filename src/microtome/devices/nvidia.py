"""What NVIDIA's driver says of a GPU: its clocks, what holds them back, how busy it is."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Self

import torch

from microtome.errors import SensorFailed, said

#: What is said of a GPU whose clocks are held back, by the name that NVML gives each reason.
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
    """One GPU of torch's, in NVML.

    Raises:
        SensorFailed: It cannot be asked.
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
            raise SensorFailed(f"GPU {index} cannot be asked: {said(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._nvml.nvmlShutdown()

    def ask(self, question: str, *details: Any) -> Any:
        try:
            return getattr(self._nvml, question)(self._handle, *details)
        except (self._nvml.NVMLError, AttributeError) as error:
            raise SensorFailed(f"the GPU did not answer {question}: {said(error)}") from error

    def utilisation(self) -> tuple[float, float]:
        """The part of the time in which kernels ran, as of the driver's last period; the part of memory in use."""
        memory = self.ask("nvmlDeviceGetMemoryInfo")
        return self.ask("nvmlDeviceGetUtilizationRates").gpu / 100, memory.used / memory.total

    def watts(self) -> float:
        return float(self.ask("nvmlDeviceGetPowerUsage")) / 1000

    def state(self) -> dict[str, str]:
        """Its clocks now, what holds them back, and the driver, in words; without what it does not tell."""
        questions = {
            "driver": lambda: self._nvml.nvmlSystemGetDriverVersion(),
            "gpu_clock": lambda: f"{self._clock('NVML_CLOCK_SM')} MHz",
            "gpu_memory_clock": lambda: f"{self._clock('NVML_CLOCK_MEM')} MHz",
            "gpu_temperature": lambda: f"{self.ask('nvmlDeviceGetTemperature', 0)} C",
            "gpu_power_limit": lambda: f"{self.ask('nvmlDeviceGetEnforcedPowerLimit') / 1000:g} W",
            "gpu_throttling": self.throttling,
        }
        found: dict[str, str] = {}
        for name, question in questions.items():
            try:
                found[name] = question()
            except (SensorFailed, self._nvml.NVMLError):
                continue
        return found

    def throttling(self) -> str:
        """What holds its clocks back now, or `none`."""
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        reasons = (
            text for name, text in _REASONS.items() if bits & getattr(self._nvml, f"nvmlClocksEventReason{name}")
        )
        return ", ".join(reasons) or "none"

    def _clock(self, kind: str) -> str:
        which = getattr(self._nvml, kind)
        return f"{self.ask('nvmlDeviceGetClockInfo', which)} of {self.ask('nvmlDeviceGetMaxClockInfo', which)}"
