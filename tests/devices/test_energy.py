"""Energy meters, against fake trees of sysfs, drivers, commands and logs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtome.devices.meters import (
    CsvMeter,
    Energy,
    Meter,
    MeterReading,
    Missing,
    Window,
    find,
    jetson,
    nvml,
    pi,
    rapl,
)
from microtome.devices.meters.base import Kind
from microtome.errors import SensorFailed, SessionError
from tests.devices.fake_nvml import FakeNvml, NVMLError, answer, install_fake_nvml

RANGE_UJ = 262_143_328_850


def lay(root: Path, files: dict[str, object]) -> Path:
    """A tree of small files, as the kernel would show it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def domain(folder: str, name: str, energy_uj: object, range_uj: int = RANGE_UJ) -> dict[str, object]:
    return {f"{folder}/name": name, f"{folder}/energy_uj": energy_uj, f"{folder}/max_energy_range_uj": range_uj}


def only(found: tuple[list[Meter], list[Missing]]) -> Meter:
    sources, missing = found
    assert missing == []
    assert len(sources) == 1
    return sources[0]


def absent(found: tuple[list[Meter], list[Missing]]) -> Missing:
    sources, missing = found
    assert sources == []
    assert len(missing) == 1
    return missing[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time that sources see, which passes only where a test says so."""
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    yield now
    monkeypatch.undo()


def deny(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As for a user who is not root; a chmod would not stop a test that is."""
    honest = os.stat

    def stat(path: Any, **options: Any) -> Any:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return honest(path, **options)

    monkeypatch.setattr(os, "stat", stat)


# RAPL


def server(root: Path) -> Path:
    """Two packages with all their parts, the platform around them, and a second door to the first."""
    return lay(
        root,
        {
            "intel-rapl/enabled": 1,
            **domain("intel-rapl:0", "package-0", 1_000_000),
            **domain("intel-rapl:0:0", "core", 100),
            **domain("intel-rapl:0:1", "uncore", 100),
            **domain("intel-rapl:0:2", "dram", 50_000),
            **domain("intel-rapl:1", "package-1", 2_000_000),
            **domain("intel-rapl:1:0", "dram", 60_000),
            **domain("intel-rapl:2", "psys", 9_000_000),
            **domain("intel-rapl-mmio:0", "package-0", 1_000_000),
        },
    )


def test_rapl_sums_packages_and_memory_once(tmp_path: Path) -> None:
    source = only(rapl.find(server(tmp_path)))
    assert source.what == "CPU package-0 + package-1 + dram + dram"
    assert source.kind == "counter"
    assert source.read().joules == 0
    lay(
        tmp_path,
        {
            "intel-rapl:0/energy_uj": 4_000_000,  # + 3 J
            "intel-rapl:0:0/energy_uj": 2_000_100,  # inside package-0
            "intel-rapl:0:2/energy_uj": 550_000,  # + 0.5 J
            "intel-rapl:1/energy_uj": 3_000_000,  # + 1 J
            "intel-rapl:1:0/energy_uj": 310_000,  # + 0.25 J
            "intel-rapl:2/energy_uj": 19_000_000,  # around all of it
            "intel-rapl-mmio:0/energy_uj": 4_000_000,  # package-0 again
        },
    )
    assert source.read().joules == pytest.approx(4.75)


def test_rapl_reads_psys_without_a_package(tmp_path: Path) -> None:
    source = only(rapl.find(lay(tmp_path, domain("intel-rapl:0", "psys", 5))))
    assert source.what == "CPU psys"


@given(
    start=st.integers(0, 999),
    steps=st.lists(st.integers(0, 999), max_size=30),
)
def test_rapl_unwraps_overflows(start: int, steps: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = lay(Path(folder), domain("intel-rapl:0", "package-0", start, range_uj=1000))
        counter = rapl.Domain(root / "intel-rapl:0", 0.0)
        totals = []
        for second, raw in enumerate(list(accumulate(steps, initial=start))[1:], start=1):
            (root / "intel-rapl:0/energy_uj").write_text(str(raw % 1000))
            totals.append(counter.update(float(second)))
    assert totals == list(accumulate(steps))


def test_an_overflow_is_unwrapped_and_a_reset_counter_raises(tmp_path: Path, clock: list[float]) -> None:
    root = lay(tmp_path, domain("intel-rapl:0", "package-0", RANGE_UJ - 1_000_000))
    source = only(rapl.find(root))
    clock[0] += 1
    lay(root, {"intel-rapl:0/energy_uj": 2_000_000})
    assert source.read().joules == pytest.approx(3)
    clock[0] += 1
    lay(root, {"intel-rapl:0/energy_uj": 1_000_000})  # as a wrap-around, 262 kJ within one second
    with pytest.raises(
        SensorFailed, match=r"energy_uj went backwards from 2000000 to 1000000 within 1 s, more than 10 kW"
    ):
        source.read()
    clock[0] += 3600  # long enough for 262 kJ, but what was lost stays lost
    with pytest.raises(SensorFailed, match="went backwards"):
        source.read()


def test_a_rapl_counter_that_jumps_is_not_believed(tmp_path: Path, clock: list[float]) -> None:
    source = only(rapl.find(lay(tmp_path, domain("intel-rapl:0", "package-0", 0))))
    clock[0] += 1
    lay(tmp_path, {"intel-rapl:0/energy_uj": RANGE_UJ - 1})
    with pytest.raises(SensorFailed, match=r"jumped from 0 to 262143328849 within 1 s"):
        source.read()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "energy_uj: expected an unsigned integer, got ''"),
        ("-5", "energy_uj: expected an unsigned integer, got '-5'"),
        ("12 uJ", "expected an unsigned integer, got '12 uJ'"),
        (str(RANGE_UJ + 1), f"expected at most {RANGE_UJ}, got {RANGE_UJ + 1}"),
    ],
)
def test_rapl_garbage_is_an_error_and_the_next_good_reading_counts(tmp_path: Path, text: str, says: str) -> None:
    source = only(rapl.find(lay(tmp_path, domain("intel-rapl:0", "package-0", 7))))
    lay(tmp_path, {"intel-rapl:0/energy_uj": text})
    with pytest.raises(SensorFailed, match=says):
        source.read()
    lay(tmp_path, {"intel-rapl:0/energy_uj": 1_000_007})
    # A gap that short is let through up to a kilojoule.
    assert source.read().joules == pytest.approx(1)


