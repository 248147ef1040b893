"""The table of profiles of many models, and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadFile
from microtome.results.profiles import ProfiledModel, ProfileFailure, Profiles

FAILURE = ProfileFailure("BuildFailed", "it needs a file")


def profiles(**options: object) -> Profiles:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    one = mt.profile(model, torch.ones(1, 4), **options)  # type: ignore[call-overload]
    return Profiles((ProfiledModel("small", one), ProfiledModel("broken", None, FAILURE, "node-7")))


def test_the_table_has_totals_and_reasons() -> None:
    text = str(profiles()).splitlines()
    assert text[0] == "2 models, 1 failed"
    assert text[1].split() == ["model", "\u2503", "params", "\u2503", "MACs", "\u2503", "weights", "\u2503", "peak"]
    # (4 + 1) x 8 + (8 + 1) x 2 parameters of 4 bytes, 4 x 8 + 8 x 2 MACs.
    assert text[3].split("\u2502")[:4] == ["small  ", "     58 ", "   48 ", "   232 B "]
    assert text[5] == "broken failed: BuildFailed: it needs a file"


def test_measured_times_are_shown() -> None:
    measured = profiles(measure=["time"], repeat=3)
    assert "time" in str(measured).splitlines()[1]
    assert measured.models[0].time_s is not None
    assert measured.models[1].time_s is None


def test_profiles_are_a_mapping() -> None:
    found = profiles()
    assert (found.keys(), len(found), "small" in found, "other" in found) == (["small", "broken"], 2, True, False)
    assert dict(found) == dict(found.items()) == {"small": found["small"], "broken": FAILURE}
    assert found.values() == [found["small"], FAILURE]
    assert found.failures == {"broken": FAILURE}
    assert repr(found) == "<Profiles of 2 models, 1 failed>"
    assert str(ProfileFailure("Killed", "")) == "Killed"


def test_operators_without_a_formula_are_noted() -> None:
    class Unknown(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.svdvals(x)

    one = mt.profile(Unknown(), torch.ones(3, 3))
    assert one.coverage.unknown
    assert "1 model ran operators without a formula: see `coverage` of odd" in str(
        Profiles((ProfiledModel("odd", one),))
    )


def test_files_have_every_model(tmp_path: Path) -> None:
    found = Profiles((ProfiledModel("vit", mt.profile(*zoo.build("tiny-vit"))), ProfiledModel("broken", None, FAILURE)))
    assert mt.load(found.to_json(tmp_path / "models.json")) == found
    assert "| `vit` |" in found.to_markdown()
    header, first, second = found.to_csv().splitlines()
    assert header.startswith("name,type,inputs,params,macs")
    assert first.startswith("vit,ViT,x 2x3x32x32,")
    assert second.endswith("BuildFailed: it needs a file")


@pytest.mark.parametrize("change", [{"profile": None}, {"name": "broken"}])
def test_contradictions_in_a_file_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    data = json.loads(profiles().to_json())
    data["models"][0] |= change
    (tmp_path / "models.json").write_text(json.dumps(data))
    with pytest.raises(BadFile, match="expected a profile or a failure of 'small'|expected different names of models"):
        mt.load(tmp_path / "models.json")
