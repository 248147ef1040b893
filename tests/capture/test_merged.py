"""Recordings that are loaded as one: series in order, statistics of the same bits, and folders of parts."""

from __future__ import annotations

import json
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import microtome as mt
from microtome.capture.store import DiskStore, Histogram, Stats
from microtome.capture.store.exact_sum import ExactSum, split_float
from microtome.capture.store.parts import PartsFolder, part_name, write_part
from microtome.capture.store.rows import ROWS, RowRange
from microtome.errors import BadFile, BadQuery

MANIFEST = {"model": "Net", "layout": "1234", "selectors": ["fc"], "reduce": None}
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
WIDE = st.floats(allow_nan=False, allow_infinity=False)
#: Tensors of a few elements, of very different magnitudes.
TENSORS = st.lists(st.lists(FLOATS, min_size=1, max_size=5), min_size=1, max_size=8)


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def bits(stats: Stats) -> str:
    """Every field, floats with all digits; unlike `==`, it tells -0.0 from 0.0."""
    return json.dumps(stats.as_dict())


def split_at(items: list[Any], cuts: list[int]) -> list[list[Any]]:
    ends = sorted(cut % (len(items) + 1) for cut in cuts)
    return [items[begin:end] for begin, end in zip([0, *ends], [*ends, len(items)], strict=True)]


# -- exact sums --------------------------------------------------------------------------------------------------------


@given(st.lists(WIDE, max_size=20), st.randoms(use_true_random=False))
def test_an_exact_sum_is_rounded_once_in_any_order(numbers: list[float], random: Any) -> None:
    shuffled = random.sample(numbers, len(numbers))
    sums = [ExactSum(), ExactSum()]
    for total, order in zip(sums, (numbers, shuffled), strict=True):
        for number in order:
            total.add(*split_float(number))
    assert sums[0] == sums[1]
    assert repr(sums[0]) == repr(sums[1])
    assert ExactSum.parse(repr(sums[0])) == sums[0]
    try:
        expected = math.fsum(numbers)
    except OverflowError:  # of a partial sum, too
        return
    assert sums[0].divide(1) == expected


@pytest.mark.parametrize("text", ["", "1.5", "0xp0", "0x3", "0x3p1e5", f"0x{'f' * 2001}p0"])
def test_what_is_no_exact_sum_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number such as 0x3p-1, got"):
        ExactSum.parse(text)


# -- statistics --------------------------------------------------------------------------------------------------------