def test_a_rapl_file_that_vanishes_is_an_error(tmp_path: Path) -> None:
    source = only(rapl.find(server(tmp_path)))
    (tmp_path / "intel-rapl:1/energy_uj").unlink()
    with pytest.raises(SensorFailed, match=r"intel-rapl:1/energy_uj does not exist"):
        source.read()


def test_a_rapl_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    source = only(rapl.find(server(tmp_path)))
    (tmp_path / "intel-rapl:1/energy_uj").unlink()
    (tmp_path / "intel-rapl:1/energy_uj").mkdir()
    with pytest.raises(SensorFailed, match=r"cannot read '.*energy_uj': expected a regular file, got a folder"):
        source.read()


def test_rapl_without_permission_reports_reason_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deny(monkeypatch, "energy_uj")
    missing = absent(rapl.find(server(tmp_path)))
    assert missing.reason.endswith("intel-rapl:0/energy_uj cannot be read: permission denied")
    assert "run as root" in missing.fix
    assert "chmod a+r" in missing.fix
    assert "CVE-2020-8694" in missing.fix


def test_rapl_that_loses_its_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = only(rapl.find(server(tmp_path)))
    deny(monkeypatch, "energy_uj")
    with pytest.raises(SensorFailed, match="cannot be read: permission denied"):
        source.read()


def test_rapl_without_powercap_reports_the_reason(tmp_path: Path) -> None:
    missing = absent(rapl.find(tmp_path / "powercap"))
    assert "powercap does not exist: the kernel has no powercap" in missing.reason
    assert "external meter" in missing.fix
    (tmp_path / "file").touch()
    assert "cannot be listed: Not a directory" in absent(rapl.find(tmp_path / "file")).reason


