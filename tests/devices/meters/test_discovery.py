"""Choosing a meter, on fake machines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from microtome.devices.meters import (
    CsvMeter,
    Meter,
    MeterReading,
    Missing,
    find,
    jetson,
    nvml,
    pi,
    pick,
    rapl,
    register_meter,
)
from microtome.devices.meters.discovery import unregister_meter
from microtome.errors import BadQuery, SensorFailed
from tests.devices.fake_nvml import FakeNvml, NVMLError, answer, install_fake_nvml
from tests.devices.meters.machines import PMIC, orin_nano, server

OPEN: list[str] = []


class Bench(Meter):
    """A registered meter, which is in OPEN while it is open."""

    name, kind, what, every_s = "of its class", "power", "the bench supply", 0.01

    def __init__(self) -> None:
        OPEN.append(self.what)

    def read(self) -> MeterReading:
        return MeterReading(0.0, watts=12.5)

    def close(self) -> None:
        OPEN.remove(self.what)


class Second(Bench):
    what = "the second supply"


def unplugged() -> Meter:
    raise SensorFailed("the supply is not plugged in")


def odd() -> Meter:
    raise ZeroDivisionError("odd driver")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with no sensor at all, and nothing registered before or after."""
    monkeypatch.setattr(rapl, "ROOT", tmp_path / "powercap")
    monkeypatch.setattr(jetson, "ROOT", tmp_path / "ina3221")
    monkeypatch.setattr(pi, "COMMAND", ("no-such-command-anywhere",))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    # By its module, which `find` of the package is not.
    monkeypatch.setattr(import_module("microtome.devices.meters.discovery"), "_REGISTERED", {})
    OPEN.clear()
    yield tmp_path
    OPEN.clear()


def lay_rapl(machine: Path) -> None:
    folder = machine / "powercap/intel-rapl:0"
    folder.mkdir(parents=True)
    for name, text in {"name": "package-0", "energy_uj": "7", "max_energy_range_uj": "262143328850"}.items():
        (folder / name).write_text(f"{text}\n")


def lay_jetson(machine: Path) -> None:
    folder = machine / "ina3221/1-0040/hwmon/hwmon3"
    folder.mkdir(parents=True)
    for name, text in {"in1_label": "VDD_IN", "in1_input": "5000", "curr1_input": "1200"}.items():
        (folder / name).write_text(f"{text}\n")


# Requested meters


def test_a_meter_is_used_as_it_is_and_no_other_is_opened() -> None:
    register_meter("second", Second)
    meter = Bench()
    assert pick(meter) is meter
    assert pick(meter, [torch.device("cuda", 0), torch.device("cuda", 1)]) is meter
    assert OPEN == ["the bench supply"]


def test_the_file_of_an_external_meter_is_named_after_csv(machine: Path) -> None:
    path = machine / "my:meter.csv"
    path.write_text("time_s,watts\n1,10\n2,10\n")
    meter = pick(f"csv:{path}")
    assert isinstance(meter, CsvMeter)
    assert meter.read().joules == pytest.approx(10)


def test_a_missing_file_of_an_external_meter_raises(machine: Path) -> None:
    with pytest.raises(SensorFailed, match=r"no.csv does not exist"):
        pick(f"csv:{machine / 'no.csv'}")


@pytest.mark.parametrize("wanted", ["rappel", "csv", "", "NVML"])
def test_a_name_that_nobody_has_is_an_error_that_lists_those_there_are(wanted: str) -> None:
    register_meter("bench", Bench)
    says = f"expected a meter of bench, nvml, rapl, jetson, pi, csv:FILE, got '{wanted}'"
    with pytest.raises(BadQuery, match=says):
        pick(wanted)
    assert OPEN == []


def test_a_meter_is_chosen_by_its_name(machine: Path) -> None:
    lay_rapl(machine)
    lay_jetson(machine)
    assert pick("jetson").what == "Jetson module, rails VDD_IN"
    assert pick("rapl").what == "CPU package-0"


