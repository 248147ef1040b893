"""The energy of calls: shared by time, replayed and estimated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery, Unsupported
from microtome.profile import energy
from tests.profile.meters import Breaks, Steady, no_threads_left


def test_shares_of_ten_watts_are_ten_joules_a_second() -> None:
    p = mt.profile(*zoo.build("tiny-resnet"), measure="energy", meter=Steady(), repeat=3, budget_s=2)
    use = p.energy
    assert use is not None
    assert use.whole is not None
    assert use.whole.low <= use.whole.median <= use.whole.high
    assert use.idle_w == pytest.approx(10)
    assert p.total.energy_j == pytest.approx(use.whole.median)
    assert p.total.net_energy_j == pytest.approx(0, abs=1e-6 * use.whole.median)  # ten watts, idle or not
    assert use.closure_j == pytest.approx(0, abs=1e-12)
    seconds = {row.address: max(row.own.time_s or 0.0, 0.0) for row in p}  # one may come out below zero, by noise
    part = seconds["stem.0"] / sum(seconds.values())
    assert p["stem.0"].energy_j / use.whole.median == pytest.approx(part)
    assert p["layer1"].spreads["energy_j"].method == "the whole model's energy, shared by time"
    assert no_threads_left()


def test_replayed_layers_and_closure_make_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "_REPLAY_S", 0.1)
    monkeypatch.setattr(energy, "_MAX_REPLAY_S", 0.1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.ReLU())
    p = mt.profile(model, "8x64", measure="energy", energy="replay", meter=Steady(), repeat=3, budget_s=8)
    use = p.energy
    assert use is not None
    assert use.whole is not None
    assert p.total.energy_j + use.closure_j == pytest.approx(use.whole.median)  # type: ignore[operator]
    assert p["0"].energy_j == p["1"].energy_j > 0  # one of the two was run
    assert p.total.own.energy_j is None
    assert p["0"].spreads["energy_j"].count == 5
    p.to_json(tmp_path / "p.json")
    assert mt.load(tmp_path / "p.json") == p


def test_layers_for_which_no_time_is_left_have_no_energy_and_the_reason() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64 + at) if at == 0 else nn.Linear(63 + at, 64 + at) for at in range(4)))
    p = mt.profile(model, "8x64", measure="energy", energy="replay", meter=Steady(), repeat=3, budget_s=1)
    assert p.energy is not None
    assert len(p.energy.not_replayed) == 3
    for address, why in p.energy.not_replayed.items():
        assert p[address].energy_j is None
        assert why == "the budget of 1 s was spent before it"
    assert "not replayed: 3 layers" in str(p)


def test_an_estimate_is_linear_in_its_coefficients() -> None:
    model = nn.Linear(8, 8, bias=False)
    p = mt.profile(model, "2x8", measure="energy", energy=mt.EnergyModel(joules_per_flop=1.0, joules_per_byte=0.5))
    # 2 x 8 x 8 multiply-accumulates, two operations each; 2 x 8 and 8 x 8 floats read, 2 x 8 written.
    assert p.total.energy_j == 2 * 2 * 8 * 8 + 0.5 * 4 * (16 + 64 + 16)
    assert (p.total.net_energy_j, p.energy and p.energy.method) == (None, "estimate")
    assert "energy: estimated from coefficients, not measured" in str(p)


def test_without_a_sensor_the_reason_and_remedy_are_reported() -> None:
    p = mt.profile(nn.Linear(2, 2), "1x2", measure="energy", meter="jetson", repeat=3)
    assert (p.total.energy_j, p.energy) == (None, None)
    assert p.unavailable["energy"].startswith("no sensor: jetson: ")
    assert "on a Jetson, a kernel with the driver ina3221" in p.unavailable["energy"]
    assert "no energy: no sensor" in str(p)
    assert p.total.time_s is not None


@pytest.mark.parametrize(
    ("watts", "reason"),
    [(None, "the cable came off"), (float("nan"), "to be finite and at least 0, got nan"), (-3.0, "got -3.0")],
)
def test_a_sensor_that_fails_costs_the_energy_and_nothing_else(watts: float | None, reason: str) -> None:
    p = mt.profile(nn.Linear(2, 2), "1x2", measure=("time", "energy"), meter=Breaks(watts), repeat=3, budget_s=4)
    assert p.total.energy_j is None
    assert reason in p.unavailable["energy"]
    assert p.total.time_s is not None
    assert no_threads_left()


@pytest.mark.parametrize("text", ["flops=1", "flop", "flop=x", "flop=-1", "flop=0"])
def test_coefficients_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadQuery, match="coefficient"):
        mt.EnergyModel.parse(text)


def test_a_replay_has_no_backward() -> None:
    with pytest.raises(Unsupported, match="layers are replayed in the forward only"):
        mt.profile(nn.Linear(2, 2), "1x2", measure="energy", energy="replay", backward=True, meter=Steady(), repeat=3)


@pytest.mark.slow
def test_calls_at_the_depth_are_replayed_as_a_whole() -> None:
    p = mt.profile(*zoo.build("tiny-resnet"), measure="energy", energy="replay", depth=0, meter=Steady(), repeat=3)
    assert p.energy is not None
    assert p.energy.not_replayed == {}
    replayed = p.total.spreads["energy_j"]
    assert (replayed.method, replayed.median) == (energy.METHODS["replay"], p.total.energy_j)
    assert p["layer1"].energy_j is None


def test_an_estimate_has_the_backwards_operations_and_refuses_to_leave_out_its_bytes() -> None:
    p = mt.profile(
        nn.Linear(8, 8, bias=False), "2x8", measure="energy", energy=mt.EnergyModel(joules_per_flop=1.0), backward=True
    )
    assert p.total.energy_j == p.total.flops + p.total.backward_flops  # type: ignore[operator]
    with pytest.raises(Unsupported, match="the bytes that a backward moves are not counted"):
        mt.profile(nn.Linear(2, 2), "1x2", measure="energy", energy=mt.EnergyModel(joules_per_byte=1.0), backward=True)


@pytest.mark.slow
def test_layers_that_differ_in_an_attribute_alone_are_replayed_both() -> None:
    class Loops(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times = times

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = x + 1
            return x

    model = nn.Sequential(Loops(1), Loops(10))
    p = mt.profile(model, "2x2", measure="energy", energy="replay", meter=Steady(), repeat=3, budget_s=8)
    assert p["1"].energy_j != p["0"].energy_j  # of two that are the same, one is run, and both have what it took


def test_an_estimate_without_watts_runs_nothing() -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    p = mt.profile(model, "2x8", measure="energy", energy=mt.EnergyModel(joules_per_flop=1.0))
    assert (p.total.energy_j, p.total.time_s) == (p.total.flops, None)


def test_an_estimate_at_a_depth_leaves_nothing_out() -> None:
    model, x = zoo.build("tiny-resnet")
    wish: Any = {"measure": "energy", "energy": mt.EnergyModel(joules_per_flop=1.0)}
    p = mt.profile(model, x, depth=1, **wish)
    assert p.total.energy_j == p.total.flops
    assert p["layer2"].energy_j == p["layer2"].flops
    assert p["layer2.0"].energy_j is None
