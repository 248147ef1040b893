"""Memory, energy and load of calls, times of the backward, and measurements that are unavailable."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import microtome as mt
from microtome import zoo
from microtome.devices.load import Sample
from microtome.devices.meters import Meter, MeterReading
from microtome.errors import BadQuery, SensorFailed, Unsupported
from microtome.profile import energy
from microtome.profile.load import _mean, _overlapping
from tests.profile.clock import Clock, Takes


class Steady(Meter):
    """Ten watts, whatever runs."""

    name = "steady"
    kind = "power"
    what = "ten watts"
    every_s = 0.005

    def read(self) -> MeterReading:
        return MeterReading(time.perf_counter(), watts=10.0)


class Breaks(Steady):
    """Fails at the fiftieth reading, in its own way."""

    def __init__(self, watts: float | None) -> None:
        self.watts = watts
        self.readings = 0

    def read(self) -> MeterReading:
        self.readings += 1
        if self.readings < 50:
            return super().read()
        if self.watts is None:
            raise SensorFailed("the cable came off")
        return MeterReading(time.perf_counter(), watts=self.watts)


def no_threads_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("microtome")]


# -- the backward ------------------------------------------------------------------------------------------------------


def test_backward_times_are_those_of_the_clock_and_add_up(clock: Clock) -> None:
    model = nn.Sequential(nn.Sequential(*(Takes(clock, 5) for _ in range(100))), Takes(clock, 5))
    x = torch.zeros(2, requires_grad=True)
    p = mt.profile(model, x, measure="time", backward=True, repeat=5, fake=False)
    # twice the 5 ns of the forward, a hundred times and once
    assert [p["0"].backward_s, p["1"].backward_s] == pytest.approx([1000e-9, 10e-9])
    for row in p:
        inside = sum(child.backward_s or 0.0 for child in p.children(row))
        assert (row.own.backward_s or 0.0) + inside == pytest.approx(row.backward_s)
    assert p.timing is not None
    assert p.timing.backward is not None
    assert p.timing.backward.count == 5
    assert "backward: a bare one takes" in str(p)
    assert x.grad is None


def test_recomputed_layers_belong_to_the_backward() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    def in_layers() -> float:
        p = mt.profile(Again(), torch.rand(256, 512), measure="time", backward=True, repeat=3)
        assert p.total.backward_s is not None
        return float(sum(p[f"inner.{at}"].backward_s for at in range(8)) / p.total.backward_s)

    # All that takes long is in the layers: of what ran again, a third, nothing is left over above them. Another process
    # may come between, so it is tried several times.
    assert any(in_layers() > 0.8 for _ in range(5))


def test_gradients_are_restored() -> None:
    model = nn.Linear(4, 4)
    model.weight.grad = before = torch.ones(4, 4)
    mt.profile(model, "2x4", measure=("time", "load"), backward=True, repeat=3)
    assert model.weight.grad is before
    assert torch.equal(before, torch.ones(4, 4))
    assert model.bias.grad is None


# -- depth -------------------------------------------------------------------------------------------------------------


def test_calls_below_the_depth_are_not_measured_and_the_rest_still_adds_up() -> None:
    p = mt.profile(*zoo.build("tiny-resnet"), measure="time", depth=1, repeat=3)
    assert p["layer1"].time_s > 0
    assert p["layer1.0"].time_s is None
    assert p["layer1"].own.time_s == p["layer1"].time_s
    assert sum(row.own.time_s or 0.0 for row in p) == pytest.approx(p.total.time_s)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_measured_peak_of_a_chain_is_in_closed_form() -> None:
    # 4 layers of 1024 x 1024 floats; each makes 1024 x 1024 from as much. At most two of those live beside the input,
    # which the caller holds: in layer 1 and later what it reads and what it makes.
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    with torch.no_grad():
        p = mt.profile(model, torch.rand(1024, 1024), measure="memory")
    unit = 4 * 1024 * 1024
    assert [p[str(at)].measured_peak_bytes // unit for at in range(4)] == [6, 7, 7, 7]
    assert p.total.measured_peak_bytes == 7 * unit
    assert p.memory is not None
    assert p.memory.rss_peak_bytes >= p.memory.rss_before_bytes > 0
    assert "measured peak" in str(p)


# -- energy ------------------------------------------------------------------------------------------------------------


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
    assert "an estimate from given coefficients, not measured" in str(p)


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


# -- load --------------------------------------------------------------------------------------------------------------


def test_load_is_sampled_and_attributed() -> None:
    p = mt.profile(*zoo.build("tiny-resnet"), measure="load", meter=Steady(), repeat=3)
    assert p.sampling is not None
    assert p.sampling.samples > 5
    assert set(p.sampling.missing) == {"gpu", "gpu_memory"}
    load = p["layer1"].load
    assert 0 < load.cpu <= 1
    assert 0 < load.memory < 1
    assert (load.gpu, load.watts) == (None, 10.0)
    assert load.samples > 0
    assert no_threads_left()


def test_a_sample_counts_for_the_calls_that_ran_in_it_by_the_time_they_overlap() -> None:
    samples = [Sample(0.0, 1.0, 0.2, None, 0.5, None, 10.0), Sample(1.0, 2.0, 0.6, None, 0.5, None, 30.0)]
    # One call from 0.5 to 1.0 and one from 0.75 to 1.75: a quarter of a second at 10 W, three quarters at 30 W.
    begins, ends = torch.tensor([[0.5, 0.75]]), torch.tensor([[1.0, 1.75]])
    assert _mean(samples, "watts", begins, ends) == [10.0, 25.0]
    assert _mean(samples, "cpu", begins, ends) == pytest.approx([0.2, 0.5])
    assert _mean(samples, "gpu", begins, ends) == [None, None]
    assert _overlapping(samples, begins, ends) == [1, 2]


def test_a_call_that_ran_between_the_samples_has_no_load() -> None:
    samples = [Sample(5.0, 6.0, 0.2, None, 0.5, None, 10.0)]
    assert _mean(samples, "cpu", torch.tensor([[1.0]]), torch.tensor([[2.0]])) == [None]


# -- tracr's place -----------------------------------------------------------------------------------------------------


def test_layer_metrics_have_their_old_names() -> None:
    p = mt.profile(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), "2x4", measure=("time", "load"), repeat=3)
    first, second = p.layer_metrics()
    assert list(first) == [
        *("layer_id", "layer_name", "layer_type", "output_bytes", "inference_time", "processing_energy"),
        *("communication_energy", "power_reading", "gpu_utilization", "memory_utilization", "cpu_utilization"),
        "total_energy",
    ]
    assert (first["layer_id"], first["layer_type"], first["output_bytes"]) == (0, "Linear", 2 * 8 * 4)
    assert first["inference_time"] == p["0"].time_s
    assert first["processing_energy"] is first["communication_energy"] is first["total_energy"] is None
    assert 0 <= first["cpu_utilization"] <= 100
    assert second["layer_type"] == "ReLU"


def test_layer_metrics_go_down_to_a_depth() -> None:
    p = mt.profile(*zoo.build("tiny-resnet"))
    assert [one["layer_name"] for one in p.layer_metrics(depth=1)][:3] == ["stem", "layer1", "layer2"]
    assert all(one["inference_time"] is None for one in p.layer_metrics())


# -- by module ---------------------------------------------------------------------------------------------------------


def test_a_module_costs_the_sum_of_its_runs() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.layer(self.layer(x))

    p = mt.profile(Twice(), "2x8", measure="time", repeat=3)
    group = p.by_module()["layer"]
    assert (group.runs, group.macs) == (2, 2 * 2 * 8 * 8)
    assert group.time_s == p["layer#0"].time_s + p["layer#1"].time_s


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"measure": "energy", "energy": "guess"},
            "'share', 'replay' or an EnergyModel, got 'guess'",
        ),
        ({"measure": "energy", "meter": "crystal"}, "expected a meter of .*, got 'crystal'"),
        (
            {"measure": "time", "device_time": "sand"},
            "device_time to be one of 'kernels', 'graph', got 'sand'",
        ),
        ({"measure": "time", "warmup": -1}, "expected warmup to be 0 passes or more, got -1"),
        ({"measure": "time", "depth": -1}, "expected depth to be 0 or more, got -1"),
        ({"measure": "time", "budget_s": float("nan")}, "expected budget_s to be above 0 seconds, got nan"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        mt.profile(nn.Linear(2, 2), "1x2", **options)


@pytest.mark.parametrize("text", ["flops=1", "flop", "flop=x", "flop=-1", "flop=0"])
def test_coefficients_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadQuery, match="coefficient"):
        mt.EnergyModel.parse(text)


def test_a_replay_has_no_backward() -> None:
    with pytest.raises(Unsupported, match="layers are replayed in the forward only"):
        mt.profile(nn.Linear(2, 2), "1x2", measure="energy", energy="replay", backward=True, meter=Steady(), repeat=3)


@pytest.mark.parametrize("measure", ["time", "memory", "energy", "load"])
def test_a_model_that_raises_in_the_third_pass_is_restored(measure: str) -> None:
    class Third(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Any:
            if not x.is_meta:
                seen.append(1)
            if len(seen) == 3:
                raise ValueError("the third pass")
            return self.norm(x)

    seen: list[int] = [] if measure != "memory" else [1, 1]
    model = Third()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="the third pass"):
        mt.profile(model, torch.rand(3, 4), measure=measure, meter=Steady(), repeat=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert no_threads_left()
    assert not model._forward_hooks


def test_fast_paths_that_hide_no_call_run_as_they_do_without_us() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.rand(2, 3, 8)
    with torch.no_grad():
        p = mt.profile(attention, (x, x, x), measure="time", repeat=3)
        q = mt.profile(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), x, measure="time", repeat=3)
    assert p.timing is not None
    assert q.timing is not None
    assert (p.timing.fast_paths, q.timing.fast_paths) == (True, False)
    assert "fused operators of torch" in str(q)
    assert torch.backends.mha.get_fastpath_enabled()


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


def test_load_of_calls_that_differ_from_pass_to_pass_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            if not x.is_meta:
                passes.append(1)
            for _ in range(1 + len(passes) % 3):
                x = self.layer(x)
            return x

    passes: list[int] = []
    with pytest.raises(Unsupported, match="so their times cannot be aligned"):
        mt.profile(Odd(), "2x4", measure="load", repeat=3)
    assert no_threads_left()


# -- what a review broke -----------------------------------------------------------------------------------------------


def test_a_call_that_fails_and_is_caught_has_its_time() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("caught")

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Fails(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            with suppress(ValueError):
                self.a(x)
            return self.b(x)

    p = mt.profile(Catches(), "2x4", measure=("time", "load"), repeat=3)
    assert 0 < p["b"].time_s < p.total.time_s


def test_a_mean_lies_between_the_samples_despite_rounding() -> None:
    edges = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).cumsum(0).tolist()
    samples = [Sample(begin, end, 1.0, None, None, None, None) for begin, end in pairwise(edges)]
    begins = torch.linspace(0.3, 50, 300, dtype=torch.float64).view(3, 100)
    means = _mean(samples, "cpu", begins, begins + 0.7)
    assert set(means) == {1.0}


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_load_of_a_model_with_checkpoints(reentrant: bool) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.b, self.a(x), use_reentrant=reentrant)

    p = mt.profile(Again(), torch.rand(2, 4), measure=("time", "load"), backward=True, repeat=3)
    assert p["b"].load is not None


def test_a_backward_inside_the_forward_is_no_part_of_the_backward(clock: Clock) -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Takes(clock, 1000), Takes(clock, 5)

        def forward(self, x: Tensor) -> Any:
            (force,) = torch.autograd.grad(self.a(x).sum(), x, create_graph=True)
            for _ in range(50):
                force = self.b(force)
            return force

    x = torch.rand(2, requires_grad=True)
    p = mt.profile(Forces(), x, measure="time", backward=True, repeat=5, fake=False)
    # That of fifty layers, 10 ns each. The one in the forward, of 2000 ns, is part of that.
    assert p.total.backward_s == pytest.approx(500e-9)
    assert p.total.own.backward_s == pytest.approx(0, abs=1e-12)
    assert p.total.time_s == pytest.approx(3250e-9)


def test_passes_that_take_other_branches_are_refused() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return (self.a if x.is_meta else self.b)(x)

    for measure in ("time", "memory", "load"):
        with pytest.raises(Unsupported, match="got 2, the first difference at 'b' in place of 'a'"):
            mt.profile(Other(), "2x4", measure=measure, repeat=3)


def test_inputs_are_the_same_in_every_pass_and_the_users_are_untouched() -> None:
    class Cache:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    class Doubles(nn.Module):
        def forward(self, x: Tensor, cache: Cache) -> Any:
            if not x.is_meta:
                values.append(float(x.flatten()[0]))
            cache.seen.append(x)
            return x.mul_(2)

    values: list[float] = []
    x, cache = torch.ones(2), Cache()
    mt.profile(Doubles(), (x, cache), measure="time", repeat=3)
    assert set(values) == {1.0}
    assert torch.equal(x, torch.ones(2))
    assert cache.seen == []


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


def test_a_file_has_every_column_also_where_the_first_row_lacks_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    p = mt.profile(model, "2x4", measure="energy", energy="replay", meter=Steady(), repeat=3, budget_s=4)
    assert "energy_j_low" in p.to_csv().splitlines()[0]


def test_a_row_of_its_own_has_no_spread_of_the_whole() -> None:
    p = mt.profile(*zoo.build("tiny-resnet"), measure=("time", "memory"), repeat=3)
    own = next(row for row in p.rows(depth=1) if row.type.endswith("(own)"))
    assert (own.spreads, own.load, own.measured_peak_bytes) == ({}, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "time", "repeat": 3.5}, "expected repeat to be an integer, got 3.5"),
        ({"measure": "time", "depth": "1"}, "expected depth to be an integer, got '1'"),
        ({"measure": "time", "budget_s": "3"}, "expected budget_s to be above 0 seconds, got '3'"),
        ({"measure": "energy", "meter": Steady}, "expected a Meter, its name or 'csv:FILE'"),
        ({"measure": True}, "expected measure to be one or several of 'time'"),
        ({"measure": ""}, "expected measure to be of"),
    ],
)
def test_options_of_a_wrong_type_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        mt.profile(nn.Linear(2, 2), "1x2", **options)


def test_an_estimate_without_watts_runs_nothing() -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    p = mt.profile(model, "2x8", measure="energy", energy=mt.EnergyModel(joules_per_flop=1.0))
    assert (p.total.energy_j, p.total.time_s) == (p.total.flops, None)


@pytest.mark.parametrize(
    ("watts", "reason"), [(None, "the cable came off"), (float("nan"), "to be finite and at least 0, got nan")]
)
def test_a_meter_that_fails_under_load_is_missing_with_its_reason(watts: float | None, reason: str) -> None:
    meter = Breaks(watts)
    meter.readings = 48
    p = mt.profile(nn.Linear(2, 2), "1x2", measure="load", meter=meter, repeat=3)
    assert p.sampling is not None
    assert reason in p.sampling.missing["watts"]
    assert p.total.load is not None
    assert p.total.load.watts is None


def test_an_estimate_at_a_depth_leaves_nothing_out() -> None:
    model, x = zoo.build("tiny-resnet")
    wish: Any = {"measure": "energy", "energy": mt.EnergyModel(joules_per_flop=1.0)}
    p = mt.profile(model, x, depth=1, **wish)
    assert p.total.energy_j == p.total.flops
    assert p["layer2"].energy_j == p["layer2"].flops
    assert p["layer2.0"].energy_j is None
