"""Links, pipes and devices in place of files: nothing outside the folder is written, and nothing blocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import microtome as mt
from microtome.capture.store import DiskStore
from microtome.errors import BadFile
from microtome.files.reading import json_memory_bound, parse_json, read_bytes
from microtome.files.writing import AtomicFile, write_atomically, write_buffers
from tests.files.samples import Sample, net, samples
from tests.files.test_corruption import KINDS

MANIFEST = {"model": "Net", "selectors": ["0"]}


@pytest.fixture(autouse=True)
def never_waits() -> Iterator[None]:
    """Fail instead of waiting forever."""

    def ring(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file outside of the folder, which is the same afterwards."""
    file = tmp_path / "victim"
    file.write_text("not a byte of this changes")
    yield file
    assert file.read_text() == "not a byte of this changes"
    assert [one.name for one in tmp_path.iterdir() if one.name not in ("victim", "folder")] == []


def record(folder: Path, *, append: bool = False) -> None:
    with DiskStore(folder, MANIFEST, append=append, shard_bytes=64) as store:
        for _ in range(3):
            store.add("0", torch.zeros(32))


def save(folder: Path) -> None:
    mt.split(net(), torch.randn(1, 4), at="0").save(folder)


# -- writing -----------------------------------------------------------------------------------------------------------

