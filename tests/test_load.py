"""Folders that `mt.load` and `mt.load_stage` read, told apart by what their files hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import microtome as mt
from microtome.capture.store import DiskStore
from microtome.errors import BadFile, BadQuery, BadWeights
from tests.files.samples import net
from tests.plan import synthetic

MANIFEST = {"model": "Net", "selectors": ["0"]}


def save_plan(folder: Path) -> Path:
    """Write the result of a plan to a file that is named as that of a split model is."""
    cuts, times = synthetic.cuts([400, 40]), synthetic.profile([0.1, 0.2])
    plan = mt.plan(cuts, edge=times, cloud=times, link=mt.Link("8Mbps"), costs=synthetic.costs(cuts))
    return Path(plan.to_json(folder / "plan.json"))


def test_a_folder_with_a_plan_is_no_split_model(tmp_path: Path) -> None:
    file = save_plan(tmp_path)
    assert isinstance(mt.load(file), mt.Plan)
    with pytest.raises(BadFile, match=rf"got the folder '{tmp_path}': load a file in it, such as '{file}'"):
        mt.load(tmp_path)
    with pytest.raises(BadFile, match=r"holds no split model: expected one in plan.json, got a file of kind 'plan'"):
        mt.load_stage(net, tmp_path, 0)


def test_text_in_place_of_the_name_of_a_file_is_refused() -> None:
    profile = mt.profile(nn.Linear(2, 2), "1x2")
    message = r'expected the name of a file, got {}: write it with to_json\("p.json"\), and pass that name'
    with pytest.raises(BadFile, match=message.format("JSON text")):
        mt.load(profile.to_json())
    with pytest.raises(BadFile, match=message.format("JSON text")):
        mt.plan(profile.to_json())
    with pytest.raises(BadFile, match=message.format("text of 3 lines")):
        mt.load(profile.to_csv())
    with pytest.raises(BadQuery, match="expected the name of a file or a folder, or a list of folders, got a Profile"):
        mt.load(profile)  # type: ignore[arg-type]


def test_a_recording_beside_a_plan_is_loaded(tmp_path: Path) -> None:
    with DiskStore(tmp_path, MANIFEST) as store:
        store.add("0", torch.zeros(3))
    save_plan(tmp_path)
    assert len(mt.load(tmp_path)["0"]) == 1


def test_stages_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"kind": "split", "schema": 1}')
    with pytest.raises(BadFile, match=r"expected version 2 of a split model, got 1: save the stages again"):
        mt.load_stage(net, tmp_path, 0)


@pytest.mark.parametrize("at", ["0", "1"])
def test_stages_of_a_model_of_the_same_class_are_refused(tmp_path: Path, at: str) -> None:
    def deep() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).eval()

    mt.split(deep(), "1x4", at=at).save(tmp_path)
    with pytest.raises(BadWeights, match=r"expected the Sequential that was saved, got one without the module '2'"):
        mt.load_stage(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path, "tail")


def test_stages_whose_weights_fit_a_model_with_other_calls_are_refused(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self, repeat: int) -> None:
            super().__init__()
            self.first, self.last, self.repeat = nn.Linear(4, 4), nn.Linear(4, 4), repeat

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = x
            for _ in range(self.repeat):
                x = self.first(x)
                kept = kept + x
            return self.last(x) + kept

    mt.split(Net(9).eval(), "1x4", at="last").save(tmp_path)
    with pytest.raises(BadWeights, match=r"got one of other layers or calls \(40 parameters"):
        mt.load_stage(lambda: Net(2), tmp_path, "tail")
