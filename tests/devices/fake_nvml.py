"""A fake pynvml, for machines without NVIDIA GPUs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

REASONS = {
    "nvmlClocksEventReasonGpuIdle": 1,
    "nvmlClocksEventReasonApplicationsClocksSetting": 2,
    "nvmlClocksEventReasonSwPowerCap": 4,
    "nvmlClocksEventReasonHwSlowdown": 8,
    "nvmlClocksEventReasonSyncBoost": 16,
    "nvmlClocksEventReasonSwThermalSlowdown": 32,
    "nvmlClocksEventReasonHwThermalSlowdown": 64,
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": 128,
}


class NVMLError(Exception):
    pass


class FakeNvml:
    """Put in the place of pynvml: GPUs whose answers are set by the name of the question.

    Attributes:
        answers: What a GPU says; an exception is raised, and a question that is not here is one that this pynvml has no
            function for.
        opened: How many hold it open.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self, gpus: int = 1) -> None:
        self.opened = 0
        self.uuids = [f"GPU-{index:04d}" for index in range(gpus)]
        self.count: Any = gpus
        self.answers: dict[str, Any] = {
            "nvmlDeviceGetName": b"NVIDIA H200",
            "nvmlDeviceGetTotalEnergyConsumption": 5000,
            "nvmlDeviceGetPowerUsage": 70_500,
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetClockInfo": {1: 1755, 2: 3201},
            "nvmlDeviceGetMaxClockInfo": {1: 1980, 2: 3202},
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75, memory=10),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=30, total=120),
        }
        self.driver: Any = "570.86"

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        number: int = answer(self.count)
        return number

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return self.uuids[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.uuids:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlSystemGetDriverVersion(self) -> Any:  # noqa: N802
        return answer(self.driver)

    def __getattr__(self, question: str) -> Any:
        if question in REASONS:
            return REASONS[question]
        answers = self.__dict__.get("answers", {})
        if question not in answers:
            raise AttributeError(f"no {question}")
        return lambda handle, *details: answer(answers[question], *details)


def answer(value: Any, *details: Any) -> Any:
    """Return a value, or raise it."""
    if isinstance(value, Exception):
        raise value
    return value[details[0]] if isinstance(value, dict) else value


def install_fake_nvml(monkeypatch: pytest.MonkeyPatch, gpus: int = 1) -> FakeNvml:
    """A machine with so many GPUs, in NVML and in torch."""
    nvml = FakeNvml(gpus)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"{index:04d}"))
    return nvml
