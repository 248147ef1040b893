"""Measurements on a GPU, against torch's own tables and counters."""

from __future__ import annotations

import threading
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import microtome as mt
from benchmarks.gpu.memory import peak_of
from benchmarks.gpu.times import kernels_of
from microtome import zoo
from microtome.errors import Unsupported

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]


def chain(width: int = 2048) -> nn.Module:
    """One layer with 8 times the work of another."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8 * width)).cuda()


def kernels(run: Any) -> float:
    return median(kernels_of(run) for _ in range(5))


@torch.no_grad()
def test_device_times_are_those_of_the_kernels() -> None:
    model, x = chain(), torch.randn(2048, 2048, device="cuda")
    for _ in range(3):
        model(x)
    p = mt.profile(model, x, measure="time", repeat=10)
    assert p.total.device_s == pytest.approx(kernels(lambda: model(x)), rel=0.05)
    assert p["2"].device_s > 4 * p["0"].device_s > 0
    assert sum(row.own.device_s or 0.0 for row in p) == pytest.approx(p.total.device_s)
    assert p.timing is not None
    assert p.timing.device_ratio == pytest.approx(1, abs=0.05)
    assert p["2"].spreads["device_s"].count == 10
    assert p["2"].is_launch_bound is False
    assert p.environment["gpu"] == torch.cuda.get_device_name()
    assert {"driver", "gpu_clock", "gpu_throttling"} <= p.environment.keys()


@torch.no_grad()
def test_a_small_layer_is_launch_bound() -> None:
    p = mt.profile(*on_gpu("tiny-resnet"), measure="time", repeat=5)
    assert all(row.is_launch_bound for row in p if row.height == 1 and row.device_s)
    assert "layers are launch-bound" in str(p)


def on_gpu(name: str) -> tuple[nn.Module, mt.Inputs]:
    model, inputs = zoo.build(name)
    return model.cuda(), mt.Inputs.of(inputs).to("cuda")


@torch.no_grad()
def test_a_cuda_graph_measures_about_the_same() -> None:
    model, x = chain(), torch.randn(2048, 2048, device="cuda")
    a = mt.profile(model, x, measure="time", repeat=10)
    b = mt.profile(model, x, measure="time", repeat=10, device_time="graph")
    assert b["2"].device_s == pytest.approx(a["2"].device_s, rel=0.2)
    assert "graph" in b["2"].spreads["device_s"].method


@torch.no_grad()
def test_a_failed_capture_raises_and_leaves_cuda_usable() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum())

    model, x = nn.Sequential(nn.Linear(4, 4), Reads()).cuda(), torch.ones(2, 4, device="cuda")
    with pytest.raises(Unsupported, match="(?s)cannot be captured in a CUDA graph: .*leave out device_time"):
        mt.profile(model, x, measure="time", repeat=3, device_time="graph")
    assert mt.profile(model, x, measure="time", repeat=3).total.device_s


def test_the_backward_has_device_times_too() -> None:
    model, x = chain(), torch.randn(2048, 2048, device="cuda")

    def step() -> None:
        output = model(x)
        torch.autograd.backward(output, torch.ones_like(output))
        model.zero_grad()

    step()
    p = mt.profile(model, x, measure="time", backward=True, repeat=10)
    whole = p.total.device_s + p.total.backward_device_s  # type: ignore[operator]
    assert whole == pytest.approx(kernels(step), rel=0.1)  # which makes the ones too
    assert p["2"].backward_device_s > 1.5 * p["2"].device_s
    assert p["2"].backward_s > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_recomputed_layers_belong_to_the_backward() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
    model = Again().cuda()
    again = mt.profile(model, x, measure="time", backward=True, repeat=5)["inner.0"]
    plain = mt.profile(model.inner, x, measure="time", backward=True, repeat=5)["0"]
    # The last layer does not run again: a checkpoint stops where it has all that it needs.
    assert again.backward_device_s - plain.backward_device_s == pytest.approx(plain.device_s, rel=0.3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["resnet18", "swin_t"])
def test_the_measured_peak_of_each_call_matches_torch(name: str) -> None:
    model: Any = getattr(zoo.import_torchvision().models, name)().eval().cuda()
    x = torch.randn(8, 3, 224, 224, device="cuda")
    model(x)
    beside = torch.cuda.memory_allocated() - sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    p = mt.profile(model, x, measure="memory")
    for row in p:
        with peak_of(model.get_submodule(row.path)) as found:
            model(x)
        _, _, index = row.address.partition("#")
        assert row.measured_peak_bytes + beside == pytest.approx(found[int(index or 0)], rel=0.02), row.address
    assert p.memory is not None
    assert p.memory.rss_peak_bytes >= p.memory.rss_before_bytes > 0


@torch.no_grad()
@pytest.mark.parametrize("method", ["share", "replay"])
def test_energy_of_layers_and_closure_make_the_whole(method: Any) -> None:
    model, x = chain(4096), torch.randn(4096, 4096, device="cuda")
    p = mt.profile(model, x, measure=("energy", "load"), energy=method, repeat=10)
    assert p.energy is not None
    assert p.energy.whole is not None
    assert p.total.energy_j + p.energy.closure_j == pytest.approx(p.energy.whole.median)  # type: ignore[operator]
    assert 20 < p.energy.idle_w < 400  # type: ignore[operator]
    watts = p.energy.whole.median / p.energy.pass_s  # type: ignore[operator]
    assert watts > 1.5 * p.energy.idle_w  # type: ignore[operator]
    assert p["2"].energy_j > 4 * p["0"].energy_j > 0
    assert 0 < p["2"].net_energy_j < p["2"].energy_j
    assert p["2"].spreads["energy_j"].low <= p["2"].energy_j <= p["2"].spreads["energy_j"].high
    assert p["2"].load.gpu > 0.2
    assert p["2"].load.watts > 1.2 * p.energy.idle_w  # type: ignore[operator]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("microtome")]


def test_a_running_profiler_is_left_alone() -> None:
    with (
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen,
        pytest.raises(Unsupported, match="torch's profiler is running"),
    ):
        mt.profile(*on_gpu("tiny-resnet"), measure="time", repeat=3)
    assert seen.key_averages()
