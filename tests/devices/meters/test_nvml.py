"""Meters of GPUs, with a fake NVML."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from microtome.devices.meters import (
    nvml,
)
from microtome.errors import SensorFailed
from tests.devices.fake_nvml import FakeNvml, NVMLError, answer
from tests.devices.meters.machines import (
    absent,
    only,
)

ENERGY, POWER = "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"


def test_a_gpu_counts_since_it_was_opened_and_shuts_nvml_down(gpu: FakeNvml) -> None:
    with only(nvml.find()) as source:
        assert gpu.opened == 1
        assert source.what == "GPU 0 NVIDIA H200"
        assert source.kind == "counter"
        assert source.every_s is None
        gpu.answers[ENERGY] = 7500
        assert source.read().joules == pytest.approx(2.5)
    source.close()
    assert gpu.opened == 0
    with pytest.raises(SensorFailed, match="GPU 0 NVIDIA H200 has been closed"):
        source.read()


def test_a_gpu_without_a_counter_gives_power(gpu: FakeNvml) -> None:
    gpu.answers[ENERGY] = NVMLError("Not Supported")
    source = only(nvml.find())
    assert source.kind == "power"
    assert source.every_s == 0.05
    assert source.read().watts == pytest.approx(70.5)


def test_a_gpu_counter_that_goes_backwards_stays_failed(gpu: FakeNvml) -> None:
    source = only(nvml.find())
    gpu.answers[ENERGY] = 4000
    with pytest.raises(SensorFailed, match=r"counter of GPU 0 NVIDIA H200 went backwards, from 5000 to 4000 mJ"):
        source.read()
    gpu.answers[ENERGY] = 6000
    with pytest.raises(SensorFailed, match="went backwards"):
        source.read()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (NVMLError("GPU is lost"), "nvmlDeviceGetTotalEnergyConsumption of GPU 0 NVIDIA H200: NVMLError: GPU is lost"),
        (None, "expected a number, got None"),
        (-1, "to be finite and at least 0, got -1"),
    ],
)
def test_a_gpu_that_fails_or_returns_garbage_raises(gpu: FakeNvml, answer: Any, says: str) -> None:
    source = only(nvml.find())
    gpu.answers[ENERGY] = answer
    with pytest.raises(SensorFailed, match=says):
        source.read()


def test_a_gpu_without_a_sensor_is_missing_and_nvml_is_shut_down(gpu: FakeNvml) -> None:
    gpu.answers[ENERGY] = gpu.answers[POWER] = NVMLError("Not Supported")
    missing = absent(nvml.find())
    assert missing.reason == "nvmlDeviceGetPowerUsage of GPU 0 NVIDIA H200: NVMLError: Not Supported"
    assert "nvidia-smi -q -d POWER" in missing.fix
    assert gpu.opened == 0


def test_a_gpu_that_cannot_be_opened_is_missing(gpu: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "nvmlDeviceGetUUID", lambda handle: answer(NVMLError("No Permission")), raising=False)
    assert absent(nvml.find()).reason == "GPU 0: NVMLError: No Permission"
    assert gpu.opened == 0


@pytest.mark.parametrize(
    ("count", "reason"),
    [(0, "NVML sees no GPU"), (NVMLError("Unknown"), "NVML cannot count the GPUs: NVMLError: Unknown")],
)
def test_nvml_without_gpus_reports_the_reason(gpu: FakeNvml, count: Any, reason: str) -> None:
    gpu.count = count
    assert absent(nvml.find()).reason == reason
    assert gpu.opened == 0


def test_nvml_without_a_driver_reports_the_reason(gpu: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "nvmlInit", lambda: answer(NVMLError("Shared Library Not Found")), raising=False)
    missing = absent(nvml.find())
    assert missing.reason == "NVML does not start: NVMLError: Shared Library Not Found"
    assert "nvidia-smi" in missing.fix


def test_nvml_without_pynvml_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing = absent(nvml.find())
    assert missing.reason.startswith("the package nvidia-ml-py is not installed")
    assert "microtome[nvidia]" in missing.fix
