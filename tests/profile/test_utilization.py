"""The load of the machine while each call runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import microtome as mt
from microtome import zoo
from microtome.devices.utilization import Sample
from microtome.errors import Unsupported
from microtome.profile.utilization import _mean, _overlapping
from tests.profile.meters import Breaks, Steady, no_threads_left


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