def test_a_powercap_without_packages_gives_no_source(tmp_path: Path) -> None:
    missing = absent(rapl.find(lay(tmp_path, domain("intel-rapl:0:0", "core", 1))))
    assert missing.reason.endswith("holds no package and no psys")
    assert "modprobe intel_rapl_msr" in missing.fix


def test_a_rapl_domain_that_vanishes_while_it_is_looked_for_gives_no_source(tmp_path: Path) -> None:
    server(tmp_path)
    (tmp_path / "intel-rapl:0/max_energy_range_uj").unlink()
    assert absent(rapl.find(tmp_path)).reason.endswith("max_energy_range_uj does not exist")


# Jetson


def chip(address: str, number: int, *rails: tuple[str, object, object]) -> dict[str, object]:
    folder = f"{address}/hwmon/hwmon{number}"
    files: dict[str, object] = {f"{folder}/in7_label": "sum of shunt voltages", f"{folder}/in7_input": 99999}
    for channel, (label, millivolts, milliamperes) in enumerate(rails, start=1):
        files[f"{folder}/in{channel}_label"] = label
        files[f"{folder}/in{channel}_input"] = millivolts
        files[f"{folder}/curr{channel}_input"] = milliamperes
    return files


def orin_nano(root: Path) -> Path:
    rails = ("VDD_IN", 5000, 1200), ("VDD_CPU_GPU_CV", 5000, 400), ("VDD_SOC", 5000, 300)
    return lay(root, chip("1-0040", 3, *rails))


