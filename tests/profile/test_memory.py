"""Memory over a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

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
