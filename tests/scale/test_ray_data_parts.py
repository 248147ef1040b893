"""Columns, parts and workers of data sets, without Ray."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from microtome.capture.extract import extractor
from microtome.errors import BadInputs, BadQuery, BadWeights, NotInstalled, Unsupported
from microtome.scale.ray import extract, profile, record
from microtome.scale.ray.blocks import RowSlice, divide, split_batches
from microtome.scale.ray.columns import Batch, Columns, keep_columns
from microtome.scale.ray.features import FeatureColumns
from microtome.scale.ray.recording import _PartsRun
from microtome.scale.ray.worker import PartTotals, WorkerModel


def test_ray_is_imported_when_it_is_used() -> None:
    script = "import sys; from microtome.scale.ray import record; print('ray' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_without_ray_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    calls: list[Any] = [
        lambda: record(None, nn.ReLU(), "", to="acts"),
        lambda: extract(None, nn.ReLU(), ""),
        lambda: profile(["zoo:tiny-vit"]),
    ]
    for call in calls:
        with pytest.raises(NotInstalled, match=r"ray is not installed, .* pip install 'microtome\[ray\]'"):
            call()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=8), st.integers(1, 12))
def test_parts_have_each_row_once_in_order_and_are_full(blocks: list[tuple[int, int]], rows: int) -> None:
    slices = [RowSlice(number, start, start + count) for number, (start, count) in enumerate(blocks)]
    parts = list(divide(slices, rows))
    every = [(one.block, row) for one in slices for row in range(one.start, one.stop)]
    assert [(one.block, row) for part in parts for one in part.slices for row in range(one.start, one.stop)] == every
    assert [len(part) for part in parts[:-1]] == [rows] * (len(parts) - 1)
    assert [(part.number, part.first) for part in parts] == [(at, at * rows) for at in range(len(parts))]
    assert all(len(part) for part in parts)


def test_batches_have_all_rows() -> None:
    batches = list(split_batches({"x": np.arange(7), "y": np.arange(14).reshape(7, 2)}, 3))
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert batches[2]["y"].tolist() == [[12, 13]]


def test_columns_are_arguments_in_memory_of_their_own() -> None:
    values = np.arange(4, dtype=np.int16)
    values.flags.writeable = False  # as those of Ray are
    batch: Batch = {"x": values, "y": np.ones((4, 2))}
    inputs = Columns(["x", "y"]).inputs_of(batch)
    assert [(one.dtype, tuple(one.shape)) for one in inputs.args] == [(torch.int16, (4,)), (torch.float64, (4, 2))]
    inputs.args[0].add_(1)
    assert values.tolist() == [0, 1, 2, 3]
    assert list(Columns({"tokens": "x"}).inputs_of(batch).kwargs) == ["tokens"]
    assert Columns(lambda rows: (rows["y"].sum(1),)).inputs_of(batch, "cpu").args[0].tolist() == [2, 2, 2, 2]


def test_ids_are_kept_as_python_values() -> None:
    batch = {"x": np.ones(2), "id": np.array([3, 5]), "when": np.array(["2020", "2021"], dtype="datetime64[Y]")}
    assert Columns("x").ids_of(batch) is None
    assert Columns("x", "id").ids_of(batch) == (3, 5)
    with pytest.raises(BadInputs, match="expected numbers or strings as ids in 'when', got datetime.date"):
        Columns("x", "when").ids_of(batch)
    assert keep_columns(["x", "id", "when"], Columns("x")) == ["id", "when"]
    assert keep_columns(["x", "id", "when"], Columns("x", "id")) == ["id"]


def test_columns_of_other_types_are_refused() -> None:
    ragged = np.array([np.ones(2), np.ones(3)], dtype=object)
    with pytest.raises(BadInputs, match="column 'x' is not a tensor: its dtype is object, or its rows differ in shape"):
        Columns("x").inputs_of({"x": ragged})


def test_workers_with_other_weights_are_an_error() -> None:
    run = _PartsRun.__new__(_PartsRun)
    run._weights, run._progress, run._began = {"abc"}, None, 0.0
    with pytest.raises(BadWeights, match="workers built the model with different weights: abc and def; use the same"):
        run._count(PartTotals(1, 1, 1, "def"))


def test_a_model_runs_in_eval_mode() -> None:
    assert not WorkerModel(nn.Dropout()).load().training
    assert not WorkerModel("zoo:tiny-vit").load().training


def feature_columns(model: nn.Module, kept: list[str]) -> FeatureColumns:
    stage = FeatureColumns.__new__(FeatureColumns)
    stage._spec, stage._extract, stage._columns = WorkerModel(model), extractor(model, ""), Columns("x")
    stage._kept, stage._reduce = kept, None
    return stage


def test_outputs_without_a_row_dimension_are_refused() -> None:
    stage = feature_columns(nn.Flatten(0), [])
    with pytest.raises(Unsupported, match=r"expected an output with a value for each of 3 rows at '', got the shape"):
        stage({"x": np.ones((3, 2))})
    with pytest.raises(Unsupported, match=r"arrays have no dtype torch.bfloat16, which '' has"):
        feature_columns(nn.Identity().eval(), [])._to_column("", torch.ones(3, dtype=torch.bfloat16), 3)


def test_a_feature_does_not_replace_a_column() -> None:
    with pytest.raises(BadQuery, match="the data set has a column '' already: keep only the ids, with id="):
        feature_columns(nn.Identity(), [""])({"x": np.ones((3, 2)), "": np.ones(3)})
