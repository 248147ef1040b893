"""Recordings and features of Ray data sets, on a local cluster of two nodes whose workers are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.capture.store import Recording
from microtome.errors import BadFile, BadInputs, BadQuery, NoMatch
from microtome.scale.ray import extract, record
from tests.remote.proxy import until
from tests.scale.cluster import cluster_marks, local_cluster

pytest.importorskip("ray", reason="Ray is not installed: pip install 'microtome[ray]'")

pytestmark = cluster_marks

ROWS, BATCH = 10_000, 32


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with local_cluster(2) as started:
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        yield started


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))


VALUES = np.random.default_rng(0).standard_normal((ROWS, 8), dtype=np.float32)


def dataset(rows: int = ROWS, block: int = 700) -> Any:
    """Rows in blocks that do not end where batches do."""
    import ray

    return ray.data.from_numpy([VALUES[start : min(start + block, rows)] for start in range(0, rows, block)])


def named_rows(rows: int) -> Any:
    """Rows with names and two inputs, computed by tasks of Ray."""
    import ray

    return ray.data.range(rows, override_num_blocks=7).map_batches(_name_rows, batch_size=None)


def _name_rows(batch: dict[str, Any]) -> dict[str, Any]:
    numbers = batch["id"]
    names = np.array([f"row {number % 1000:03d}/{number}" for number in numbers])
    return {"x": VALUES[numbers], "y": VALUES[numbers][:, ::-1], "name": names}


def record_here(folder: Path, model: nn.Module, batches: list[Tensor], at: list[str], **options: Any) -> Recording:
    """The same in one process, on as many threads as a worker has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mt.record(model.eval(), at, to=folder, **options), torch.no_grad():
            for batch in batches:
                model(batch)
    finally:
        torch.set_num_threads(threads)
    found: Recording = mt.load(folder)
    return found


def assert_same(found: Recording, expected: Recording) -> None:
    assert found.names == expected.names
    assert found.count == expected.count
    for name in expected.names:
        assert torch.equal(found[name].cat().view(torch.int32), expected[name].cat().view(torch.int32))
        assert found[name].shapes == expected[name].shapes
        assert found[name].runs == expected[name].runs
        assert found.stats(name).as_dict() == expected.stats(name).as_dict()


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != ".lock"}


# -- recordings --------------------------------------------------------------------------------------------------------


WORKERS = 4


def _kill_once(marker: Path, column: str, row: int, batch: dict[str, Any]) -> Tensor:
    """Kill the process that runs the model on a row, the first time."""
    if any((batch[column] == VALUES[row]).all(1)):
        try:
            marker.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass
    return torch.tensor(batch[column])


def _meet(folder: Path, batch: dict[str, Any]) -> None:
    """Write the number of this process to a folder, and wait until as many have as there are workers."""
    (folder / str(os.getpid())).touch()
    until(lambda: len(list(folder.iterdir())) >= WORKERS, timeout=120)


def _meet_and_kill_once(folder: Path, marker: Path, batch: dict[str, Any]) -> Tensor:
    _meet(folder, batch)
    return _kill_once(marker, "data", 5000, batch)


def _meet_and_read(folder: Path, batch: dict[str, Any]) -> Tensor:
    _meet(folder, batch)
    return torch.tensor(batch["data"])


@pytest.mark.parametrize("killed", ["in the middle of a part", "by the driver"])
def test_a_killed_worker_loses_and_doubles_nothing(cluster: Any, killed: str, tmp_path: Path) -> None:
    pids, marker, victims = tmp_path / "pids", tmp_path / "marker", list[int]()
    pids.mkdir()

    def kill_a_worker(totals: Any) -> None:
        if killed == "by the driver" and totals.runs > 150 and not victims:
            victims.append(int(next(pids.iterdir()).name))
            os.kill(victims[0], signal.SIGKILL)

    inputs: Any = partial(_meet_and_kill_once, pids, marker)
    if killed == "by the driver":
        inputs = partial(_meet_and_read, pids)
    histogram = (16, -2.0, 2.0)
    found = record(
        dataset(),
        net(),
        ["0", "3"],
        to=tmp_path / "ray",
        inputs=inputs,
        batch_size=BATCH,
        workers=WORKERS,
        histogram=histogram,
        progress=kill_a_worker,
    )
    assert victims or marker.exists()
    assert len(list(pids.iterdir())) >= WORKERS
    batches = list(torch.from_numpy(VALUES).split(BATCH))
    assert_same(found, record_here(tmp_path / "here", net(), batches, ["0", "3"], histogram=histogram))
    assert found.ids("0") == list(range(ROWS))
    # 313 batches, 16 to a part: 20 parts. Nothing else is left.
    assert len(files_in(tmp_path / "ray")) == 20 + 1


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_and_the_blocks_make_no_difference(cluster: Any, workers: int, tmp_path: Path) -> None:
    rows = 500
    found = record(
        dataset(rows, block=97), net(), "*", to=tmp_path / "ray", batches_per_part=2, batch_size=30, workers=workers
    )
    assert_same(found, record_here(tmp_path / "here", net(), list(torch.from_numpy(VALUES[:rows]).split(30)), ["*"]))
    assert [len(one) for one in found["3"]] == [30] * 16 + [20]