def agx_orin(root: Path) -> Path:
    first = chip("1-0040", 3, ("VDD_GPU_SOC", 20_000, 150), ("VDD_CPU_CV", 20_000, 50), ("VIN_SYS_5V0", 5000, 800))
    second = chip("1-0041", 4, ("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5000, 80), ("NC", 0, 0))
    return lay(root, {**first, **second})


def test_a_jetson_with_a_total_rail_reads_it_alone(tmp_path: Path) -> None:
    source = only(jetson.find(orin_nano(tmp_path)))
    assert source.what == "Jetson module, rails VDD_IN"
    assert source.kind == "power"
    assert source.read().watts == pytest.approx(6)  # 5 V * 1.2 A


def test_a_jetson_without_a_total_rail_sums_those_that_do_not_overlap(tmp_path: Path) -> None:
    source = only(jetson.find(agx_orin(tmp_path)))
    assert source.what == "Jetson module, rails VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0"
    assert source.read().watts == pytest.approx(3 + 1 + 4)  # without the 0.4 W that VIN_SYS_5V0 feeds


def test_a_jetson_rail_may_be_below_zero_and_the_sum_may_not(tmp_path: Path) -> None:
    source = only(jetson.find(agx_orin(tmp_path)))
    lay(tmp_path, {"1-0040/hwmon/hwmon3/curr2_input": -8})
    assert source.read().watts == pytest.approx(3 - 0.16 + 4)
    lay(tmp_path, {"1-0040/hwmon/hwmon3/curr2_input": -800})
    with pytest.raises(SensorFailed, match=r"the power of the Jetson module.* to be finite and at least 0, got -9.0"):
        source.read()


def test_an_unknown_jetson_board_is_not_read(tmp_path: Path) -> None:
    missing = absent(jetson.find(lay(tmp_path, chip("1-0040", 3, ("B", 1, 1), ("A", 1, 1)))))
    assert missing.reason == "which of the rails A, B feed which is not known"
    assert "external meter" in missing.fix


def test_two_rails_of_one_name_give_no_number(tmp_path: Path) -> None:
    lay(tmp_path, {**chip("1-0040", 3, ("VDD_IN", 1, 1)), **chip("1-0041", 4, ("VDD_IN", 1, 1))})
    assert "two rails are named VDD_IN" in absent(jetson.find(tmp_path)).reason


def test_jetson_on_other_machines_reports_the_reason(tmp_path: Path) -> None:
    missing = absent(jetson.find(tmp_path / "ina3221"))
    assert missing.reason.endswith("holds no sensor: this is no Jetson, or an older one")
    assert "driver ina3221" in missing.fix


def test_jetson_garbage_and_vanished_files_are_errors(tmp_path: Path) -> None:
    source = only(jetson.find(orin_nano(tmp_path)))
    lay(tmp_path, {"1-0040/hwmon/hwmon3/curr1_input": "nan"})
    with pytest.raises(SensorFailed, match=r"curr1_input: expected an integer, got 'nan'"):
        source.read()
    (tmp_path / "1-0040/hwmon/hwmon3/curr1_input").unlink()
    with pytest.raises(SensorFailed, match=r"curr1_input does not exist"):
        source.read()
    assert "see whether `tegrastats`" in absent(jetson.find(tmp_path)).fix


def test_jetson_without_permission_reports_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deny(monkeypatch, "in1_input")
    missing = absent(jetson.find(orin_nano(tmp_path)))
    assert missing.reason.endswith("in1_input cannot be read: permission denied")
    assert missing.fix == "run as root"


# Raspberry Pi

PMIC = """\
 3V7_WL_SW_A current(0)=0.10000000A
   3V3_SYS_A current(1)=0.20000000A
  VDD_CORE_A current(7)=2.00000000A
 3V7_WL_SW_V volt(8)=3.70000000V
   3V3_SYS_V volt(9)=3.30000000V
  VDD_CORE_V volt(15)=0.75000000V
     EXT5V_V volt(24)=5.10000000V
      BATT_V volt(25)=0.00000000V
"""


def test_the_power_chip_of_a_pi_is_summed_over_its_rails() -> None:
    source = only(pi.find(lambda: PMIC))
    # 0.1 A * 3.7 V + 0.2 A * 3.3 V + 2 A * 0.75 V; EXT5V and BATT have no current
    assert source.read().watts == pytest.approx(0.37 + 0.66 + 1.5)
    assert source.kind == "power"
    assert "without what does not go through it" in source.what


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a current from the power chip, got none"),
        ("EXT5V_V volt(24)=5.1V", "expected a current from the power chip, got none"),
        ("VDD_CORE_A current(7)=2.0A", "expected a voltage for each current .* none for VDD_CORE"),
        ('error=1 error_msg="Command not registered"', "expected a current or a voltage .* got 'error=1"),
        ("VDD_CORE_A current(7)=2.0V", "expected a current or a voltage"),
        ("VDD_CORE_A current(7)=two_A", "expected a number"),
        ("VDD_CORE_A current(7)=nanA", "of the power chip to be finite and at least 0, got nan"),
        ("VDD_CORE_A current(7)=-2A", "of the power chip to be finite and at least 0, got -2.0"),
    ],
)
def test_invalid_output_of_the_power_chip_raises(text: str, says: str) -> None:
    answers = iter([PMIC, text])
    source = pi.Pi(lambda: next(answers))
    with pytest.raises(SensorFailed, match=says):
        source.read()
    missing = absent(pi.find(lambda: text))
    assert "a Raspberry Pi 5" in missing.fix


def test_pi_without_its_command_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pi, "COMMAND", ("no-such-command-anywhere",))
    missing = absent(pi.find())
    assert missing.reason == "there is no command vcgencmd: this is no Raspberry Pi"
    assert "raspi-utils" in missing.fix


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import sys; sys.exit('VCHI initialization failed')", "vcgencmd ended with 1: VCHI initialization failed"),
        (f"print({PMIC!r})", ""),
    ],
)
def test_the_command_of_a_pi_is_run(monkeypatch: pytest.MonkeyPatch, script: str, says: str) -> None:
    monkeypatch.setattr(pi, "COMMAND", (sys.executable, "-c", script))
    if says:
        assert absent(pi.find()).reason == says
    else:
        assert only(pi.find()).read().watts == pytest.approx(2.53)


