"""Checks of clocks and sensors."""

from __future__ import annotations

import json
import time

import pytest
from click.testing import CliRunner

from microtome.cli import main
from microtome.devices.machine import check_clock, check_meters
from microtome.devices.meters import Meter, MeterReading, Missing
from microtome.errors import SensorFailed


class Steps(Meter):
    """A counter that moves at each reading, or fails."""

    name = "steps"
    what = "a counter"
    kind = "counter"

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.joules = 0.0
        self.closed = False

    def read(self) -> MeterReading:
        if self.fails:
            raise SensorFailed("it is broken")
        self.joules += 1
        return MeterReading(time.perf_counter(), joules=self.joules)

    def close(self) -> None:
        self.closed = True


def test_the_clock_moves_and_is_read() -> None:
    clock = check_clock()
    assert clock.name == "perf_counter"
    assert clock.period_s is not None
    assert clock.read_s > 0


def test_a_source_that_works_is_tried_and_closed() -> None:
    source = Steps()
    (checkup,), missing = check_meters([source], [])
    assert (checkup.name, checkup.what, missing) == ("steps", "a counter (counter)", [])
    assert checkup.period_s is not None
    assert source.closed


def test_a_source_that_fails_is_missing_with_its_reason() -> None:
    source, other = Steps(fails=True), Missing("rapl", "no folder", "load the module")
    works, missing = check_meters([source], [other])
    assert works == []
    assert [(item.name, item.reason) for item in missing] == [("rapl", "no folder"), ("steps", "it is broken")]
    assert source.closed


@pytest.mark.parametrize("width", [40, 80])
def test_the_doctor_wraps_its_lines_in_the_width_of_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = CliRunner().invoke(main, ["doctor"]).output.splitlines()
    assert 18 < max(map(len, lines)) <= width
    assert "works  perf_counter" in "\n".join(lines)


def test_the_doctor_speaks_and_writes() -> None:
    said = CliRunner().invoke(main, ["doctor"])
    assert said.exit_code == 0
    assert "works  perf_counter: time; a reading takes" in said.output
    written = CliRunner().invoke(main, ["doctor", "--json", "-"])
    data = json.loads(written.stdout)
    assert data["works"][0]["name"] == "perf_counter"
    assert all({"name", "reason", "fix"} <= item.keys() for item in data["missing"])
