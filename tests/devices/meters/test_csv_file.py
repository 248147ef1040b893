"""Logs of external meters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from microtome.devices.meters import (
    CsvMeter,
    MeterReading,
)
from microtome.errors import SensorFailed
from tests.devices.meters.machines import (
    table,
)


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