LINKS = [".lock", ".manifest.json.tmp", ".shard-00000.safetensors.tmp", ".shard-00001.safetensors.tmp"]


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
@pytest.mark.parametrize("name", LINKS)
def test_recording_to_a_hostile_folder_leaves_the_targets_of_links(
    tmp_path: Path, victim: Path, name: str, link: Any
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    link(folder / name, victim)
    try:
        record(folder)
    except BadFile as error:
        refusal = str(error)
        assert name == ".lock", refusal
    else:
        assert name != ".lock"
        assert len(mt.load(folder)["0"]) == 3


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
@pytest.mark.parametrize("name", ["index.jsonl", "manifest.json", "shard-00003.safetensors"])
def test_appending_to_a_recording_with_links_leaves_their_targets(tmp_path: Path, name: str, link: Any) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    record(folder)
    if (folder / name).exists():
        (folder / name).rename(outside)
    else:
        outside.write_text("anything")
    link(folder / name, outside)
    before = outside.read_bytes()
    if name == "index.jsonl":
        with pytest.raises(BadFile, match=r"cannot write '.*index.jsonl': expected a regular file of this folder, got"):
            record(folder, append=True)
    else:
        record(folder, append=True)
        assert len(mt.load(folder)["0"]) == 6
    assert outside.read_bytes() == before


def test_a_lock_that_is_a_link_is_named(tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(BadFile, match=r"'.*\.lock': expected a regular file of this folder, got a link; remove it"):
        record(folder)


@pytest.mark.parametrize("name", ["plan.json", "stage0.safetensors"])
def test_saving_stages_to_a_hostile_folder_leaves_the_targets_of_links(tmp_path: Path, victim: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    save(folder)
    assert mt.load_stage(net, folder, 1).index == 1
    assert not any(file.is_symlink() for file in folder.iterdir())


def test_of_two_that_write_one_file_at_once_each_writes_it_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    one, other = AtomicFile(file), AtomicFile(file)
    for partial, data in ((one, b"one"), (other, b"other")):
        write_buffers(partial.descriptor, [data])
    one.commit(sync=False)
    assert file.read_bytes() == b"one"
    other.commit(sync=False)
    assert file.read_bytes() == b"other"
    assert list(tmp_path.iterdir()) == [file]


def test_saving_stages_leaves_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "stage-notes.safetensors").write_text("mine")
    save(tmp_path)
    assert (tmp_path / "stage-notes.safetensors").read_text() == "mine"


def test_write_errors_raise_bad_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(BadFile, match="cannot write '.*': Is a directory"):
        save(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadFile, match="expected a folder, got the file '.*file'"):
        save(tmp_path / "file")


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")

    def fail(descriptor: int) -> None:
        write_buffers(descriptor, [b"half"])
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomically(file, fail)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "before"


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    return samples(tmp_path_factory.mktemp("samples"))


def _pipe(file: Path) -> None:
    os.mkfifo(file)


def _device(file: Path) -> None:
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [_pipe, _device, Path.mkdir])
def test_files_that_are_not_regular_are_refused_at_once(known: dict[str, Sample], kind: str, make: Any) -> None:
    sample = known[kind]
    aside = sample.file.with_name("aside")
    sample.file.rename(aside)
    try:
        make(sample.file)
        with pytest.raises(
            sample.errors, match="expected a regular file|there is no file|holds no|got none|cannot be read"
        ):
            sample.read()
    finally:
        sample.file.rmdir() if make is Path.mkdir else sample.file.unlink()
        aside.rename(sample.file)
    sample.read()


@pytest.mark.parametrize("path", ["../stage1.safetensors", "/etc/passwd", "stage0.safetensors", ""])
def test_a_stage_is_read_from_its_folder_alone(tmp_path: Path, path: str) -> None:
    save(tmp_path / "folder")
    os.link(tmp_path / "folder" / "stage1.safetensors", tmp_path / "stage1.safetensors")
    plan = tmp_path / "folder" / "plan.json"
    plan.write_text(plan.read_text().replace('"stage1.safetensors"', f'"{path}"'))
    with pytest.raises(BadFile, match=r"plan.json' is corrupt: ValueError: expected the file 'stage1.safetensors' for"):
        mt.load_stage(net, tmp_path / "folder", 1)


def test_a_histogram_of_more_bins_than_counts_is_refused(tmp_path: Path) -> None:
    with DiskStore(tmp_path, MANIFEST, histogram=(2, 0.0, 1.0)) as store:
        store.add("0", torch.zeros(3))
    manifest, index = tmp_path / "manifest.json", tmp_path / "index.jsonl"
    text = index.read_text().partition(',"sum"')[0] + "}\n"
    index.write_text(text.replace('"bins":2', '"bins":1000000000').replace('"counts":[3,0]', '"counts":[]'))
    manifest.write_text('{"kind": "recording", "schema": 1, "manifest": {}}')
    with pytest.raises(BadFile, match="line 1 of .*index.jsonl.*expected a count for each of 1000000000 bins, got 0"):
        mt.load(tmp_path)


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_negative_sum_of_squares_is_refused(is_exact: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, MANIFEST) as store:
        store.add("0", torch.zeros(3))
    text = (tmp_path / "index.jsonl").read_text().partition(',"sum"')[0] + "}\n"
    sums = ',"total":"0x0p0","power":"0x0p0"'
    assert sums in text
    if is_exact:
        changed = text.replace(sums, ',"total":"0x0p0","power":"-0x1p0"')
    else:  # as an older microtome wrote it
        changed = text.replace(sums, "").replace('"squares":0.0', '"squares":-1.0')
    (tmp_path / "index.jsonl").write_text(changed)
    (tmp_path / "manifest.json").write_text('{"kind": "recording", "schema": 1, "manifest": {}}')
    with pytest.raises(BadFile, match="line 1 of .*index.jsonl.*expected squares of '0' of at least 0, got -1.0"):
        mt.load(tmp_path)


CUT_WHILE_READ = """
import os, sys
import torch
import microtome as mt
from microtome.errors import BadFile
from tests.files.samples import net

folder = sys.argv[1]
with mt.load(folder + "/acts") as recording:
    tensor = recording["0"][0]
    os.truncate(folder + "/acts/shard-00000.safetensors", 0)
    assert tensor.isfinite().all()
    try:
        recording["0"][1]
    except BadFile as error:
        print(error)
stage = mt.load_stage(net, folder + "/stages", 1)
os.truncate(folder + "/stages/stage1.safetensors", 0)
assert all(weight.isfinite().all() for weight in stage.model[2].parameters())
print("alive")
"""


@pytest.mark.integration
def test_a_file_that_is_cut_while_its_tensors_are_used_does_not_end_the_process(tmp_path: Path) -> None:
    model = net()
    with mt.record(model, ["0"], to=tmp_path / "acts"):
        for _ in range(2):
            model(torch.ones(4096, 4))
    save(tmp_path / "stages")
    run = subprocess.run([sys.executable, "-c", CUT_WHILE_READ, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "shard-00000.safetensors': expected 262288 bytes, got 0" in run.stdout
    assert run.stdout.endswith("alive\n")


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "piece", ['{"":0},', "[],", "{},", "1000,", "1.5,", '"ab",', '"é",', '{"a":{"b":1.5}},', "[[1]],"]
)
def test_parsing_json_takes_less_memory_than_computed(piece: str) -> None:
    import tracemalloc

    text = ("[" + piece * 50_000 + '"\U0001f600"]').encode()
    tracemalloc.start()
    value = parse_json(text, "it")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(value) == 50_001
    assert peak <= json_memory_bound(text)


def test_a_file_that_would_take_too_much_memory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    file.write_text("[1, 2]")
    with pytest.raises(BadFile, match="'.*large.json': expected at most 4 B, got 6 B"):
        read_bytes(file, 4)
    with pytest.raises(BadFile, match="it is too large: reading it may take .* of memory, the limit is 100 B"):
        parse_json("[1, 2]", "it", 100)
    with pytest.raises(BadFile, match="it is not JSON: RecursionError"):
        parse_json("[" * 100_000, "it")