def test_the_one_that_is_named_is_not_replaced_by_another(machine: Path) -> None:
    lay_rapl(machine)
    register_meter("bench", Bench)
    with pytest.raises(SensorFailed, match="no sensor: jetson: .* holds no sensor") as info:
        pick("jetson")
    assert "rapl" not in str(info.value)
    assert OPEN == []


# Available meters


def test_without_sensors_the_error_lists_reasons_and_remedies() -> None:
    with pytest.raises(SensorFailed, match="^no sensor: ") as info:
        pick(None)
    _, missing = find()
    seen = [one for one in missing if one.name != "nvml"]  # a GPU's counter does not see the CPU
    assert [one.name for one in seen] == ["rapl", "jetson", "pi"]
    assert str(info.value) == "no sensor: " + ". ".join(map(str, seen))
    assert all(one.reason in str(info.value) and one.fix in str(info.value) for one in seen)


def test_on_the_cpu_the_first_available_meter_is_chosen(machine: Path) -> None:
    lay_jetson(machine)
    assert pick(None).name == "jetson"
    lay_rapl(machine)
    assert pick(None).name == "rapl"


def test_a_gpu_meter_is_not_chosen_for_a_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install_fake_nvml(monkeypatch)
    with pytest.raises(SensorFailed, match="no sensor: rapl: "):
        pick(None)
    with pytest.raises(SensorFailed, match="no sensor: the model does not run on a GPU"):
        pick("nvml")
    assert gpu.opened == 0


def test_a_cpu_meter_is_not_chosen_for_a_model_on_a_gpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_rapl(machine)
    gpu = install_fake_nvml(monkeypatch)
    gpu.answers |= dict.fromkeys(
        ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"), NVMLError("Not Supported")
    )
    with pytest.raises(SensorFailed, match="no sensor: nvml: .* Not Supported; .* jetson: ") as info:
        pick(None, [torch.device("cuda", 0)])
    assert "rapl" not in str(info.value)


@pytest.mark.parametrize("wanted", ["nvml", None])
def test_the_gpu_of_the_model_is_chosen_and_the_others_are_closed(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None
) -> None:
    gpus = install_fake_nvml(monkeypatch, gpus=3)
    gpus.uuids.reverse()  # NVML does not count as torch does
    meter = pick(wanted, [torch.device("cuda", 0)])
    assert isinstance(meter, nvml.Nvml)
    assert (meter.uuid, meter.index) == ("GPU-0000", 2)
    assert gpus.opened == 1
    assert meter.read().joules == 0
    meter.close()
    assert gpus.opened == 0


def test_a_model_on_two_gpus_has_no_counter_that_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus: FakeNvml = install_fake_nvml(monkeypatch, gpus=2)
    with pytest.raises(SensorFailed, match="runs on 2 GPUs, and a counter covers one: measure its parts"):
        pick(None, [torch.device("cuda", 0), torch.device("cuda", 1)])
    assert gpus.opened == 0


# Registered meters


