"""NVIDIA's driver, with a fake NVML."""

from __future__ import annotations

import sys

import pytest

from microtome.devices.cuda import NvidiaDriver
from microtome.errors import SensorFailed
from tests.devices.fake_nvml import FakeNvml, NVMLError, install_fake_nvml


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return install_fake_nvml(monkeypatch)


def test_the_state_describes_clocks_temperature_limit_and_driver(nvml: FakeNvml) -> None:
    with NvidiaDriver(0) as gpu:
        assert gpu.state() == {
            "driver": "570.86",
            "gpu_clock": "1755 of 1980 MHz",
            "gpu_memory_clock": "3201 of 3202 MHz",
            "gpu_temperature": "41 C",
            "gpu_power_limit": "700 W",
            "gpu_throttling": "none",
        }


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0, "none"),
        (1, "none"),  # an idle GPU is not held back
        (2, "application clocks"),
        (4, "power limit"),
        (8, "hardware slowdown"),
        (16, "sync boost"),
        (32, "too hot"),
        (64, "too hot (hardware)"),
        (128, "power brake"),
        (4 | 32, "power limit, too hot"),
        (1 | 8 | 64 | 128, "hardware slowdown, too hot (hardware), power brake"),
    ],
)
def test_throttling_reasons_are_described(nvml: FakeNvml, bits: int, words: str) -> None:
    nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"] = bits
    with NvidiaDriver(0) as gpu:
        assert gpu.throttling() == words
        assert gpu.state()["gpu_throttling"] == words


@pytest.mark.parametrize(
    ("question", "left_out"),
    [
        ("nvmlDeviceGetClockInfo", {"gpu_clock", "gpu_memory_clock"}),
        ("nvmlDeviceGetMaxClockInfo", {"gpu_clock", "gpu_memory_clock"}),
        ("nvmlDeviceGetTemperature", {"gpu_temperature"}),
        ("nvmlDeviceGetEnforcedPowerLimit", {"gpu_power_limit"}),
        ("nvmlDeviceGetCurrentClocksEventReasons", {"gpu_throttling"}),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_unsupported_queries_are_left_out_of_the_state(
    nvml: FakeNvml, question: str, left_out: set[str], known: bool
) -> None:
    with NvidiaDriver(0) as gpu:
        whole = gpu.state()
        if known:
            nvml.answers[question] = NVMLError("Not Supported")
        else:  # an older pynvml
            del nvml.answers[question]
        assert gpu.state() == {name: said for name, said in whole.items() if name not in left_out}
        assert left_out <= whole.keys()


def test_an_unknown_driver_version_is_left_out_of_the_state(nvml: FakeNvml) -> None:
    nvml.driver = NVMLError("Unknown Error")
    with NvidiaDriver(0) as gpu:
        assert "driver" not in gpu.state()
        assert gpu.state()["gpu_temperature"] == "41 C"


def test_utilization_is_a_fraction_and_power_is_in_watts(nvml: FakeNvml) -> None:
    with NvidiaDriver(0) as gpu:
        assert gpu.utilization() == (0.75, 0.25)  # 75 %, and 30 of 120 bytes
        assert gpu.watts() == 70.5


@pytest.mark.parametrize("question", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo"])
def test_a_failing_query_of_utilization_raises(nvml: FakeNvml, question: str) -> None:
    nvml.answers[question] = NVMLError("GPU is lost")
    with (
        NvidiaDriver(0) as gpu,
        pytest.raises(SensorFailed, match=f"{question} of the GPU failed: NVMLError") as info,
    ):
        gpu.utilization()
    assert isinstance(info.value.__cause__, NVMLError)


def test_a_query_that_pynvml_lacks_raises(nvml: FakeNvml) -> None:
    del nvml.answers["nvmlDeviceGetPowerUsage"]
    with (
        NvidiaDriver(0) as gpu,
        pytest.raises(SensorFailed, match="nvmlDeviceGetPowerUsage of the GPU failed: AttributeError"),
    ):
        gpu.watts()


def test_the_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install_fake_nvml(monkeypatch, gpus=2)
    nvml.uuids.reverse()  # NVML counts them the other way round
    nvml.answers["nvmlDeviceGetPowerUsage"] = 1000
    with NvidiaDriver(1) as gpu:
        assert gpu._handle == "GPU-0001"


def test_nvml_is_shut_down_once(nvml: FakeNvml) -> None:
    with NvidiaDriver(0) as gpu:
        assert nvml.opened == 1
    assert nvml.opened == 0
    gpu.close()
    assert nvml.opened == 0


def test_nvml_is_shut_down_when_the_block_raises(nvml: FakeNvml) -> None:
    with pytest.raises(KeyError, match="mine"), NvidiaDriver(0):
        raise KeyError("mine")
    assert nvml.opened == 0


def test_a_gpu_that_nvml_lacks_raises_and_nvml_is_shut_down(nvml: FakeNvml) -> None:
    with pytest.raises(SensorFailed, match="cannot query GPU 3: NVMLError: Not Found"):
        NvidiaDriver(3)
    assert nvml.opened == 0


def test_an_nvml_that_does_not_start_raises_and_is_not_shut_down(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    with pytest.raises(SensorFailed, match="cannot query GPU 0: NVMLError: Driver Not Loaded"):
        NvidiaDriver(0)
    assert nvml.opened == 0


def test_without_pynvml_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(SensorFailed, match="NVML is not installed: pip install nvidia-ml-py"):
        NvidiaDriver(0)