@given(TENSORS, st.lists(st.integers(0, 100), max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_statistics_have_the_same_bits_in_any_order_and_groups(
    values: list[list[float]], cuts: list[int], random: Any, counts: bool
) -> None:
    histogram = Histogram(3, -1.0, 1.0) if counts else None
    whole = Stats(histogram=histogram)
    for one in values:
        whole.add(tensor(one))
    groups = []
    for group in split_at(random.sample(values, len(values)), cuts):
        groups.append(whole.new())
        for one in group:
            groups[-1].add(tensor(one))
    merged = whole.new()
    for stats in random.sample(groups, len(groups)):
        merged.merge(Stats.from_dict(json.loads(json.dumps(stats.as_dict()))))
    assert bits(merged) == bits(whole)
    assert merged == whole


def test_squares_too_large_for_a_float_are_summed() -> None:
    stats = Stats()
    stats.add(tensor([1e200, -1e200, math.nan]))
    assert (stats.count, stats.nonfinite, stats.mean, stats.variance) == (2, 1, 0.0, math.inf)
    other = Stats()
    other.add(tensor([1e200, 1e200]))
    # All elements are equal: what is too large for a float cancels.
    assert other.variance == pytest.approx(0, abs=1e-20 * 1e200**1.5)
    assert other.mean == pytest.approx(1e200)


def test_the_sign_of_zero_does_not_depend_on_the_order() -> None:
    for order in ([0.0, -0.0], [-0.0, 0.0]):
        stats = Stats()
        for value in order:
            stats.add(tensor([value]))
        assert (str(stats.min), str(stats.max)) == ("0.0", "0.0")


def test_statistics_of_an_older_microtome_are_read() -> None:
    old = {"count": 4, "nonfinite": 1, "mean": 3.0, "squares": 14.0, "min": 1.0, "max": 6.0}
    stats = Stats.from_dict(old)
    assert (stats.count, stats.mean, stats.variance, stats.min, stats.max) == (4, 3.0, 3.5, 1.0, 6.0)
    assert {name: value for name, value in stats.as_dict().items() if name in old} == old
    empty = {"count": 0, "nonfinite": 2, "mean": None, "squares": 0.0, "min": None, "max": None}
    assert Stats.from_dict(empty) == Stats(nonfinite=2)


# -- recordings --------------------------------------------------------------------------------------------------------


def write(folder: Path, tensors: list[Tensor], manifest: dict[str, Any] = MANIFEST, **options: Any) -> Path:
    with DiskStore(folder, manifest, shard_bytes=64, **options) as store:
        for run, one in enumerate(tensors):
            store.add("fc", one, run=run)
    return folder


@given(values=TENSORS, cuts=st.lists(st.integers(0, 100), max_size=4))
def test_recordings_of_any_partition_load_as_one(values: list[list[float]], cuts: list[int]) -> None:
    tensors = list(map(tensor, values))
    with tempfile.TemporaryDirectory() as name:
        folder, options = Path(name), dict[str, Any](histogram=(2, 0.0, 1.0))
        whole = mt.load(write(folder / "whole", tensors, **options))
        groups = enumerate(split_at(tensors, cuts))
        merged = mt.load([write(folder / str(index), group, **options) for index, group in groups])
        assert bits(merged.stats("fc")) == bits(whole.stats("fc"))
        assert torch.equal(merged["fc"].cat().view(torch.int64), whole["fc"].cat().view(torch.int64))
        assert merged["fc"].runs == whole["fc"].runs == list(range(len(tensors)))
        assert (merged.count, merged.nbytes, merged.dropped) == (whole.count, whole.nbytes, 0)


def test_a_list_of_one_is_that_recording(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", [torch.ones(2)])
    assert repr(mt.load([folder])) == repr(mt.load(folder))
    both = mt.load((folder, write(tmp_path / "two", [torch.zeros(3)])))
    assert repr(both) == f"<2 recordings from '{folder}': 1 name, 2 tensors, 20 B>"
    assert "fc" in both._repr_html_()
    with both:
        assert [one.shape[0] for one in both["fc"]] == [2, 3]


def test_statistics_without_tensors_are_merged(tmp_path: Path) -> None:
    folders = [write(tmp_path / str(at), [torch.full((2,), float(at))], keep="stats") for at in range(3)]
    assert mt.load(folders).stats("fc").mean == 1.0
    assert len(mt.load(folders)["fc"]) == 0


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"model": "Other"}, "expected 'model' to be 'Net', got 'Other'"),
        ({"layout": "5678"}, "expected 'layout' to be '1234', got '5678'"),
        ({"selectors": ["fc", "head"]}, r"expected 'selectors' to be \['fc'\], got \['fc', 'head'\]"),
        ({"reduce": "mean"}, "expected 'reduce' to be 'none', got 'mean'"),
    ],
)
def test_recordings_of_something_else_are_refused(manifest: dict[str, Any], message: str, tmp_path: Path) -> None:
    first = write(tmp_path / "first", [torch.ones(2)])
    other = write(tmp_path / "other", [torch.ones(2)], MANIFEST | manifest)
    with pytest.raises(BadFile, match=f"other' is a recording of something else: {message}"):
        mt.load([first, other])


def test_recordings_of_other_dtypes_weights_and_histograms_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "first", [torch.ones(2)])
    double = write(tmp_path / "double", [torch.ones(2).double()])
    with pytest.raises(BadFile, match=r"expected the dtype of 'fc' to be torch.float32, got torch.float64"):
        mt.load([first, double])
    counted = write(tmp_path / "counted", [torch.ones(2)], histogram=(2, 0.0, 1.0))
    with pytest.raises(BadFile, match="expected the histogram of 'fc' to be 'none', got Histogram"):
        mt.load([first, counted])
    RowRange(0, (2,), "abc").write(first)
    other = write(tmp_path / "other", [torch.ones(2)])
    RowRange(2, (2,), "def").write(other)
    with pytest.raises(BadFile, match="expected the fingerprint of the weights to be 'abc', got 'def'"):
        mt.load([first, other])


def test_lists_that_are_no_recordings_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "first", [torch.ones(2)])
    with pytest.raises(BadQuery, match="expected at least one recording to load, got an empty list"):
        mt.load([])
    with pytest.raises(BadQuery, match=r"expected different recordings, got '.*first' twice"):
        mt.load([folder, tmp_path / "first" / ".." / "first"])
    with pytest.raises(BadFile, match="none' has|expected a recording in .*none', got none: it is not a folder"):
        mt.load([folder, tmp_path / "none"])


# -- rows and parts ----------------------------------------------------------------------------------------------------


def test_rows_have_the_ids_of_each_record(tmp_path: Path) -> None:
    first = write(tmp_path / "first", [torch.zeros(2, 1), torch.ones(1, 1)])
    with pytest.raises(BadQuery, match="first' has no ids of rows: it is not of a data set"):
        mt.load(first).ids("fc")
    RowRange(0, (2, 1), "abc").write(first)
    assert mt.load(first).ids("fc") == [0, 1, 2]
    other = write(tmp_path / "other", [torch.ones(1, 1)])
    with pytest.raises(BadQuery, match="no ids of rows"):
        mt.load([first, other]).ids("fc")
    RowRange(3, (1,), "abc", ids=("cat",)).write(other)
    assert mt.load([first, other]).ids("fc") == [0, 1, 2, "cat"]


