"""Arguments of recordings, features and profiles that are refused before Ray starts anything."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from microtome.errors import BadQuery, MicrotomeError, NoMatch, NotAModule
from microtome.scale.ray import extract, features, profile, profiles, record, recording


class Dataset:
    """The part of a data set of Ray that lists columns."""

    def columns(self) -> list[str]:
        return ["x", "id"]


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a task or the cluster was used")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray without a cluster: whatever would start something fails."""
    ray = SimpleNamespace(data=SimpleNamespace(Dataset=Dataset), nodes=refuse, remote=refuse, put=refuse)
    for module in (recording, features, profiles):
        monkeypatch.setattr(module, "import_ray", lambda: ray)


def run(function: Any, folder: Path, **changes: Any) -> None:
    arguments: dict[str, Any] = {"dataset": Dataset(), "model": nn.Linear(2, 2), "at": "", "inputs": "x", **changes}
    function(**arguments, **({"to": folder} if function is record and "to" not in changes else {}))


@pytest.mark.parametrize("function", [record, extract])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dataset": [1, 2]}, BadQuery, "expected a ray.data.Dataset, such as .*, got a list"),
        ({"dataset": None}, BadQuery, "expected a ray.data.Dataset, such as .*, got None"),
        *[
            ({"inputs": wrong}, BadQuery, "expected inputs= as the name of a column, a list of names, a dict of")
            for wrong in (5, [], {}, (), [1], {"a": 1}, {"x"})
        ],
        ({"inputs": "y"}, NoMatch, "the data set has no column 'y'"),
        *[({"workers": wrong}, BadQuery, "expected workers of at least 1, got") for wrong in (0, -2, "2", True, 1.5)],
        *[({"batch_size": wrong}, BadQuery, "expected batch_size of at least 1, got") for wrong in (0, True, "8")],
        ({"model": 5}, NotAModule, "expected a torch.nn.Module, got int 5"),
        ({"at": "nothing"}, NoMatch, "nothing"),
        ({"num_cpus": "2"}, BadQuery, "expected a number of 0 or more as num_cpus, got '2'"),
        ({"num_gpus": -1}, BadQuery, "expected a number of 0 or more as num_gpus, got -1"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(
    function: Any, change: dict[str, Any], error: type[MicrotomeError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run(function, tmp_path / "acts", **change)
    assert not (tmp_path / "acts").exists()


@pytest.mark.parametrize("to", [None, 5])
def test_a_recording_needs_a_folder(to: Any, tmp_path: Path) -> None:
    with pytest.raises(BadQuery, match=f"expected the path of a folder as `to`, got {to}"):
        run(record, tmp_path, to=to)


def test_progress_of_a_recording_is_a_function(tmp_path: Path) -> None:
    with pytest.raises(BadQuery, match="expected progress to be a function of the RecordTotals, got 3"):
        run(record, tmp_path / "acts", progress=3)


NET = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("models", "options", "error", "message"),
    [
        (None, {}, BadQuery, "expected names of models, such as 'torchvision:resnet50', .* got None"),
        ([NET], {}, BadQuery, r"or a dict of names and \(module, inputs\), got a Linear"),
        (NET, {}, BadQuery, r"or a dict of names and \(module, inputs\), got a Linear"),
        (["zoo:tiny-vit", 5], {}, BadQuery, "expected names of models, .*, got 5"),
        ({"a": NET}, {}, BadQuery, r"expected \(module, inputs\) for the model 'a', got a Linear"),
        ({"a": (NET,)}, {}, BadQuery, r"expected \(module, inputs\) for the model 'a', got a tuple"),
        ({5: (NET, torch.ones(2))}, {}, BadQuery, r"expected \(module, inputs\) for the model 5"),
        ({"a": (5, None)}, {}, NotAModule, "expected a torch.nn.Module, got int 5"),
        (["zoo:tiny-vit"], {"foo": 1}, BadQuery, "mt.profile has no option 'foo': expected one of backward, "),
        (["zoo:tiny-vit"], {"mesure": "time"}, BadQuery, "mt.profile has no option 'mesure': did you mean 'measure'?"),
        (["zoo:tiny-vit"], {"measure": ["tim"]}, BadQuery, "expected measure to be of 'time', .*, got 'tim'"),
        (["zoo:tiny-vit"], {"measure": ["time"], "repeat": 0}, BadQuery, "expected repeat to be at least"),
        (["zoo:tiny-vit"], {"convention": "mine"}, MicrotomeError, "mine"),
        (["zoo:tiny-vit"], {"num_cpus": None}, BadQuery, "expected a number of 0 or more as num_cpus, got None"),
    ],
)
def test_a_mistake_of_a_profile_is_named_before_any_task(
    models: Any, options: dict[str, Any], error: type[MicrotomeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        profile(models, **options)
