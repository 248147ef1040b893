"""Recordings after kills and damage: every index is of one run, and a flipped bit is an error or harmless."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import microtome as mt
from microtome.capture.store import DiskStore, open_folder
from microtome.errors import BadFile

MANIFEST = {"model": "Net", "selectors": ["blocks.*"]}

#: Records runs without end. Each output holds the number of its run; their sizes differ, so that shards end anywhere.
RUNS = """
import sys
import threading
import torch
from torch import nn
import microtome as mt
from microtome.capture.store import disk

disk.DiskStore.__init__.__defaults__ = tuple(
    2048 if default == 64 * disk.MIB else default for default in disk.DiskStore.__init__.__defaults__
)

class Fill(nn.Module):
    def __init__(self, elements):
        super().__init__()
        self.elements = elements

    def forward(self, number):
        return torch.full((self.elements,), float(number))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Fill(1500), Fill(200), Fill(3)

    def forward(self, number):
        return self.a(number), self.b(number), self.c(number)

net, number = Net(), int(sys.argv[2])
with mt.record(net, ["a", "b", "c"], to=sys.argv[1], append=True) as rec:
    while True:
        net(torch.tensor(float(number)))
        number += 1
        print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.integration
def test_every_index_is_of_one_run_after_kills_and_appends(tmp_path: Path) -> None:
    chance, runs = random.Random(0), 0
    for number in range(6):
        first = 1000 * number
        command = [sys.executable, "-c", RUNS, str(tmp_path / "acts"), str(first)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        until = first + chance.randrange(20, 200)
        for line in process.stdout:
            if int(line) >= until:
                break
        process.send_signal(signal.SIGKILL)  # inside the run after that, or while a shard is written
        process.communicate()
        with open_folder(tmp_path / "acts") as recording:
            own, *others = ([float(one[0]) for one in recording[name]] for name in "abc")
            assert others == [own, own]
            assert [int(recording.stats(name).count) for name in "abc"] == [n * len(own) for n in (1500, 200, 3)]
            runs = len(own)
    assert runs > 0


def test_what_a_run_gave_before_a_kill_is_left_out(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "acts", MANIFEST, shard_bytes=16)
    for name in ("a", "b"):
        store.begin_run()
        store.add(name, torch.zeros(64))
        if name == "a":
            store.end_run()
    store.flush()
    shutil.copytree(tmp_path / "acts", tmp_path / "killed")  # as a kill would leave it
    store.add("b", torch.ones(64))
    store.end_run()
    store.close()
    with open_folder(tmp_path / "killed") as recording:
        assert recording.names == ["a"]
    with DiskStore(tmp_path / "killed", MANIFEST, append=True) as store:
        store.add("b", torch.full((64,), 2.0))
    with open_folder(tmp_path / "killed") as recording:
        assert [one[0].item() for one in recording["b"]] == [2.0]
    with open_folder(tmp_path / "acts") as recording:
        assert [one[0].item() for one in recording["b"]] == [0.0, 1.0]


def test_lines_of_a_run_without_its_last_are_left_out(tmp_path: Path) -> None:
    with DiskStore(tmp_path, MANIFEST, shard_bytes=16) as store:
        store.add("a", torch.zeros(64))
        store.begin_run()
        for _ in range(3):
            store.add("b", torch.zeros(64))
        store.end_run()
    lines = (tmp_path / "index.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) > 2
    (tmp_path / "index.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:30])
    with open_folder(tmp_path) as recording:
        assert recording.names == ["a"]


def test_a_shard_ends_with_a_run_where_the_run_is_small(tmp_path: Path) -> None:
    with DiskStore(tmp_path, MANIFEST, shard_bytes=100) as store:
        for _ in range(10):
            store.begin_run()
            for name in "abc":
                store.add(name, torch.zeros(4))
            store.end_run()
    shards = len(list(tmp_path.glob("*.safetensors")))
    assert shards == 4  # of three runs of 48 bytes each, and a last one of one run


def recording_in(folder: Path) -> Path:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with mt.record(net, ["0", "1"], to=folder):
        for _ in range(3):
            net(torch.randn(1, 2))
    return folder


def contents(folder: Path) -> Any:
    with open_folder(folder) as recording:
        stats = {name: recording.stats(name).as_dict() for name in recording}
        return recording.manifest, stats, {name: [one.tolist() for one in recording[name]] for name in recording}


def read_or_refused(folder: Path) -> Any:
    """The contents, or the error that refuses to read them."""
    try:
        return contents(folder)
    except BadFile as error:
        return error


def test_any_flipped_bit_is_an_error_that_names_the_file_or_changes_nothing(tmp_path: Path) -> None:
    folder = recording_in(tmp_path / "acts")
    expected, chance, caught = contents(folder), random.Random(0), Counter[str]()
    for file in sorted(file for file in folder.iterdir() if file.name != ".lock"):
        data = file.read_bytes()
        places = [len(data) - 1, *(chance.randrange(len(data)) for _ in range(150))]  # the last newline too
        for place, bit in [(place, chance.randrange(8)) for place in places]:
            file.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            found = read_or_refused(folder)
            if isinstance(found, BadFile):
                assert file.name in str(found)
                caught[file.name] += 1
            else:
                assert found == expected, (file.name, place, bit)
        file.write_bytes(data)
    assert caught["index.jsonl"] == caught["shard-00000.safetensors"] == 151
    assert caught["manifest.json"] > 100
    assert contents(folder) == expected


def test_a_damaged_tensor_is_named_and_the_others_load(tmp_path: Path) -> None:
    folder = recording_in(tmp_path)
    file = folder / "shard-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with open_folder(folder) as recording:
        assert len([*recording["0"]]) == 3
        with pytest.raises(
            BadFile, match="shard-00000.safetensors' is corrupt: ValueError: tensor '1:2': expected the checksum"
        ):
            [*recording["1"]]


def test_recordings_without_checksums_are_read_and_appended_to(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(Path(__file__).parent / "recordings" / "schema-1", folder)
    with open_folder(folder) as recording:
        assert [len(recording[name]) for name in ("0", "1")] == [3, 3]
        expected = [one.tolist() for one in recording["1"]]
        assert all(one.clamp(0).tolist() == after for one, after in zip(recording["0"], expected, strict=True))
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with mt.record(net, ["0", "1"], to=folder, append=True):
        net(torch.ones(1, 2))
    with open_folder(folder) as recording:
        assert len(recording["0"]) == 4
        assert [one.tolist() for one in recording["1"]][:3] == expected


class Interrupting(dict[str, torch.Tensor]):
    """The waiting tensors of a batch; a signal comes as the next is added."""

    is_armed = True

    def __setitem__(self, key: str, tensor: torch.Tensor) -> None:
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt
        super().__setitem__(key, tensor)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("after", [0, 1])
def test_a_tensor_whose_addition_is_interrupted_is_dropped(before: int, after: int, tmp_path: Path) -> None:
    with DiskStore(tmp_path / "acts", MANIFEST) as store:
        for number in range(before):
            store.add("a", torch.full((2,), float(number)))
        store._batch.tensors = Interrupting(store._batch.tensors)
        with pytest.raises(KeyboardInterrupt):
            store.add("a", torch.zeros(3))
        for number in range(after):
            store.add("a", torch.full((4,), float(before + number)))
    if before + after:
        assert [tensor.mean().item() for tensor in open_folder(tmp_path / "acts")["a"]] == [*range(before + after)]


def test_an_interrupt_at_any_moment_of_an_addition_does_not_keep_a_recording_from_closing(tmp_path: Path) -> None:
    for moment in range(1, 60):
        folder, seen = tmp_path / str(moment), 0

        def interrupt(frame: FrameType, event: str, _: object, moment: int = moment) -> None:
            nonlocal seen
            seen += event in ("call", "c_return")  # where CPython handles signals
            if seen == moment:
                sys.setprofile(None)
                raise KeyboardInterrupt

        store, added = DiskStore(folder, MANIFEST), 0
        try:
            sys.setprofile(interrupt)
            while True:
                store.add("a", torch.ones(3))
                added += 1
        except KeyboardInterrupt:
            store.close()
        if added:
            assert len(open_folder(folder)["a"]) in (added, added + 1)  # the interrupted one may be complete
        assert "microtome-writer" not in [thread.name for thread in threading.enumerate()]
