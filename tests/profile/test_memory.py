"""Memory over a run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.results.measurements import Alive


def test_live_bytes_of_a_chain_are_those_of_its_values() -> None:
    """Two ReLUs on 4 floats, without gradients: the first makes 16 bytes beside the input's 16; while the second
    runs, the input, its argument and its result live."""
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    with torch.no_grad():
        line = mt.profile(model, torch.ones(4)).timeline
    assert line is not None
    assert line.live_bytes == (32, 48)
    assert line.calls == (1, 2)
    assert line.peak == 1
    assert line.alive == (Alive("input", "input", 16), Alive("op", "0", 16), Alive("op", "1", 16))


@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-vit", "tiny-decoder"])
@pytest.mark.parametrize("backward", [False, True])
def test_tensors_at_the_peak_sum_to_it(name: str, backward: bool) -> None:
    profile = mt.profile(*zoo.build(name), backward=backward)
    line = profile.timeline
    assert line is not None
    assert line.peak is not None
    assert sum(one.nbytes for one in line.alive) == line.live_bytes[line.peak]
    assert max(line.live_bytes[: line.forward]) == profile.total.peak_bytes
    assert (len(line.live_bytes) > line.forward) is backward


def test_files_of_before_have_no_timeline(tmp_path: Path) -> None:
    profile = mt.profile(*zoo.build("tiny-resnet"))
    profile.to_json(tmp_path / "p.json")
    data = json.loads((tmp_path / "p.json").read_text())
    assert mt.load(tmp_path / "p.json") == profile
    del data["timeline"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert mt.load(tmp_path / "old.json").timeline is None


NORMS = {
    "batch": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
    "batch of the input": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3)),
    "batch without weights": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)),
    "batch without statistics": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)),
    "layer": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(6), nn.GELU()),
    "group": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()),
    "instance": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)),
}


def saved_by_autograd(model: nn.Module, x: Tensor) -> int:
    """The bytes that autograd saves for the backward, without parameters, buffers and the input."""
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        if tensor.untyped_storage().data_ptr() not in given:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(saved.values())


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_norms_take_the_memory_of_a_real_run_in_every_precision(name: str, training: bool, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model, x = NORMS[name]().to(dtype).train(training), torch.ones(2, 3, 8, 8, dtype=dtype)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "autocast" else nullcontext()
    with autocast:
        profiles = [mt.profile(model, x, backward=True, fake=fake) for fake in (False, None, True)]
        saved = saved_by_autograd(model, x)
    real, *others = [
        [(row.address, row.own.saved_bytes, row.own.moved_bytes, row.peak_bytes) for row in profile.calls]
        for profile in profiles
    ]
    assert others == [real, real]
    assert [(p.total.saved_bytes, p.peak_bytes) for p in profiles] == [(saved, profiles[0].peak_bytes)] * 3
