"""The energy of blocks of code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import pytest

from microtome.devices.meters import (
    CsvMeter,
    Energy,
    Meter,
    MeterReading,
    Window,
    rapl,
)
from microtome.devices.meters.base import Kind
from microtome.errors import SensorFailed, SessionError
from tests.devices.meters.machines import (
    domain,
    table,
    write_tree,
)


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
    folder = write_tree(tmp_path, domain("intel-rapl:0", "package-0", 900, range_uj=1000)) / "intel-rapl:0"

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
