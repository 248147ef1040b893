"""Rails of Jetson boards, in fake trees of hwmon."""

from __future__ import annotations

from pathlib import Path

import pytest

from microtome.devices.meters import (
    jetson,
)
from microtome.errors import SensorFailed
from tests.devices.meters.machines import (
    absent,
    agx_orin,
    chip,
    deny,
    only,
    orin_nano,
    write_tree,
)


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
    write_tree(tmp_path, {"1-0040/hwmon/hwmon3/curr2_input": -8})
    assert source.read().watts == pytest.approx(3 - 0.16 + 4)
    write_tree(tmp_path, {"1-0040/hwmon/hwmon3/curr2_input": -800})
    with pytest.raises(SensorFailed, match=r"the power of the Jetson module.* to be finite and at least 0, got -9.0"):
        source.read()


def test_an_unknown_jetson_board_is_not_read(tmp_path: Path) -> None:
    missing = absent(jetson.find(write_tree(tmp_path, chip("1-0040", 3, ("B", 1, 1), ("A", 1, 1)))))
    assert missing.reason == "which of the rails A, B feed which is not known"
    assert "external meter" in missing.fix


def test_two_rails_of_one_name_give_no_number(tmp_path: Path) -> None:
    write_tree(tmp_path, {**chip("1-0040", 3, ("VDD_IN", 1, 1)), **chip("1-0041", 4, ("VDD_IN", 1, 1))})
    assert "two rails are named VDD_IN" in absent(jetson.find(tmp_path)).reason


def test_jetson_on_other_machines_reports_the_reason(tmp_path: Path) -> None:
    missing = absent(jetson.find(tmp_path / "ina3221"))
    assert missing.reason.endswith("holds no sensor: this is no Jetson, or an older one")
    assert "driver ina3221" in missing.fix


def test_jetson_garbage_and_vanished_files_are_errors(tmp_path: Path) -> None:
    source = only(jetson.find(orin_nano(tmp_path)))
    write_tree(tmp_path, {"1-0040/hwmon/hwmon3/curr1_input": "nan"})
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