def test_a_registered_meter_goes_before_the_built_in_ones(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_rapl(machine)
    gpu = install_fake_nvml(monkeypatch)
    register_meter("bench", Bench)
    assert pick(None).what == "the bench supply"
    assert pick(None, [torch.device("cuda", 0)]).what == "the bench supply"
    assert gpu.opened == 0
    assert pick("rapl").what == "CPU package-0"


def test_a_registered_meter_answers_to_the_name_it_is_registered_as() -> None:
    register_meter("left", Bench)
    register_meter("right", Bench)
    assert pick("right").name == "right"
    assert pick("left").name == "left"
    assert Bench.name == "of its class"
    with pytest.raises(BadQuery, match="expected a meter of .*, got 'of its class'"):
        pick("of its class")


def test_meters_that_are_not_chosen_are_closed() -> None:
    register_meter("first", Bench)
    register_meter("second", Second)
    meter = pick(None)
    assert meter.name == "first"
    assert OPEN == ["the bench supply"]
    meter.close()
    assert pick("second").name == "second"
    assert OPEN == ["the second supply"]


def test_all_meters_are_closed_when_none_is_chosen() -> None:
    register_meter("bench", Bench)
    register_meter("broken", unplugged)
    with pytest.raises(SensorFailed, match="no sensor: broken: "):
        pick("broken")
    assert OPEN == []


def test_an_unavailable_registered_meter_is_missing_with_its_reason() -> None:
    register_meter("bench", unplugged)
    fix = "see its documentation: it is registered, not built in"
    sources, missing = find()
    assert sources == []
    assert str(missing[-1]) == f"bench: the supply is not plugged in; {fix}"
    with pytest.raises(SensorFailed, match=f"^no sensor: .* bench: the supply is not plugged in; {fix}"):
        pick(None)
    with pytest.raises(SensorFailed, match=f"^no sensor: bench: the supply is not plugged in; {fix}$"):
        pick("bench")


def test_without_a_registered_meter_the_next_is_chosen(machine: Path) -> None:
    lay_rapl(machine)
    register_meter("bench", unplugged)
    assert pick(None).name == "rapl"
    register_meter("second", Second)
    assert pick(None).name == "second"


def test_a_registered_meter_that_raises_anything_is_missing_with_its_reason() -> None:
    register_meter("bench", odd)
    with pytest.raises(SensorFailed, match="^no sensor: bench: looking for it failed: ZeroDivisionError: odd driver;"):
        pick("bench")


@pytest.mark.parametrize("name", ["nvml", "rapl", "jetson", "pi", "csv"])
def test_a_built_in_name_cannot_be_registered(name: str) -> None:
    with pytest.raises(BadQuery, match=f"expected an unused identifier as the name of a meter, got '{name}'"):
        register_meter(name, Bench)
    with pytest.raises(BadQuery, match="no meter is registered"):
        unregister_meter(name)


def test_a_name_is_registered_once() -> None:
    register_meter("bench", Bench)
    with pytest.raises(BadQuery, match="expected an unused identifier as the name of a meter, got 'bench'"):
        register_meter("bench", Second)
    assert pick("bench").what == "the bench supply"


def test_a_meter_that_is_no_longer_registered_is_forgotten() -> None:
    register_meter("bench", Bench)
    unregister_meter("bench")
    with pytest.raises(BadQuery, match="expected a meter of .*, got 'bench'"):
        pick("bench")
    with pytest.raises(BadQuery, match="no meter is registered as 'bench'"):
        unregister_meter("bench")


# All meters


def test_a_machine_without_sensors_reports_reasons_and_remedies() -> None:
    meters, missing = find()
    assert meters == []
    assert [one.name for one in missing] == ["nvml", "rapl", "jetson", "pi"]
    assert all(one.reason and one.fix for one in missing)


def test_all_available_meters_are_found(tmp_path: Path, gpu: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pi, "COMMAND", (sys.executable, "-c", f"print({PMIC!r})"))
    monkeypatch.setattr(rapl, "ROOT", server(tmp_path / "a"))
    monkeypatch.setattr(jetson, "ROOT", orin_nano(tmp_path / "b"))
    sources, missing = find()
    assert missing == []
    assert [source.name for source in sources] == ["nvml", "rapl", "jetson", "pi"]
    assert repr(sources[0]) == "<nvml: GPU 0 NVIDIA H200>"


def test_finding_never_raises(gpu: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "nvmlInit", lambda: answer(ZeroDivisionError("odd driver")), raising=False)
    _, missing = find()
    assert missing[0] == Missing(
        "nvml", "looking for it failed: ZeroDivisionError: odd driver", "report it with this text"
    )


@pytest.mark.integration
def test_importing_the_meters_imports_no_library_of_a_device() -> None:
    script = (
        "import sys, torch; old = set(sys.modules); import microtome.devices.meters; print(*set(sys.modules) - old)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} & {"pynvml", "psutil", "numpy", "pandas"} == set()
