"""Law: tensors of a recording that carry the same number are of one run, whatever happens in it."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import microtome as mt
from microtome.capture.store import DiskStore, open_folder
from microtome.errors import BadFile

RECORDINGS = Path(__file__).parent / "recordings"


class Stopped(Exception):
    pass


class Uneven(nn.Module):
    """Runs `a`, and then `b` unless the input says to leave it out or to raise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, way: str = "both") -> Tensor:
        y: Tensor = self.a(x)
        if way == "raise":
            raise Stopped
        return y if way == "skip" else self.b(y)


def _run(model: nn.Module, value: int, way: str) -> None:
    with contextlib.suppress(Stopped):
        model(torch.tensor([float(value)]), way)


def _by_run(recording: Any, name: str) -> dict[int | None, float]:
    series = recording[name]
    assert len(series.runs) == len(series)
    return {run: tensor.item() for run, tensor in zip(series.runs, series, strict=True)}


def _check(recording: Any, values: list[int], ways: list[str]) -> None:
    of_a, of_b = _by_run(recording, "a"), _by_run(recording, "b")
    assert sorted(of_a.values()) == values
    assert of_b.items() <= of_a.items()
    assert sorted(of_b.values()) == [value for value, way in zip(values, ways, strict=True) if way == "both"]


@settings(deadline=None, max_examples=15)
@given(ways=st.lists(st.sampled_from(["both", "skip", "raise"]), min_size=1, max_size=12), on_disk=st.booleans())
def test_tensors_of_a_run_have_its_number(tmp_path_factory: Any, ways: list[str], on_disk: bool) -> None:
    ways = ["both", *ways]
    model, to = Uneven(), tmp_path_factory.mktemp("rec") / "acts" if on_disk else None
    with mt.record(model, ["a", "b"], to=to) as rec:
        for value, way in enumerate(ways):
            _run(model, value, way)
    _check(rec, list(range(len(ways))), ways)
    runs = rec["a"].runs
    assert runs == sorted(run for run in runs if run is not None)
    assert rec["a"][1:].runs == runs[1:]


@pytest.mark.parametrize("on_disk", [False, True])
def test_tensors_of_runs_that_overlap_in_threads_have_their_numbers(tmp_path: Path, on_disk: bool) -> None:
    draw = random.Random(0)
    ways = [draw.choice(["both", "skip", "raise"]) for _ in range(60)] + ["both"]
    meet = threading.Barrier(3)

    class Meets(Uneven):
        def forward(self, x: Tensor, way: str = "both") -> Tensor:
            if x.item() < 3:
                meet.wait(60)  # three runs are open at once
            return super().forward(x, way)

    def work(first: int) -> None:
        for value in range(first, len(ways), 3):
            _run(model, value, ways[value])

    model = Meets()
    with mt.record(model, ["a", "b"], to=tmp_path / "acts" if on_disk else None) as rec:
        threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    _check(rec, list(range(len(ways))), ways)


def test_numbers_go_on_where_a_recording_is_appended_to(tmp_path: Path) -> None:
    model = Uneven()
    for first in (0, 3):
        with mt.record(model, ["a", "b"], to=tmp_path / "acts", append=True):
            for value in range(first, first + 3):
                _run(model, value, "skip" if value == 1 else "both")
    recording = mt.load(tmp_path / "acts")
    assert recording["a"].runs == [0, 1, 2, 3, 4, 5]
    assert recording["b"].runs == [0, 2, 3, 4, 5]


def test_a_recording_without_numbers_loads() -> None:
    recording = open_folder(RECORDINGS / "schema-1")
    for name in recording:
        assert recording[name].runs == [None] * len(recording[name])
        assert recording[name][0] is not None


def test_a_line_with_too_few_numbers_is_damaged(tmp_path: Path) -> None:
    with DiskStore(tmp_path, {"model": "m", "selectors": []}) as store:
        store.add("a", torch.zeros(2), run=0)
        store.add("a", torch.zeros(2), run=1)
    index = tmp_path / "index.jsonl"
    data = json.loads(index.read_text())
    data.pop("sum")
    data["pieces"]["a"]["runs"] = [0]
    index.write_text(json.dumps(data) + "\n")
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": 2', '"schema": 1'))
    with pytest.raises(BadFile, match="expected 2 numbers of runs, got 1"):
        open_folder(tmp_path)