def test_statistics_of_a_model_of_the_zoo_and_a_reduction(cluster: Any, tmp_path: Path) -> None:
    import ray

    images = np.random.default_rng(1).standard_normal((20, 3, 32, 32), dtype=np.float32)
    found = record(
        ray.data.from_numpy(images),
        "zoo:tiny-vit",
        "blocks.*",
        to=tmp_path / "ray",
        reduce="mean",
        keep="stats",
        batch_size=4,
        batches_per_part=2,
    )
    batches = list(torch.from_numpy(images).split(4))
    model = zoo.build("tiny-vit")[0]
    expected = record_here(tmp_path / "here", model, batches, ["blocks.*"], reduce="mean", keep="stats")
    for name in ("blocks.0", "blocks.2"):
        assert found.stats(name) == expected.stats(name)
        assert len(found[name]) == 0
    assert found.manifest["reduce"] == "mean"


class Difference(nn.Module):
    """A model with two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Identity()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.scale(left - right)
        return out


@pytest.mark.parametrize("inputs", [["y", "x"], {"right": "x", "left": "y"}])
def test_rows_keep_their_ids_and_columns_are_arguments(cluster: Any, inputs: Any, tmp_path: Path) -> None:
    found = record(named_rows(100), Difference(), "scale", to=tmp_path / "ray", inputs=inputs, id="name", batch_size=9)
    assert found.ids("scale") == [f"row {number:03d}/{number}" for number in range(100)]
    assert np.array_equal(found["scale"].cat().numpy(), VALUES[:100, ::-1] - VALUES[:100])


def test_recordings_of_two_data_sets_load_as_one(cluster: Any, tmp_path: Path) -> None:
    for at, first in enumerate((0, 60)):
        rows = dataset(100, block=20).materialize()
        half = rows.limit(60) if not first else rows.split_at_indices([60])[1]
        record(half, net(), "3", to=tmp_path / str(at), batch_size=10)
    both = mt.load([tmp_path / "0", tmp_path / "1"])
    batches = list(torch.from_numpy(VALUES[:100]).split(10))
    assert_same(both, record_here(tmp_path / "here", net(), batches, ["3"]))
    assert both.ids("3") == [*range(60), *range(40)]


def test_recordings_of_other_weights_are_not_put_together(cluster: Any, tmp_path: Path) -> None:
    other = net()
    torch.nn.init.ones_(next(other.parameters()))
    for name, model in (("one", net()), ("other", other)):
        record(dataset(10), model, "3", to=tmp_path / name)
    with pytest.raises(BadFile, match="something else: expected the fingerprint of the weights to be"):
        mt.load([tmp_path / "one", tmp_path / "other"])
    with pytest.raises(BadFile, match="one' already holds a recording in parts: record to another folder"):
        record(dataset(10), net(), "3", to=tmp_path / "one")


# -- errors ------------------------------------------------------------------------------------------------------------


def _refuse(batch: dict[str, Any]) -> Any:
    raise AssertionError("nothing may be computed")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"inputs": "image"}, NoMatch, "the data set has no column 'image': expected one of data"),
        ({"inputs": {"input": "image"}}, NoMatch, "no column 'image'"),
        ({"id": "name"}, NoMatch, "no column 'name': expected one of data"),
        ({"at": "head"}, NoMatch, "'head'"),
        ({"model": "zoo:tiny-vti"}, NoMatch, "the zoo has no model 'tiny-vti'. Did you mean 'tiny-vit'"),
        ({"batch_size": 0}, BadQuery, "expected batch_size of at least 1, got 0"),
        ({"reduce": "median"}, BadQuery, "expected reduce to be one of"),
        ({"keep": "some"}, BadQuery, "expected keep to be 'all' or 'stats'"),
    ],
)
def test_mistakes_are_errors_before_anything_is_computed(
    cluster: Any, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"model": net(), "at": "3", "inputs": _refuse} | options
    with pytest.raises(error, match=message):
        record(dataset(10), arguments.pop("model"), arguments.pop("at"), to=tmp_path / "ray", **arguments)
    assert files_in(tmp_path) == set()


class Touch(nn.Linear):
    """Touches a file when it runs."""

    def __init__(self, marker: Path) -> None:
        super().__init__(8, 4)
        self.marker = str(marker)

    def forward(self, x: Tensor) -> Tensor:
        Path(self.marker).touch()
        return super().forward(x)


def _touch_rows(folder: Path, batch: dict[str, Any]) -> dict[str, Any]:
    for number in batch["id"]:
        (folder / str(number)).touch()
    return {"data": VALUES[batch["id"]]}


@pytest.mark.parametrize("function", [record, extract])
def test_no_model_runs_if_a_column_is_missing(cluster: Any, function: Any, tmp_path: Path) -> None:
    import ray

    marker, computed, rows = tmp_path / "marker", tmp_path / "rows", 400
    computed.mkdir()
    folder = {"to": tmp_path / "ray"} if function is record else {}
    mapped = ray.data.range(rows, override_num_blocks=40).map_batches(partial(_touch_rows, computed), batch_size=None)
    for data, most in ((mapped, rows // 2), (mapped.materialize(), 0)):  # of the first, Ray computes the first block
        for one in computed.iterdir():
            one.unlink()
        for options in ({"inputs": "image"}, {"id": "name"}):
            with pytest.raises(NoMatch, match="the data set has no column '(image|name)': expected one of data"):
                function(data, Touch(marker), "", **folder, **options)
        assert len(list(computed.iterdir())) <= most
    assert not marker.exists()
    assert files_in(tmp_path) == {"rows"}
    extract(mapped, Touch(marker), "").take_all()
    assert marker.exists()  # as a model does that runs


def test_a_data_set_without_rows_is_an_error(cluster: Any, tmp_path: Path) -> None:
    import ray

    for empty in (ray.data.from_items([]), dataset(10).limit(0)):
        with pytest.raises(BadInputs, match="expected a data set with rows, got an empty one"):
            record(empty, net(), "3", to=tmp_path / "ray", inputs="data")
    assert files_in(tmp_path) == set()


def test_several_columns_need_a_choice(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(BadQuery, match="expected the columns of the model's inputs as `inputs`: there are x, y, name"):
        record(named_rows(5), net(), "3", to=tmp_path / "ray")


def test_an_error_of_the_model_names_the_rows_and_leaves_nothing(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
        record(dataset(100), nn.Linear(9, 2), "", to=tmp_path / "ray", batch_size=10)
    assert "in rows 0 to 99 of the data set" in caught.value.__notes__
    assert files_in(tmp_path) == set()
    with pytest.raises(BadInputs, match="column 'name' is not a tensor: its dtype is"):
        record(named_rows(5), net(), "3", to=tmp_path / "ray", inputs="name")
    with pytest.raises(BadInputs, match="expected numbers or strings as ids in 'y'"):
        record(named_rows(5), net(), "3", to=tmp_path / "ray", inputs="x", id="y")


# -- features ----------------------------------------------------------------------------------------------------------


def test_features_are_columns_beside_the_ids(cluster: Any) -> None:
    rows = extract(named_rows(50), net(), ["0", "3"], inputs="x", id="name", workers=1, batch_size=16).take_all()
    assert set(rows[0]) == {"name", "0", "3"}
    found = {row["name"]: row["3"] for row in rows}
    expected = net().eval()(torch.from_numpy(VALUES[:50])).detach().numpy()
    assert len(rows) == len(found) == 50
    for number in range(50):  # batches may differ
        assert np.allclose(found[f"row {number:03d}/{number}"], expected[number], atol=1e-5)


def test_a_killed_worker_loses_and_doubles_no_features(cluster: Any, tmp_path: Path) -> None:
    marker, rows = tmp_path / "marker", 400
    inputs = partial(_kill_once, marker, "x", 300)
    found = extract(named_rows(rows), net(), "3", inputs=inputs, id="name", workers=2, batch_size=16).take_all()
    assert marker.exists()
    assert sorted(row["name"] for row in found) == sorted(f"row {number % 1000:03d}/{number}" for number in range(rows))
    expected = net().eval()(torch.from_numpy(VALUES[:rows])).detach().numpy()
    for row in found:
        assert np.allclose(row["3"], expected[int(row["name"].rpartition("/")[2])], atol=1e-5)


def test_features_need_columns_of_their_own(cluster: Any) -> None:
    with pytest.raises(NoMatch, match="no column 'image'"):
        extract(dataset(10), net(), "3", inputs="image")
    with pytest.raises(NoMatch, match="'head'"):
        extract(dataset(10), net(), "head")


# -- nodes -------------------------------------------------------------------------------------------------------------


def test_a_node_that_is_lost_loses_and_doubles_nothing(cluster: Any, tmp_path: Path) -> None:
    """The last test, since the cluster has one node afterwards."""
    removed: list[Any] = []

    def remove_a_node(totals: Any) -> None:
        if totals.runs > 60 and not removed:
            removed.append(sorted(cluster.worker_nodes, key=id)[0])
            cluster.remove_node(removed[0], allow_graceful=False)

    rows = 4000
    found = record(
        named_rows(rows),
        net(),
        ["0", "3"],
        to=tmp_path / "ray",
        inputs="x",
        id="name",
        workers=4,
        batch_size=BATCH,
        batches_per_part=4,
        progress=remove_a_node,
    )
    assert removed
    batches = list(torch.from_numpy(VALUES[:rows]).split(BATCH))
    assert_same(found, record_here(tmp_path / "here", net(), batches, ["0", "3"]))
    assert found.ids("3") == [f"row {number % 1000:03d}/{number}" for number in range(rows)]
