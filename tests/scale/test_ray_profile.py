"""Profiles of many models on a local Ray cluster: failures and killed workers do not end the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery, NoMatch
from microtome.results.profiles import ProfileFailure
from microtome.scale.ray import profile
from tests.scale.cluster import cluster_marks, local_cluster

pytest.importorskip("ray", reason="Ray is not installed: pip install 'microtome[ray]'")

pytestmark = cluster_marks


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with local_cluster(1) as started:
        yield started


class KillOnce(nn.Linear):
    """Kills the process that runs it, the first time."""

    def __init__(self, marker: Path) -> None:
        super().__init__(2, 3)
        self.marker = str(marker)

    def forward(self, x: Tensor) -> Tensor:
        try:
            Path(self.marker).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass
        return super().forward(x)


class Fail(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no kernel\nfor this")


def test_a_zoo_is_profiled_in_order_and_failures_have_a_reason(cluster: Any, tmp_path: Path) -> None:
    steps = []
    names = ["zoo:tiny-resnet", "zoo:tiny-vti", "zoo:tiny-decoder"]
    found = profile(names, progress=lambda name, done, total: steps.append((name, done, total)))
    assert list(found) == names
    assert sorted(name for name, _, _ in steps) == sorted(names)
    assert [(done, total) for _, done, total in steps] == [(1, 3), (2, 3), (3, 3)]
    for name in ("zoo:tiny-resnet", "zoo:tiny-decoder"):
        here = mt.profile(*zoo.build(name.removeprefix("zoo:")))
        one = found[name]
        assert isinstance(one, mt.Profile)
        assert (one.total.params, one.total.macs) == (here.total.params, here.total.macs)
    failure = found["zoo:tiny-vti"]
    assert isinstance(failure, ProfileFailure)
    assert failure.kind == "NoMatch"
    assert failure.reason.startswith("the zoo has no model 'tiny-vti'. Did you mean 'tiny-vit'?")
    assert mt.load(found.to_json(tmp_path / "zoo.json")) == found


def test_modules_with_their_inputs_are_profiled_and_a_killed_worker_is_repeated(cluster: Any, tmp_path: Path) -> None:
    models = {"killed": (KillOnce(tmp_path / "marker"), torch.ones(1, 2)), "failed": (Fail(), torch.ones(1))}
    found = profile(models, measure=["time"], repeat=3)
    assert (tmp_path / "marker").exists()
    one = found["killed"]
    assert isinstance(one, mt.Profile)
    assert one.total.macs == 6
    assert found.models[0].time_s is not None
    assert str(found["failed"]) == "RuntimeError: no kernel"


def test_inputs_are_those_of_all_named_models(cluster: Any) -> None:
    one = profile(["zoo:tiny-resnet"], "4x3x16x16")["zoo:tiny-resnet"]
    assert isinstance(one, mt.Profile)
    assert one.inputs == "x 4x3x16x16"


def test_mistakes_are_errors(cluster: Any) -> None:
    with pytest.raises(BadQuery, match="expected several names of models, got 'zoo:tiny-vit': put it in a list"):
        profile("zoo:tiny-vit")
    with pytest.raises(BadQuery, match="'phases' is no option for many models: profile one with mt.profile"):
        profile(["zoo:tiny-vit"], phases=("prefill",))
    with pytest.raises(BadQuery, match="the inputs are in the mapping of models already: leave out `inputs`"):
        profile({"a": (nn.ReLU(), torch.ones(1))}, "1x2")
    with pytest.raises(BadQuery, match="expected a node with 1 CPU, 1 GPU for each of the tasks that profile models"):
        profile(["zoo:tiny-vit"], num_gpus=1)
    assert len(profile([])) == 0
    with pytest.raises(NoMatch, match="no model is named 'a': expected one of"):
        profile([])["a"]
