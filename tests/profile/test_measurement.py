"""Memory of calls, times of the backward, and invalid or unavailable measurements."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import microtome as mt
from microtome import zoo
from microtome.compat.torchstat import ModelHook
from microtome.engine.snapshot import WriteBackups
from microtome.errors import BadQuery, Unsupported
from tests.profile.clock import Clock, Takes
from tests.profile.meters import Steady, no_threads_left


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
    assert "backward: without time stamps" in str(p)
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


def test_calls_below_the_depth_are_not_measured_and_the_rest_still_adds_up() -> None:
    p = mt.profile(*zoo.build("tiny-resnet"), measure="time", depth=1, repeat=3)
    assert p["layer1"].time_s > 0
    assert p["layer1.0"].time_s is None
    assert p["layer1"].own.time_s == p["layer1"].time_s
    assert sum(row.own.time_s or 0.0 for row in p) == pytest.approx(p.total.time_s)


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
    assert "fast paths of torch, which skip calls, are disabled" in str(q)
    assert torch.backends.mha.get_fastpath_enabled()


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
        # Also without a measurement.
        ({"depth": -1}, "expected depth to be 0 or more, got -1"),
        ({"repeat": "a"}, "expected repeat to be an integer, got 'a'"),
        ({"warmup": -1}, "expected warmup to be 0 passes or more, got -1"),
        ({"budget_s": -1}, "expected budget_s to be above 0 seconds, got -1"),
        ({"meter": "foo"}, "expected a meter of .*, got 'foo'"),
        ({"energy": "foo"}, "expected energy to be 'share', 'replay' or an EnergyModel, got 'foo'"),
        ({"device_time": "foo"}, "expected device_time to be one of 'kernels', 'graph', got 'foo'"),
        ({"measure": [], "depth": "a"}, "expected depth to be an integer, got 'a'"),
    ],
)
def test_options_of_a_wrong_type_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        mt.profile(nn.Linear(2, 2), "1x2", **options)


def test_copies_of_inputs_are_freed_without_garbage_collection() -> None:
    model, x = nn.Sequential(nn.Linear(5, 3), nn.ReLU()), torch.randn(7, 5)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            mt.profile(model, x, measure=["time", "memory"], repeat=3)
        copies = [one for one in gc.get_objects() if type(one) is Tensor and one.shape == x.shape and one is not x]
    finally:
        gc.enable()
    assert copies == []


class _Weighted(nn.Module):
    """A model with a weight that it only reads, an expanded buffer, and an expanded tensor that is no buffer."""

    ones: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("ones", torch.ones(1).expand(4))
        self.shared = torch.ones(1)
        self.expanded = self.shared.expand(4)

    def forward(self, x: Tensor) -> Tensor:
        self.shared.data.add_(1)
        return x * self.weight * self.ones * self.expanded


def test_measuring_restores_the_storage_of_an_expanded_tensor() -> None:
    model = _Weighted(torch.ones(4))
    mt.profile(nn.Sequential(model), torch.ones(4), measure="time", repeat=3, depth=0)
    assert (model.shared.tolist(), model.expanded.tolist()) == ([1], [1, 1, 1, 1])
    mt.trace(model, torch.ones(4), fake=False)
    assert model.shared.tolist() == [1]
    with pytest.warns(UserWarning, match="no formula"):
        ModelHook(model, (4,))
    assert model.shared.tolist() == [1]


def test_measuring_copies_no_weight_that_is_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    restore = WriteBackups.restore

    def restore_counting(backups: WriteBackups) -> None:
        copied.extend(len(copy) for _, copy in backups._copies)
        restore(backups)

    monkeypatch.setattr(WriteBackups, "restore", restore_counting)
    mt.profile(nn.Linear(4, 4), torch.ones(4), measure="time", repeat=3)
    mt.profile(_Weighted(torch.ones(4)), torch.ones(4), measure="time", repeat=3)
    assert set(copied) == {4}  # the bytes of the one number that is written to


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_weight_in_a_file_mapped_for_reading_can_be_measured(tmp_path: Path) -> None:
    numpy.ones(4, dtype="float32").tofile(tmp_path / "weight")
    weight = torch.from_numpy(numpy.memmap(tmp_path / "weight", dtype="float32", mode="r"))
    p = mt.profile(_Weighted(weight), torch.ones(4), measure="time", repeat=3)
    assert p.timing is not None
