"""Counters of processors, in fake trees of powercap."""

from __future__ import annotations

import tempfile
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtome.devices.meters import (
    rapl,
)
from microtome.errors import SensorFailed
from tests.devices.meters.machines import (
    RANGE_UJ,
    absent,
    deny,
    domain,
    only,
    server,
    write_tree,
)


def test_rapl_sums_packages_and_memory_once(tmp_path: Path) -> None:
    source = only(rapl.find(server(tmp_path)))
    assert source.what == "CPU package-0 + package-1 + dram + dram"
    assert source.kind == "counter"
    assert source.read().joules == 0
    write_tree(
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
    source = only(rapl.find(write_tree(tmp_path, domain("intel-rapl:0", "psys", 5))))
    assert source.what == "CPU psys"


@given(
    start=st.integers(0, 999),
    steps=st.lists(st.integers(0, 999), max_size=30),
)
def test_rapl_unwraps_overflows(start: int, steps: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = write_tree(Path(folder), domain("intel-rapl:0", "package-0", start, range_uj=1000))
        counter = rapl.Domain(root / "intel-rapl:0", 0.0)
        totals = []
        for second, raw in enumerate(list(accumulate(steps, initial=start))[1:], start=1):
            (root / "intel-rapl:0/energy_uj").write_text(str(raw % 1000))
            totals.append(counter.update(float(second)))
    assert totals == list(accumulate(steps))


def test_an_overflow_is_unwrapped_and_a_reset_counter_raises(tmp_path: Path, clock: list[float]) -> None:
    root = write_tree(tmp_path, domain("intel-rapl:0", "package-0", RANGE_UJ - 1_000_000))
    source = only(rapl.find(root))
    clock[0] += 1
    write_tree(root, {"intel-rapl:0/energy_uj": 2_000_000})
    assert source.read().joules == pytest.approx(3)
    clock[0] += 1
    write_tree(root, {"intel-rapl:0/energy_uj": 1_000_000})  # as a wrap-around, 262 kJ within one second
    with pytest.raises(
        SensorFailed, match=r"energy_uj went backwards from 2000000 to 1000000 within 1 s, more than 10 kW"
    ):
        source.read()
    clock[0] += 3600  # long enough for 262 kJ, but what was lost stays lost
    with pytest.raises(SensorFailed, match="went backwards"):
        source.read()


def test_a_rapl_counter_that_jumps_is_not_believed(tmp_path: Path, clock: list[float]) -> None:
    source = only(rapl.find(write_tree(tmp_path, domain("intel-rapl:0", "package-0", 0))))
    clock[0] += 1
    write_tree(tmp_path, {"intel-rapl:0/energy_uj": RANGE_UJ - 1})
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
    source = only(rapl.find(write_tree(tmp_path, domain("intel-rapl:0", "package-0", 7))))
    write_tree(tmp_path, {"intel-rapl:0/energy_uj": text})
    with pytest.raises(SensorFailed, match=says):
        source.read()
    write_tree(tmp_path, {"intel-rapl:0/energy_uj": 1_000_007})
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
    missing = absent(rapl.find(write_tree(tmp_path, domain("intel-rapl:0:0", "core", 1))))
    assert missing.reason.endswith("holds no package and no psys")
    assert "modprobe intel_rapl_msr" in missing.fix


def test_a_rapl_domain_that_vanishes_while_it_is_looked_for_gives_no_source(tmp_path: Path) -> None:
    server(tmp_path)
    (tmp_path / "intel-rapl:0/max_energy_range_uj").unlink()
    assert absent(rapl.find(tmp_path)).reason.endswith("max_energy_range_uj does not exist")
