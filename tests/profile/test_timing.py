"""Times of calls. No test asserts how long something takes; benchmarks do."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery, Unsupported
from microtome.results.measurements import Timing
from tests.profile.clock import Clock, Takes


def timed(model: nn.Module, inputs: Any, **options: Any) -> Any:
    return mt.profile(model, inputs, measure=("time",), repeat=3, **options)


class Uneven(nn.Module):
    """A layer that takes a hundred times what the other does, and glue that takes as long as that one."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.much = nn.Sequential(*(Takes(clock, 5) for _ in range(100)))
        self.little = Takes(clock, 5)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += 5
        out: Tensor = self.little(self.much(x))
        return out


def test_times_of_calls_are_those_of_the_clock_and_add_up(clock: Clock) -> None:
    p = timed(Uneven(clock), torch.zeros(2), fake=False)
    # a hundred layers of 5 ns; one of 5 ns; and 5 ns of the model's own
    times = [p["much"].time_s, p["little"].time_s, p.total.own.time_s, p.total.time_s]
    assert times == pytest.approx([500e-9, 5e-9, 5e-9, 510e-9])
    for row in p:
        inside = sum(child.time_s for child in p.children(row))
        assert row.own.time_s + inside == pytest.approx(row.time_s, abs=1e-12)
    assert sum(row.time_s for row in p.rows(granularity=1)) == pytest.approx(p.total.time_s)


def test_a_time_has_a_spread_a_count_and_how_it_was_measured(tmp_path: Path) -> None:
    p = timed(*zoo.build("tiny-resnet"))
    spread = p.total.spreads["time_s"]
    assert (spread.count, spread.median) == (3, p.total.time_s)
    assert spread.method
    assert isinstance(p.timing, Timing)
    assert (p.timing.bare.count, p.timing.ratio > 0, p.timing.stamp_s >= 0) == (3, True, True)
    assert p.environment["torch"] == torch.__version__
    p.to_json(tmp_path / "p.json")
    assert mt.load(tmp_path / "p.json") == p
    assert "time: median of 3 passes after" in str(p)


def test_a_compiled_model_is_said_to_be_timed_as_python() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    assert not timed(model, "2x8").timing.compiled
    compiled: Any = torch.compile(model, backend="eager")
    p = timed(compiled, "2x8", depth=0)
    assert (p.timing.compiled, p.timing.is_same_code) == (True, False)
    assert "compiled code runs as Python while calls are timed" in str(p)
    assert "time stamps add" not in str(p)


def test_times_are_none_unless_measured() -> None:
    p = mt.profile(*zoo.build("tiny-resnet"))
    assert (p.total.time_s, p.total.spreads, p.timing) == (None, {}, None)
    assert "time" not in str(p)


def test_a_module_that_runs_twice_has_two_times() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.layer(self.layer(x))

    p = timed(Twice(), "2x8")
    assert p["layer#0"].time_s > 0
    assert p["layer#1"].time_s > 0


def test_the_budget_ends_the_passes_but_not_before_three() -> None:
    p = mt.profile(*zoo.build("tiny-resnet"), measure="time", repeat=1000, budget_s=1e-6)
    assert p.total.spreads["time_s"].count == 3


def test_progress_is_reported_for_every_pass() -> None:
    told: list[tuple[str, int, int]] = []
    timed(*zoo.build("tiny-resnet"), warmup=2, progress=lambda *step: told.append(step))
    assert told == [("warming up", at, 2) for at in range(2)] + [("timing", at, 3) for at in range(3)]


def test_the_model_is_restored_when_a_pass_fails() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.passes = 0

        def forward(self, x: Tensor) -> Any:
            self.passes += 1
            if self.passes == 4 and not x.is_meta:
                raise ValueError("the fourth pass")
            return self.norm(x)

    model = Breaks()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="the fourth pass"):
        timed(model, torch.rand(3, 4))
    assert model.passes == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert gc.isenabled()


def test_calls_that_differ_from_pass_to_pass_are_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.passes = 0

        def forward(self, x: Tensor) -> Any:
            self.passes += 1
            for _ in range(1 + self.passes % 3):
                x = self.layer(x)
            return x

    with pytest.raises(Unsupported, match="so their times cannot be aligned: expected . calls, got ."):
        timed(Odd(), "2x4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": ("weight",)}, "expected measure to be of 'time', 'memory'"),
        ({"measure": "time", "repeat": 0}, "expected repeat to be at least 3, for a spread, got 0"),
        ({"measure": "time", "budget_s": 0}, "expected budget_s to be above 0 seconds, got 0"),
    ],
)
def test_unsupported_measurements_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        mt.profile(nn.Linear(2, 2), "1x2", **options)


def test_a_model_without_values_has_no_times() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(Unsupported, match="expected tensors on the CPU and on devices of one type, got meta"):
        timed(model, torch.empty(1, 2, device="meta"))