def test_a_hanging_command_of_a_pi_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: Any, **more: Any) -> None:
        raise subprocess.TimeoutExpired("vcgencmd", more["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    assert "vcgencmd cannot be run: TimeoutExpired" in absent(pi.find()).reason


# NVML


ENERGY, POWER = "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return install_fake_nvml(monkeypatch)


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


# A CSV file


def table(folder: Path, *lines: str, end: str = "\n") -> Path:
    path = folder / "meter.csv"
    path.write_text("\n".join(lines) + end)
    return path


def test_watts_of_a_csv_are_summed_between_any_two_times(tmp_path: Path) -> None:
    path = table(tmp_path, "time_s,note,watts", "10,a,0", "12,b,20", "", "14,c,20")
    meter = CsvMeter(path, clock="perf")
    # Joules to 12: 0..20 W over 2 s = 20; to 14: 20 + 40. On straight lines: 11 is at 10 J, 13 at 40 J.
    assert meter.between(11, 13) == pytest.approx(30)
    assert meter.between(10, 14) == pytest.approx(60)
    assert meter.between(12, 12) == 0
    assert meter.read() == MeterReading(14, joules=60)


def test_joules_of_a_csv_take_precedence_over_watts(tmp_path: Path) -> None:
    meter = CsvMeter(table(tmp_path, " watts, joules, time_s", "1,100,10", "1,104,12"), clock="perf")
    assert meter.between(10.5, 11.5) == pytest.approx(2)


def test_the_times_of_a_csv_are_those_of_the_day(tmp_path: Path, clock: list[float], monkeypatch: Any) -> None:
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)  # while perf_counter says 1000
    meter = CsvMeter(table(tmp_path, "time_s,watts", "1699999990,10", "1699999994,10"))
    assert meter.between(991, 993) == pytest.approx(20)


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    meter = CsvMeter(table(tmp_path, "time_s,watts", "10,10", "12,10", "14,1", end=""), clock="perf")
    with pytest.raises(SensorFailed, match=r"covers 10.0 to 12.0, not 11.0 to 14.0: the meter must log from before"):
        meter.between(11, 14)
    table(tmp_path, "time_s,watts", "10,10", "12,10", "14,10")
    assert meter.between(11, 14) == pytest.approx(30)


def test_a_gap_in_a_csv_matters_only_within_the_block(tmp_path: Path) -> None:
    meter = CsvMeter(table(tmp_path, "time_s,watts", "1,10", "2,10", "12,10", "13,10"), clock="perf")
    assert meter.between(1, 2) == pytest.approx(10)
    assert meter.between(12, 13) == pytest.approx(10)
    with pytest.raises(SensorFailed, match=r"meter.csv, line 4: nothing was logged for 10 s, more than 5 s"):
        meter.between(1.5, 12.5)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["time_s,watts", "2,1", "1,1"], "line 3: time goes from 2.0 to 1.0, not forwards"),
        (["time_s,watts", "2,1", "2,1"], "line 3: time goes from 2.0 to 2.0, not forwards"),
        (["time_s,joules", "1,5", "2,4"], "line 3: the counter goes backwards, from 5.0 to 4.0 J"),
        (["time_s,watts", "1,1", "2,"], "line 3: watts: expected a number, got ''"),
        (["time_s,watts", "1,1", "2"], "line 3: watts: expected a number, got ''"),
        (["time_s,watts", "1,1", "2,inf"], "line 3: watts to be finite and at least 0, got inf"),
        (["time_s,watts", "1,1", "2,-3"], "line 3: watts to be finite and at least 0, got -3.0"),
        (["time_s,watts", "noon,1"], "line 2: time_s: expected a number, got 'noon'"),
        (["time_s,power", "1,1"], r"expected columns time_s and watts or joules, got \['time_s', 'power'\]"),
        (["time_s,watts", "1,1"], "expected at least 2 readings, got 1"),
        ([""], "expected columns time_s .*, got"),
    ],
)
def test_an_invalid_csv_raises_with_the_line(tmp_path: Path, lines: list[str], says: str) -> None:
    with pytest.raises(SensorFailed, match=says):
        CsvMeter(table(tmp_path, *lines))


