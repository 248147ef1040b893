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
    assert sorted(of_a.values()) == [value for value, way in zip(values, ways, strict=True) if way != "raise"]
    assert of_b.items() <= of_a.items()
    assert sorted(of_b.values()) == [value for value, way in zip(values, ways, strict=True) if way == "both"]
    for name, found in (("a", of_a), ("b", of_b)):
        stats = recording.stats(name)
        assert (stats.count, stats.max) == (len(found), max(found.values()))


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


@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt])
@pytest.mark.parametrize("on_disk", [False, True])
def test_an_interrupted_run_is_not_kept_in_part(on_disk: bool, error: type[BaseException], tmp_path: Path) -> None:
    class Interrupted(Uneven):
        def forward(self, x: Tensor, way: str = "both") -> Tensor:
            y: Tensor = self.a(x)
            if x.item() == 2:
                assert on_disk or [len(rec["a"]), rec.stats("a").count] == [2, 2]  # nor is it visible before
                raise error
            return self.b(y)

    model, to = Interrupted(), tmp_path / "acts" if on_disk else None
    rec = mt.record(model, ["a", "b"], to=to)

    def run() -> None:
        with rec:
            for value in range(4):
                model(torch.tensor([float(value)]))

    with pytest.raises(error):
        run()
    assert (rec.totals.runs, rec.totals.records, len(rec["a"]), len(rec["b"])) == (2, 4, 2, 2)
    if not on_disk:
        return
    with mt.record(model, ["a", "b"], to=to, append=True):
        for value in (3, 4):
            model(torch.tensor([float(value)]))
    recording = mt.load(tmp_path / "acts")
    for name in "ab":
        assert [one.item() for one in recording[name]] == [0, 1, 3, 4]
        assert recording.stats(name).count == 4
    assert (recording.count, recording.nbytes) == (8, 8 * 4)


@pytest.mark.parametrize("on_disk", [False, True])
def test_statistics_alone_are_of_whole_runs(on_disk: bool, tmp_path: Path) -> None:
    model, to = Uneven(), tmp_path / "acts" if on_disk else None
    with mt.record(model, ["a", "b"], to=to, keep="stats") as rec:
        for value, way in enumerate(["both", "raise", "both"]):
            _run(model, value, way)
    assert [(rec.stats(name).count, rec.stats(name).max) for name in "ab"] == [(2, 2.0), (2, 2.0)]


@pytest.mark.parametrize("complete", [True, False])
def test_a_run_that_spans_shards_is_discarded_from_all(complete: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, {"model": "m", "selectors": []}, shard_bytes=16) as store:
        for run in range(3):
            store.begin_run(run)
            for name in ("a", "a", "only" if run == 1 else "b"):
                store.add(name, torch.full((64,), float(run)), run=run)
            store.end_run(run, complete=complete or run != 1)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    with open_folder(tmp_path) as recording:
        assert recording["a"].runs == ([0, 0, 1, 1, 2, 2] if complete else [0, 0, 2, 2])
        assert [one[0].item() for one in recording["a"]] == recording["a"].runs
        assert recording.stats("a").count == 64 * len(recording["a"])
        assert set(recording) == {"a", "b", "only"} - (set() if complete else {"only"})


def test_a_run_that_is_open_when_the_store_is_closed_is_discarded(tmp_path: Path) -> None:
    for first in (0, 2):
        with DiskStore(tmp_path, {"model": "m", "selectors": []}, append=True) as store:
            assert store.next_run == first
            for run in (first, first + 1):
                store.begin_run(run)
                store.add("a", torch.full((2,), float(run)), run=run)
                if run == first:
                    store.end_run(run)
    assert open_folder(tmp_path)["a"].runs == [0, 2]


def test_a_recording_of_nothing_but_a_run_that_raised_leaves_no_folder(tmp_path: Path) -> None:
    with mt.record(Uneven(), "a", to=tmp_path / "acts") as rec:
        _run(rec._model, 0, "raise")
    assert not (tmp_path / "acts").exists()


def test_a_limit_counts_the_runs_that_ended(tmp_path: Path) -> None:
    model = Uneven()
    for to in (None, tmp_path / "acts"):
        with mt.record(model, ["a", "b"], to=to, limit=2 * 1028 if to is None else 8) as rec:
            for value, way in enumerate(["both", "raise", "both"]):
                _run(model, value, way)
        assert rec.dropped == 2
        assert rec.stats("a").count == rec.stats("b").count == 2


def test_a_run_that_ends_at_a_stop_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    head = mt.split(model, "1x2", at="1")[0]
    with mt.record(model, "0") as rec:
        head(torch.ones(1, 2))
    assert len(rec["0"]) == 1


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
