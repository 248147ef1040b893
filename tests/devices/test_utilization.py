"""Sampling the load of the machine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from mmap import mmap
from time import monotonic, sleep

import pytest
import torch

from microtome.devices import utilization
from microtome.devices.utilization import QUANTITIES, LoadSampler, Sample
from microtome.errors import SensorFailed
from tests.devices.fake_nvml import NVMLError, install_fake_nvml


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "EVERY_S", 0.002)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "microtome-load"]


def until(true: Callable[[], bool]) -> None:
    """Waits for the thread; a minute is for ever."""
    end = monotonic() + 60
    while not true():
        assert monotonic() < end, "it never came"
        sleep(0.001)


def sampled(sampler: LoadSampler, more: int = 3) -> list[Sample]:
    with sampler:
        until(lambda: len(sampler.samples) >= more)
    return sampler.samples


def test_samples_follow_each_other_without_a_gap() -> None:
    samples = sampled(LoadSampler(), 5)
    assert all(one.begin_s < one.end_s for one in samples)
    assert all(one.end_s == other.begin_s for one, other in pairwise(samples))


def test_the_cpu_and_the_memory_are_parts_of_one() -> None:
    samples = sampled(LoadSampler())
    assert all(one.cpu is not None and 0 <= one.cpu <= 1 for one in samples)
    assert all(one.memory is not None and 0 < one.memory <= 1 for one in samples)


def test_nothing_is_sampled_outside_of_the_block() -> None:
    sampler = LoadSampler()
    assert sampler.samples == []
    assert threads() == []
    with sampler:
        assert threads() == ["microtome-load"]
        until(lambda: bool(sampler.samples))
    assert threads() == []


def test_the_thread_ends_when_the_block_raises() -> None:
    alive: list[str] = []

    def fail() -> None:
        alive.extend(threads())
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), LoadSampler():
        fail()
    assert alive == ["microtome-load"]
    assert threads() == []


def test_peak_resident_memory_survives_its_release() -> None:
    sampler = LoadSampler()
    before = sampler.rss_peak_bytes
    with sampler:
        with mmap(-1, 64 << 20) as block:  # pages of its own, whatever the process had and gave back
            block.write(b"x" * len(block))
            until(lambda: sampler.rss_peak_bytes > before + (32 << 20))
        seen = len(sampler.samples)
        until(lambda: len(sampler.samples) > seen + 2)
    assert sampler.rss_peak_bytes > before + (32 << 20)


def test_without_gpu_and_sensor_the_reasons_are_reported_and_nothing_is_zero() -> None:
    sampler = LoadSampler()
    samples = sampled(sampler)
    assert {(one.gpu, one.gpu_memory, one.watts) for one in samples} == {(None, None, None)}
    assert sampler.missing == {
        "gpu": "the model does not run on a GPU",
        "gpu_memory": "the model does not run on a GPU",
        "watts": "no sensor; `microtome doctor` says what would help",
    }


def test_watts_are_those_of_the_reader() -> None:
    sampler = LoadSampler(watts=lambda: 12.5)
    assert {one.watts for one in sampled(sampler)} == {12.5}
    assert sampler.missing.keys() == {"gpu", "gpu_memory"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SensorFailed("the counter went backwards"), "SensorFailed: the counter went backwards"),
        (ZeroDivisionError("odd driver\nin two lines"), "ZeroDivisionError: odd driver"),
    ],
)
def test_a_failing_reader_is_reported_and_the_others_continue(error: Exception, reason: str) -> None:
    asked: list[bool] = []

    def watts() -> float:
        asked.append(True)
        if len(asked) > 2:
            raise error
        return 12.5

    sampler = LoadSampler(watts=watts)
    samples = sampled(sampler, 6)
    assert sampler.missing["watts"] == reason
    assert [one.watts for one in samples[:4]] == [12.5, 12.5, None, None]
    assert len(asked) == 3  # not again
    assert all(one.cpu is not None and one.memory is not None for one in samples)


def test_a_gpu_is_sampled_and_its_driver_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install_fake_nvml(monkeypatch)
    sampler = LoadSampler(torch.device("cuda", 0))
    assert nvml.opened == 1
    samples = sampled(sampler)
    assert {(one.gpu, one.gpu_memory, one.watts) for one in samples} == {(0.75, 0.25, 70.5)}
    assert sampler.missing == {}
    assert nvml.opened == 0


def test_the_driver_is_closed_when_the_block_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install_fake_nvml(monkeypatch)
    with pytest.raises(KeyError, match="mine"), LoadSampler(torch.device("cuda", 0)):
        raise KeyError("mine")
    assert nvml.opened == 0


def test_power_is_sampled_after_utilization_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install_fake_nvml(monkeypatch)
    sampler = LoadSampler(torch.device("cuda", 0))
    with sampler:
        until(lambda: bool(sampler.samples))
        nvml.answers["nvmlDeviceGetUtilizationRates"] = NVMLError("GPU is lost")
        until(lambda: "gpu" in sampler.missing)
        seen = len(sampler.samples)
        until(lambda: len(sampler.samples) > seen + 1)
    reason = "SensorFailed: nvmlDeviceGetUtilizationRates of the GPU failed: NVMLError: GPU is lost"
    assert sampler.missing == {"gpu": reason, "gpu_memory": reason}
    assert sampler.samples[0][3:] == (0.75, sampler.samples[0].memory, 0.25, 70.5)
    assert (sampler.samples[-1].gpu, sampler.samples[-1].gpu_memory, sampler.samples[-1].watts) == (None, None, 70.5)


def test_a_gpu_without_a_driver_is_missing_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler = LoadSampler(torch.device("cuda", 0))
    samples = sampled(sampler)
    reason = "NVML is not installed: pip install nvidia-ml-py"
    assert sampler.missing == dict.fromkeys(("gpu", "gpu_memory", "watts"), reason)
    assert all(one.cpu is not None and one.gpu is None for one in samples)


def test_the_quantities_are_the_fields_of_a_sample() -> None:
    assert set(Sample._fields) - {"begin_s", "end_s"} == set(QUANTITIES)