def test_a_missing_or_binary_csv_raises(tmp_path: Path) -> None:
    with pytest.raises(SensorFailed, match=r"meter.csv does not exist"):
        CsvMeter(tmp_path / "meter.csv")
    (tmp_path / "meter.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SensorFailed, match=r"meter.csv cannot be read: UnicodeDecodeError"):
        CsvMeter(tmp_path / "meter.csv")


# Finding


def test_a_machine_without_sensors_reports_reasons_and_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(pi, "COMMAND", ("no-such-command-anywhere",))
    monkeypatch.setattr(rapl, "ROOT", tmp_path / "a")
    monkeypatch.setattr(jetson, "ROOT", tmp_path / "b")
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


# Windows


class Scripted(Meter):
    """A sensor that gives what a function of the reading's number gives."""

    name = "scripted"
    what = "a script"

    def __init__(self, kind: Kind, reading: Callable[[int], MeterReading], every_s: float | None = None) -> None:
        self.kind = kind
        self.every_s = every_s
        self.reads = 0
        self.third = threading.Event()
        self._reading = reading

    def read(self) -> MeterReading:
        self.reads += 1
        if self.reads >= 3:
            self.third.set()
        return self._reading(self.reads - 1)


def measured(source: Meter) -> Energy:
    with Window(source) as window:
        pass
    return window.energy()


def failing(number: int) -> MeterReading:
    raise SensorFailed(f"reading {number} failed")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "microtome-energy"]


def test_a_counter_gives_end_minus_start() -> None:
    source = Scripted("counter", lambda n: MeterReading(10.0 + n, joules=5.0 + 3 * n))
    assert measured(source) == Energy(3.0, 1.0, "counter, end minus start", 2)


def test_power_is_sampled_by_a_thread_and_integrated() -> None:
    # 10 W more each second: trapezoids are exact, T seconds take 10 T^2 / 2 J, however many readings there were.
    source = Scripted("power", lambda n: MeterReading(float(n), watts=10.0 * n), every_s=0.0)
    with Window(source) as window:
        assert source.third.wait(60)
        assert threads()
    energy = window.energy()
    assert threads() == []
    assert energy.samples == source.reads >= 3
    assert energy.seconds == energy.samples - 1
    assert energy.joules == pytest.approx(5 * energy.seconds**2)
    assert energy.method == "power, sampled and integrated"


def test_a_block_shorter_than_the_period_has_two_samples() -> None:
    source = Scripted("power", lambda n: MeterReading(2.0 * n, watts=10.0), every_s=3600)
    assert measured(source) == Energy(20.0, 2.0, "power, sampled and integrated", 2)


def test_the_reading_period_can_be_set() -> None:
    source = Scripted("power", lambda n: MeterReading(float(n), watts=1.0), every_s=3600)
    with Window(source, every_s=0.0):
        assert source.third.wait(60)


def test_the_thread_ends_and_the_energy_is_there_when_the_block_raises() -> None:
    source = Scripted("power", lambda n: MeterReading(float(n), watts=10.0), every_s=0.0)
    window = Window(source)
    with pytest.raises(KeyError, match="mine"), window:
        raise KeyError("mine")
    assert threads() == []
    assert window.energy().joules == pytest.approx(10 * window.energy().seconds)


class Watched(rapl.Rapl):
    """Tells what it read."""

    def __init__(self, folders: list[Path]) -> None:
        super().__init__(folders)
        self.said: Queue[float | None] = Queue()

    def read(self) -> MeterReading:
        reading = super().read()
        self.said.put(reading.joules)
        return reading


