"""One table of metrics: an entry in it is all that tables, files, pages and commands need."""

from __future__ import annotations

import csv as csv_format
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from click.testing import CliRunner
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.errors import BadQuery
from microtome.report.formats import csv, markdown, text
from microtome.report.row_selection import RowSelection
from microtome.report.top import as_json
from microtome.report.top import text as of_top
from microtome.results.metrics import (
    METRICS,
    CallAmounts,
    Metric,
    on_command_line,
    register_metric,
    unregister_column,
    why_unknown,
)
from microtome.units import UNKNOWN

#: Twice the bytes that are read: 2 x 4 x (2 x 4 + 4 x 8 + 8) for the first layer below.
TWICE = Metric(
    "twice_read_bytes",
    "twice read",
    "bytes",
    "twice the bytes that operators read",
    share="twice_share",
    diff="twice",
    is_compared_by_layer=True,
    is_ranked=True,
    value=lambda row: 2 * row.read_bytes,
)


@pytest.fixture
def twice() -> Iterator[Metric]:
    register_metric(TWICE)
    yield TWICE
    del METRICS[TWICE.name]


def net(width: int = 8) -> mt.Profile:
    return mt.profile(nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)), "2x4")


def test_a_registered_metric_is_in_every_output(twice: Metric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    profile = net()
    read = profile["0"].read_bytes
    assert read == 4 * (2 * 4 + 4 * 8 + 8)
    assert re.search(r"┃ twice read B .*┃ twice read share", text(profile))
    assert "| twice read | twice read share |" in markdown(profile)
    records = {record["address"]: record for record in csv_format.DictReader(io.StringIO(csv(profile)))}
    assert records["0"]["twice_read_bytes"] == records["0"]["own_twice_read_bytes"] == str(2 * read)
    assert "by twice read" in of_top(profile)
    assert json.loads(as_json(profile))["top"]["twice_read_bytes"]["layers"][0]["twice_read_bytes"] >= 2 * read
    assert [row.address for row in profile.top(1, by="twice_read_bytes")] == ["0"]
    page = profile.to_html()
    assert "<b>twice read</b>: twice the bytes that operators read" in page
    assert '"name":"twice_read_bytes"' in page
    grown = profile.diff(net(16))
    assert grown["twice"].before == 2 * profile.total.read_bytes
    assert "twice read" in str(grown)
    assert "twice" in {change.quantity for layer in grown.layers for change in layer.changes}


def test_a_registered_metric_sorts_selects_and_limits(twice: Metric, tmp_path: pytest.TempPathFactory) -> None:
    profile = net()
    first = text(profile, RowSelection(sort="twice_read_bytes", columns=("twice_share",), top=1)).splitlines()[3]
    assert first.startswith("0 ")
    files = [f"{tmp_path}/{name}.json" for name in ("a", "b")]
    profile.to_json(files[0])
    net(16).to_json(files[1])
    ran = CliRunner().invoke(main, ["diff", *files, "--fail-over", "twice=5%"])
    assert ran.exit_code == 1
    assert "Over the limit: twice read +" in ran.output


def test_own_columns_write_numbers_with_three_digits() -> None:
    mt.register_column("third", lambda row: 92.148544 / 3)
    try:
        assert "30.7" in (shown := text(mt.profile(nn.Linear(2, 2), "1x2"), RowSelection(columns=("third",))))
        assert "30.71" not in shown
    finally:
        unregister_column("third")


@pytest.fixture
def divides() -> Iterator[str]:
    """A column that divides by the parameters of a call, which a ReLU does not have."""
    mt.register_column("divides", lambda row: (row.macs or 0) / row.params, "MACs / params")
    yield "divides"
    unregister_column("divides")


def test_a_column_that_raises_does_not_affect_tables_without_it(divides: str) -> None:
    profile = mt.profile(*zoo.build("tiny-vit"))  # has operators between modules, without parameters
    assert "ZeroDivision" not in f"{profile}{profile.to_markdown()}{profile.to_html()}{profile._repr_html_()}"
    assert "ZeroDivision" not in text(profile, RowSelection(columns=("params",), sort="macs"))
    assert csv(profile)
    assert as_json(profile)
    assert not profile.diff(profile).layers


@pytest.mark.parametrize("write", [text, markdown])
def test_cells_of_a_column_that_raises_are_unknown_and_one_note_says_why(
    write: Callable[..., str], divides: str
) -> None:
    profile = mt.profile(nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.ReLU()), "1x2")
    shown = write(profile, RowSelection(columns=(divides,)))
    cells = [re.split("[┃│|]", line.strip("|"))[-1].strip() for line in shown.splitlines() if re.search("[│|]", line)]
    assert cells[-5:] == ["1.00", "1.00", UNKNOWN, UNKNOWN, "1.00"]
    assert len(re.findall("raised ZeroDivisionError: division by zero at '1'", shown.replace("\\", ""))) == 1


def test_a_column_that_raises_is_empty_in_csv(divides: str) -> None:
    profile = mt.profile(nn.Sequential(nn.ReLU()), "1x2")
    assert csv(profile, RowSelection(columns=(divides,))).split() == ["address,divides", ",", "0,"]


def test_sorting_by_a_column_that_raises_everywhere_says_what_it_raised(divides: str) -> None:
    with pytest.raises(BadQuery, match="to sort by: the column 'divides' raised ZeroDivisionError.* at '\\(root\\)'"):
        text(mt.profile(nn.Sequential(nn.ReLU()), "1x2"), RowSelection(sort=divides))


@pytest.mark.parametrize("arguments", [(len, "name"), ("name", 3), ("name", "name"), ("name", len, len), (None, len)])
def test_a_column_that_is_no_name_and_function_is_refused(arguments: Any) -> None:
    with pytest.raises(
        BadQuery, match=r"expected a name, a function of a row and a header, register_column\('name', f"
    ):
        mt.register_column(*arguments)


def test_names_of_columns_are_unique(twice: Metric) -> None:
    for name in ("twice_read_bytes", "twice_share", "flops", "time", "share", "spread", "type", "two words"):
        with pytest.raises(BadQuery, match="expected the name of a column to be an unused identifier"):
            register_metric(Metric(name, name, "count", ""))


def test_every_number_of_a_call_is_a_metric_with_a_label_and_a_description() -> None:
    assert {field.name for field in fields(CallAmounts)} <= set(METRICS)
    assert all(metric.label and metric.description for metric in METRICS.values())
    assert len({metric.label for metric in METRICS.values()}) == len(METRICS)


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.requires is not None])
def test_a_metric_that_is_missing_names_the_option_that_gives_it(name: str) -> None:
    metric = METRICS[name]
    assert metric.requires is not None
    assert metric.of(net().total) is None
    assert why_unknown(net(), metric) == f"add {metric.requires.argument}"
    with on_command_line():
        assert why_unknown(net(), metric) == f"add {metric.requires.option}"
