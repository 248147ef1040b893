"""The time from the beginning of a run to the end of each call, which planning reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.devices.activity import Activity, Launch
from microtome.profile import timing
from microtome.profile.accelerator import _elapsed_times
from microtome.profile.call_tree import CallTree
from microtome.results.rows import Row
from tests.profile.clock import Clock, Takes


class Block(nn.Module):
    """20 of its own between a layer of 100 and one of 3, and 7 after them."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.a, self.b, self.clock = Takes(clock, 100), Takes(clock, 3), clock

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.clock.now += 20
        x = self.b(x)
        self.clock.now += 7
        return x


def nanoseconds(p: Any) -> dict[str, int]:
    return {row.address: round(1e9 * row.elapsed_s) for row in p if row.elapsed_s is not None}


def test_the_end_of_a_call_counts_all_that_ran_before_it(clock: Clock) -> None:
    model = nn.Sequential(Block(clock), Takes(clock, 1000))
    p = mt.profile(model, torch.zeros(2), measure="time", repeat=3, fake=False)
    # 0.a: 100; 0.b: 100 + 20 + 3; 0: and 7; 1: and 1000, with which the run ends
    assert nanoseconds(p) == {"": 1130, "0": 130, "0.a": 100, "0.b": 123, "1": 1130}
    assert p.total.elapsed_s == p.total.time_s
    assert p["0.a"].elapsed_device_s is None


def test_calls_below_the_depth_have_none(clock: Clock) -> None:
    model = nn.Sequential(Block(clock), Takes(clock, 1000))
    p = mt.profile(model, torch.zeros(2), measure="time", repeat=3, fake=False, depth=1)
    assert nanoseconds(p) == {"": 1130, "0": 130, "1": 1130}


def test_the_cost_of_time_stamps_is_subtracted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_stamp_cost", lambda: 2e-9)
    p = mt.profile(
        nn.Sequential(Block(clock), Takes(clock, 1000)), torch.zeros(2), measure="time", repeat=3, fake=False
    )
    # Of calls that ended before: 2 each. Of calls that are open, itself included and the root not: half of that.
    # 0.a: 100, with 0 and 0.a open; 0.b: 123, after 0.a, with 0 and 0.b open; 0: 130, after 0.a and 0.b, itself open;
    # the root: 1130, after 4.
    assert nanoseconds(p) == {"": 1122, "0": 125, "0.a": 98, "0.b": 119, "1": 1130 - 6 - 1}


def test_stamped_counts_as_inside_does_at_the_root() -> None:
    rows = [Row(address="", path=""), Row(address="a", path="a", parent=""), Row(address="b", path="b", parent="")]
    tree = CallTree(rows)
    assert tree.stamp_counts() == [2, 0.5, 1.5]
    assert tree.inside()[0] == tree.stamp_counts()[0]


def test_real_ends_are_in_the_order_in_which_calls_end() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.little = nn.Linear(256, 256)
            self.much = nn.Sequential(*(nn.Linear(256, 256) for _ in range(100)))

        def forward(self, x: Tensor) -> Tensor:
            return self.much(self.little(x))

    p: Any = mt.profile(Uneven(), "64x256", measure="time", repeat=3)
    assert 0 < p["little"].elapsed_s < p["much.50"].elapsed_s < p["much.99"].elapsed_s
    assert p["much.99"].elapsed_s < p["much"].elapsed_s < p.total.elapsed_s


def test_files_hold_it_and_those_of_before_can_be_read(tmp_path: Path) -> None:
    p = mt.profile(*zoo.build("tiny-resnet"), measure="time", repeat=3)
    file = tmp_path / "p.json"
    p.to_json(file)
    assert mt.load(file) == p
    assert "elapsed_s" in p.to_csv().splitlines()[0]
    data = json.loads(file.read_text())
    for row in data["calls"]:
        del row["elapsed_s"], row["elapsed_device_s"]
    file.write_text(json.dumps(data))
    old = mt.load(file)
    assert old.total.elapsed_s is None
    assert old.total.time_s == p.total.time_s


def test_elapsed_times_are_none_unless_measured() -> None:
    assert mt.profile(*zoo.build("tiny-resnet")).total.elapsed_s is None


def test_device_work_is_summed_by_when_it_was_launched() -> None:
    # the root launches 1 s; its first call 2 s; the root 4 s; its second call, in which a third launches 8 s, 16 s
    labels = ["forward", "forward:0", "forward:1", "forward:0", "forward:2", "forward:3", "forward:2", "forward:0"]
    labels += ["forward:0", "none"]
    at = {1: 1.0, 2: 2.0, 3: 4.0, 5: 8.0, 6: 16.0}
    launches = [Launch(mark, "kernel", seconds) for mark, seconds in at.items()]
    twice = Activity(labels * 2, launches + [Launch(mark + 10, "kernel", 10 * seconds) for mark, seconds in at.items()])
    once = [31.0, 3.0, 31.0, 15.0]
    assert _elapsed_times(twice, 2, 4).tolist() == [once, [10 * seconds for seconds in once]]


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("way", ["kernels", "graph"])
def test_elapsed_device_time_includes_earlier_launches(way: Any) -> None:
    width = 2048
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8 * width)).cuda()
    p: Any = mt.profile(model, torch.randn(width, width, device="cuda"), measure="time", repeat=10, device_time=way)
    assert p["0"].elapsed_device_s == pytest.approx(p["0"].device_s, rel=0.02)
    assert p["1"].elapsed_device_s == pytest.approx(p["0"].device_s + p["1"].device_s, rel=0.05)
    assert p.total.elapsed_device_s == pytest.approx(p.total.device_s, rel=0.02)
    assert p.total.elapsed_s == p.total.time_s


def test_files_with_the_older_names_are_read(clock: Clock, tmp_path: Path) -> None:
    p = mt.profile(nn.Sequential(Takes(clock, 100)), torch.zeros(2), measure="time", repeat=3, fake=False)
    file = tmp_path / "p.json"
    file.write_text(p.to_json().replace('"elapsed_', '"until_'))
    assert '"until_s"' in file.read_text()
    assert mt.load(file) == p