def test_a_counter_that_wraps_around_twice_in_a_block_is_read_in_between(tmp_path: Path) -> None:
    folder = lay(tmp_path, domain("intel-rapl:0", "package-0", 900, range_uj=1000)) / "intel-rapl:0"

    def write(raw: int) -> None:  # at once, as the kernel does: the thread must not find half a file
        (tmp_path / "new").write_text(str(raw))
        (tmp_path / "new").replace(folder / "energy_uj")

    source = Watched([folder])
    with Window(source, every_s=0.0) as window:
        write(300)  # + 400 uJ, around once
        while source.said.get(timeout=60) != pytest.approx(400e-6):
            pass
        write(100)  # + 800 uJ, around again
    assert window.energy().joules == pytest.approx(1200e-6)


def test_a_counter_that_goes_backwards_gives_no_joules() -> None:
    energy = measured(Scripted("counter", lambda n: MeterReading(float(n), joules=5.0 - n)))
    assert energy.joules is None
    assert energy.reason == "the counter of a script went backwards, from 5.0 to 4.0 J"


def test_a_counter_that_stands_still_gives_no_joules_rather_than_zero() -> None:
    energy = measured(Scripted("counter", lambda n: MeterReading(0.002 * n, joules=5.0)))
    assert energy.joules is None
    assert energy.reason.startswith("the counter did not change within 0.002 s: the block is too short")


@pytest.mark.parametrize(
    ("kind", "reading", "reason"),
    [
        ("counter", failing, "reading 0 failed"),
        ("power", failing, "reading 0 failed"),
        ("counter", lambda n: MeterReading(1.0, joules=1.0) if n == 0 else failing(n), "reading 1 failed"),
        ("power", lambda n: MeterReading(1.0, watts=1.0) if n == 0 else failing(n), "reading 1 failed"),
        ("power", lambda n: MeterReading(1.0, joules=1.0), "a script: expected a reading with power, got none"),
        (
            "power",
            lambda n: MeterReading(1.0, watts=float("nan")),
            "expected a reading of a script to be finite and at least 0, got nan",
        ),
        ("power", lambda n: MeterReading(-n, watts=1.0), "the time of a script went backwards, from 0 to -1"),
        ("counter", lambda n: MeterReading(1 / n), "reading a script failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_sensor_that_fails_leaves_the_block_alone_and_gives_the_reason(
    kind: Kind, reading: Callable[[int], MeterReading], reason: str
) -> None:
    ran = []
    with Window(Scripted(kind, reading, every_s=3600)) as window:
        ran.append(True)
    energy = window.energy()
    assert ran
    assert energy.joules is None
    assert energy.reason == reason
    assert threads() == []


def test_a_sensor_that_fails_in_the_thread_gives_the_reason() -> None:
    source = Scripted("power", lambda n: MeterReading(float(n), watts=1.0) if n < 2 else failing(n), every_s=0.0)
    with Window(source) as window:
        assert source.third.wait(60)
    assert window.energy().joules is None
    assert window.energy().reason == "reading 2 failed"
    assert source.reads == 3


def test_a_log_is_read_afterwards_and_may_catch_up(tmp_path: Path, clock: list[float]) -> None:
    meter = CsvMeter(table(tmp_path, "time_s,watts", "999,10", "1000,10"), clock="perf")
    with Window(meter) as window:
        clock[0] += 2
    assert window.energy().joules is None
    assert "covers 999.0 to 1000.0, not 1000.0 to 1002.0" in window.energy().reason
    table(tmp_path, "time_s,watts", "999,10", "1000,10", "1003,10")
    assert window.energy() == Energy(20.0, 2.0, "log, interpolated", 0)


@pytest.mark.parametrize("every_s", [None, 3600])
def test_a_window_has_no_answer_before_its_end_and_is_not_opened_twice(every_s: float | None) -> None:
    source = Scripted("power", lambda n: MeterReading(float(n), watts=1.0), every_s)
    window = Window(source)
    assert window.energy().reason == "the block has not ended"
    with window:
        assert window.energy().joules is None
        with pytest.raises(SessionError, match="this window is already open: use one window for each block"):
            window.__enter__()
    assert window.energy().joules == pytest.approx(1)
    with window:  # a second block, after the first
        pass
    assert window.energy().samples == 2
