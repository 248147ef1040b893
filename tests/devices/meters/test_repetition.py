"""The energy of repeated work, on a fake clock on which a run takes a millisecond."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from microtome.devices.meters import CsvMeter, Meter, MeterReading, RepeatedWork, metered, repetition
from microtome.devices.meters.base import Kind
from microtome.errors import SensorFailed

RUNS_PER_S = 1000
#: How often sensors are looked at here, in seconds of everybody's clock.
OFTEN_S = 0.0005


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "microtome-energy"]


class Bench(Meter):
    """A sensor and the work that it sees, on one clock.

    Args:
        say: What the sensor says at a millisecond: the joules of a counter, the watts of others.

    Attributes:
        ms: The clock.
        told: All that was read, in order.
        while_asleep: What happens when somebody has slept, at that millisecond.
    """

    name = "bench"
    what = "a bench"

    def __init__(self, kind: Kind, say: Callable[[int], float | None]) -> None:
        self.kind = kind
        self.every_s = OFTEN_S if kind == "power" else None
        self.ms = 0
        self.told: list[MeterReading] = []
        self.while_asleep: Callable[[int], object] | None = None
        self._say = say
        self._read = threading.Event()

    def clock(self) -> float:
        return self.ms / 1000

    def read(self) -> MeterReading:
        ms = self.ms
        try:
            said = self._say(ms)
        finally:
            self._read.set()
        self.told.append(MeterReading(ms / 1000, **{"joules" if self.kind == "counter" else "watts": said}))
        return self.told[-1]

    def work(self, count: int) -> None:
        """So many runs, in each of which a sensor that is read at all is read."""
        for _ in range(count):
            self.ms += 1
            self._read.clear()
            while threads() and not self._read.wait(0.01):
                pass

    def sleep(self, seconds: float) -> None:
        self.ms += max(round(1000 * seconds), 1)
        if self.while_asleep is not None:
            self.while_asleep(self.ms)

    def moves(self) -> dict[float, float]:
        """When it was seen to have moved, and to where."""
        found: dict[float, float] = {}
        last = self.told[0].joules
        for one in self.told:
            if one.joules is not None and one.joules != last:
                found[one.time_s] = last = one.joules
        return found


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kind, Callable[[int], float | None]], Bench]:
    """Makes one, and sets the clock of the loop by it."""

    def make(kind: Kind, say: Callable[[int], float | None]) -> Bench:
        made = Bench(kind, say)
        monkeypatch.setattr(repetition, "perf_counter", made.clock)
        monkeypatch.setattr(repetition, "sleep", made.sleep)
        monkeypatch.setattr(repetition, "_POLL_S", OFTEN_S)
        return made

    return make


Make = Callable[[Kind, Callable[[int], float | None]], Bench]


def raised(meter: Bench, seconds: float = 1.0) -> str:
    with pytest.raises(SensorFailed) as info:
        metered(meter, meter.work, seconds=seconds)
    return str(info.value)


def test_the_joules_of_a_steady_power_are_watts_times_seconds_in_every_part(bench: Make) -> None:
    meter = bench("power", lambda ms: 40.0)
    parts = metered(meter, meter.work, seconds=0.3)
    assert len(parts) == 5
    assert [part.joules for part in parts] == pytest.approx([40 * part.seconds for part in parts])
    assert [part.runs for part in parts] == pytest.approx([RUNS_PER_S * part.seconds for part in parts])
    # All of the time, but for the last reading's distance from the end.
    assert sum(part.seconds for part in parts) == pytest.approx(0.3, abs=0.03)


def test_a_power_that_rises_is_integrated(bench: Make) -> None:
    # P = t kW, t in seconds: the whole takes (end^2 - start^2) / 2 kJ, to which trapezoids are exact.
    meter = bench("power", float)
    parts = metered(meter, meter.work, seconds=0.3, parts=3)
    start = meter.told[0].time_s
    end = start + sum(part.seconds for part in parts)
    assert sum(part.joules for part in parts) == pytest.approx(500 * (end**2 - start**2))
    assert len(parts) == 3


def test_the_parts_of_a_counter_begin_and_end_where_it_moves(bench: Make) -> None:
    meter = bench("counter", lambda ms: ms // 7 * 0.5)  # half a joule at a time, every 7 ms
    parts = metered(meter, meter.work, seconds=0.3)
    moves = {round(time, 6): joules for time, joules in meter.moves().items()}
    ends = list(accumulate(part.seconds for part in parts))
    counted = list(accumulate(part.joules for part in parts))
    fitting = [
        begin
        for begin, joules in moves.items()
        if all(
            moves.get(round(begin + end, 6)) == pytest.approx(joules + more)
            for end, more in zip(ends, counted, strict=True)
        )
    ]
    assert fitting == [min(moves)]  # from its first move on
    assert len(parts) == 5
    assert all(part.joules >= 0.5 for part in parts)


def test_the_runs_of_a_part_are_counted_to_the_moment_within_a_chunk_of_work(bench: Make) -> None:
    chunks: list[int] = []
    meter = bench("counter", lambda ms: ms // 7 * 0.5)

    def work(count: int) -> None:
        chunks.append(count)
        meter.work(count)

    parts = metered(meter, work, seconds=0.3)
    assert [part.runs for part in parts] == pytest.approx([RUNS_PER_S * part.seconds for part in parts])
    assert chunks[-1] == 20  # of 20 ms each, while the counter moves every 7
    assert any(part.runs % 20 > 0.5 for part in parts)


def test_work_is_done_in_chunks_of_a_fiftieth_of_a_second_however_slow_a_run_is(bench: Make) -> None:
    chunks: list[int] = []
    meter = bench("power", lambda ms: 1.0)

    def slow(count: int) -> None:
        chunks.append(count)
        meter.work(50 * count)

    parts = metered(meter, slow, seconds=0.3)
    assert set(chunks) == {1}
    assert [part.runs for part in parts] == pytest.approx([20 * part.seconds for part in parts])


def test_a_slow_counter_extends_the_measurement(bench: Make) -> None:
    # Five parts need six moves, which take at least 150 ms; 40 are wished, and five times that is the end.
    meter = bench("counter", lambda ms: ms // 30 * 2.0)
    parts = metered(meter, meter.work, seconds=0.04)
    assert [part.joules for part in parts] == pytest.approx([2.0] * 5)


@pytest.mark.parametrize(
    ("say", "moved"),
    [(lambda ms: 5.0, 0), (lambda ms: 5.0 if ms < 60 else 6.0, 1)],
    ids=["it stands still", "it moves once"],
)
def test_a_counter_that_does_not_move_enough_is_an_error(
    bench: Make, say: Callable[[int], float | None], moved: int
) -> None:
    meter = bench("counter", say)
    # Five times the wished 20 ms, and the chunk in which they end.
    with pytest.raises(SensorFailed, match=rf"a bench: expected at least 6 changes, got {moved} within 0\.1[012]? s"):
        metered(meter, meter.work, seconds=0.02)
    assert threads() == []


def fails(ms: int) -> float:
    raise SensorFailed("the bench is on fire")


@pytest.mark.parametrize(
    ("kind", "good", "bad", "reason"),
    [
        ("power", 40.0, fails, "the bench is on fire"),
        ("counter", 5.0, fails, "the bench is on fire"),
        ("counter", 5.0, lambda ms: 4.0, "the counter of a bench went backwards, from 5.0 to 4.0 J"),
        ("counter", 5.0, lambda ms: float("nan"), "expected a reading of a bench to be finite and at least 0, got nan"),
        ("power", 40.0, lambda ms: float("nan"), "expected a reading of a bench to be finite and at least 0, got nan"),
        ("power", 40.0, lambda ms: -1.0, "expected a reading of a bench to be finite and at least 0, got -1.0"),
        ("power", 40.0, lambda ms: None, "a bench: expected a reading with power, got none"),
        ("power", 40.0, lambda ms: 1 / 0, "reading a bench failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_sensor_that_fails_in_the_middle_ends_the_work_with_its_reason(
    bench: Make, kind: Kind, good: float, bad: Callable[[int], float | None], reason: str
) -> None:
    meter = bench(kind, lambda ms: good if ms < 60 else bad(ms))
    assert raised(meter) == reason
    assert meter.told[0].time_s < 0.06  # the window was open before
    assert meter.ms < 500  # of the 1000 that were wished
    assert threads() == []


def test_a_sensor_that_fails_at_once_ends_the_work_before_it_begins(bench: Make) -> None:
    meter = bench("power", fails)
    assert raised(meter) == "the bench is on fire"
    assert meter.ms < 20  # what one run takes had to be found out
    assert threads() == []


def test_errors_of_the_work_propagate_and_the_thread_ends(bench: Make) -> None:
    alive: list[str] = []
    meter = bench("power", lambda ms: 40.0)

    def work(count: int) -> None:
        meter.work(count)
        if meter.ms > 60:
            alive.extend(threads())
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        metered(meter, work, seconds=1.0)
    assert alive == ["microtome-energy"]
    assert threads() == []


def test_work_that_raises_at_once_is_never_metered(bench: Make) -> None:
    meter = bench("power", lambda ms: 40.0)

    def work(count: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        metered(meter, work, seconds=1.0)
    assert meter.told == []


def test_the_thread_ends_with_the_work(bench: Make) -> None:
    meter = bench("power", lambda ms: 40.0)
    metered(meter, meter.work, seconds=0.1)
    assert threads() == []
    read = len(meter.told)
    meter.work(1)
    assert len(meter.told) == read


def test_a_log_is_read_for_equal_parts_of_the_time(bench: Make, tmp_path: Path) -> None:
    path = tmp_path / "meter.csv"
    path.write_text("time_s,watts\n0,10\n0.15,10\n0.150001,20\n2,20\n")  # twice as much from 0.15 s on
    clock = bench("power", fails)  # not read
    parts = metered(CsvMeter(path, clock="perf"), clock.work, seconds=0.3)
    each = parts[0].seconds
    assert 5 * each == pytest.approx(0.3, abs=0.03)
    assert [part.seconds for part in parts] == pytest.approx([each] * 5)
    assert [part.runs for part in parts] == pytest.approx([RUNS_PER_S * each] * 5)
    # The work ended now, and began five parts before.
    edges = [clock.clock() - each * back for back in range(5, -1, -1)]
    until = [10 * time + 10 * max(time - 0.15, 0) for time in edges]
    joules = [end - start for start, end in pairwise(until)]
    assert [part.joules for part in parts] == pytest.approx(joules, abs=1e-4)
    assert joules[-1] == pytest.approx(2 * joules[0])
    assert clock.told == []


def test_the_lines_of_a_log_may_come_late(bench: Make, tmp_path: Path) -> None:
    path = tmp_path / "meter.csv"
    path.write_text("time_s,watts\n0,10\n0.2,10\n")
    clock = bench("power", fails)
    late = "time_s,watts\n0,10\n0.2,10\n1,10\n"
    clock.while_asleep = lambda ms: path.write_text(late) if ms > 1000 else None
    parts = metered(CsvMeter(path, clock="perf"), clock.work, seconds=0.3)
    assert [part.joules for part in parts] == pytest.approx([10 * part.seconds for part in parts])
    # The wait is no part of the time.
    assert sum(part.seconds for part in parts) == pytest.approx(0.3, abs=0.03)
    assert clock.ms > 1000


def test_a_log_that_does_not_reach_to_the_end_is_an_error(bench: Make, tmp_path: Path) -> None:
    path = tmp_path / "meter.csv"
    path.write_text("time_s,watts\n0,10\n0.2,10\n")
    clock = bench("power", fails)
    with pytest.raises(SensorFailed, match=r"covers 0.0 to 0.2, not .*: the meter must log from before the block"):
        metered(CsvMeter(path, clock="perf"), clock.work, seconds=0.3)
    assert 5000 < clock.ms < 6000  # five seconds after the work


def test_a_part_is_immutable() -> None:
    part = RepeatedWork(runs=2.5, seconds=0.1, joules=4.0)
    with pytest.raises(AttributeError):
        part.joules = 0.0  # type: ignore[misc]