def test_damaged_rows_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "first", [torch.zeros(2, 1)])
    RowRange(0, (2,), "abc").write(folder)
    text = (folder / ROWS).read_text()
    for wrong, message in (
        (text.replace("abc", "abd"), "corrupt: expected the checksum"),
        (text.replace("rows of a recording", "rows"), "expected version 1 of rows of a recording"),
        ("{}", "is corrupt: KeyError"),
    ):
        (folder / ROWS).write_text(wrong)
        with pytest.raises(BadFile, match=message):
            mt.load(folder)
    with pytest.raises(ValueError, match="expected 2 ids, got 1"):
        RowRange(0, (2,), "abc", ids=(1,)).check()


def test_parts_load_as_one_recording_in_the_order_of_their_list(tmp_path: Path) -> None:
    folder, tensors = tmp_path / "parts", [torch.full((2, 3), float(at)) for at in range(4)]
    parts = PartsFolder(folder)
    names = [part_name("beef", number) for number in range(4)]
    for at in (2, 0, 3, 1):  # in the order in which they are completed
        write_part(folder, names[at], partial(write, tensors=[tensors[at]]))
    with pytest.raises(BadFile, match=r"expected a recording in|load a file in it"):
        mt.load(folder)
    (folder / part_name("dead", 7)).mkdir()
    (folder / f".{names[1]}.{'0' * 16}.tmp").mkdir()
    parts.publish(names)
    parts.close()
    assert torch.equal(mt.load(folder)["fc"].cat(), torch.cat(tensors))
    assert sorted(path.name for path in folder.iterdir()) == [".lock", *names, "parts.json"]
    more = write(tmp_path / "more", [torch.full((1, 3), 9.0)])
    assert mt.load([folder, more])["fc"].cat()[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 9]
    with pytest.raises(BadFile, match="already holds a recording in parts: record to another folder"):
        PartsFolder(folder)
    with pytest.raises(BadFile, match="expected a new or empty folder or a recording, got .*parts"):
        write(folder, tensors)


def test_a_part_that_is_written_again_counts_once(tmp_path: Path) -> None:
    name, calls = part_name("beef", 0), []

    def save(path: Path) -> None:
        calls.append(path)
        write(path, [torch.ones(2, 1)])

    for _ in range(2):
        assert write_part(tmp_path, name, save) == tmp_path / name
    assert len(calls) == 1

    def save_late(path: Path) -> None:  # another process completes the part meanwhile
        write(path, [torch.ones(2, 1)])
        write_part(tmp_path, part_name("beef", 1), save)

    assert write_part(tmp_path, part_name("beef", 1), save_late).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, part_name("beef", 1)]
    assert len(mt.load(tmp_path / part_name("beef", 1))["fc"]) == 1


def test_a_part_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        write(path, [torch.ones(2, 1)])
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_part(tmp_path, part_name("beef", 0), fail)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_parts_removes_what_a_killed_process_left_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    (folder / part_name("dead", 0)).mkdir(parents=True)
    (folder / f".{part_name('dead', 1)}.00.tmp").mkdir()
    parts = PartsFolder(folder)
    assert [path.name for path in folder.iterdir()] == [".lock"]
    with pytest.raises(BadFile, match="is being recorded to by the process"):
        PartsFolder(folder)
    with pytest.raises(BadFile, match="1 of 1 parts are not in .*: record to a folder that all nodes share"):
        parts.publish([part_name("beef", 0)])
    parts.close()
    (folder / "notes.txt").touch()
    with pytest.raises(BadFile, match=r"expected a new or empty folder, got .*, which has 'notes.txt'"):
        PartsFolder(folder)


def test_a_new_folder_of_discarded_parts_is_removed(tmp_path: Path) -> None:
    parts = PartsFolder(tmp_path / "new" / "parts")
    parts.discard()
    parts.close()
    assert not (tmp_path / "new" / "parts").exists()


@pytest.mark.parametrize("change", [("part-beef-00000", "../etc"), ('"sum": "', '"sum": "0'), ("of a recording", "of")])
def test_a_damaged_list_of_parts_is_refused(change: tuple[str, str], tmp_path: Path) -> None:
    parts = PartsFolder(tmp_path)
    write_part(tmp_path, part_name("beef", 0), lambda path: write(path, [torch.ones(1)]))
    parts.publish([part_name("beef", 0)])
    parts.close()
    file = tmp_path / "parts.json"
    file.write_text(file.read_text().replace(*change, 1))
    with pytest.raises(BadFile, match=r"parts.json'(: expected version 1| is corrupt)"):
        mt.load(tmp_path)


def test_a_recorder_of_batches_has_the_bits_of_one_recording(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval()
    batches = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))

    def record(folder: Path, part: Tensor) -> Path:
        with mt.record(net, ["0", "1"], to=folder), torch.no_grad():
            for batch in part:
                net(batch)
        return folder

    whole = mt.load(record(tmp_path / "whole", batches))
    merged = mt.load([record(tmp_path / str(at), part) for at, part in enumerate(batches.split([1, 3, 2]))])
    for name in ("0", "1"):
        assert torch.equal(merged[name].cat(), whole[name].cat())
        assert bits(merged.stats(name)) == bits(whole.stats(name))
