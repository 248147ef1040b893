"""The costliest layers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery
from microtome.report.top import as_json, ranking, text
from microtome.units import scale_of_largest


@pytest.fixture(scope="module")
def p() -> mt.Profile:
    return mt.profile(*zoo.build("tiny-vit"))


def test_layers_come_by_what_they_cost_themselves() -> None:
    p = mt.profile(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), "4x6")
    # 56 and 27 parameters; the ReLU has none, nor have the containers of their own.
    assert [(row.address, row.params) for row in ranking(p)["params"]] == [("0", 56), ("2", 27)]
    assert [row.own.macs for row in ranking(p, 1)["macs"]] == [192]
    assert set(ranking(p)) == {"params", "macs", "peak_bytes"}


def test_times_are_a_metric_where_they_were_measured() -> None:
    p = mt.profile(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), "4x6", measure=["time"], repeat=3, warmup=1)
    assert "time_s" in ranking(p)
    assert "by time" in text(p)


class Waits(nn.Module):
    """Takes time between the calls inside it, without an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):  # type: ignore[no-untyped-def]
        x = self.layer(x)
        sum(range(200_000))
        return x


def test_time_without_operators_is_told_from_that_of_layers() -> None:
    p = mt.profile(nn.Sequential(Waits()), "4x3", measure=["time"], repeat=3, warmup=1)
    lines = text(p).splitlines()
    first = lines[lines.index("by time") + 1]
    assert first.startswith("0 (no operators)")
    assert any(line.startswith("(no operators): code of a layer between the layers inside it") for line in lines)


class Attends(nn.Module):
    """Its own operators set the peak, and not the layer inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x * 2)
        return (y @ y.transpose(1, 2)).softmax(-1) @ y


def test_the_peak_of_a_call_itself_is_that_of_its_own_operators() -> None:
    p = mt.profile(Attends().eval(), "1x128x16")
    assert p.timeline is not None
    assert [(row.address, row.peak_bytes) for row in ranking(p, 1)["peak_bytes"]] == [("", p.peak_bytes)]
    assert repr(p.top(1, by="peak")).startswith("(<(root): Attends, 153 KiB own peak memory;")
    p = mt.profile(nn.Sequential(Attends(), nn.Linear(16, 4096)).eval(), "1x128x16")
    own = p.own_row(p["0"])
    assert own is not None
    assert p.timeline is not None
    live = [live for live, at in zip(p.timeline.live_bytes, p.timeline.calls, strict=True) if p.calls[at] is p["0"]]
    assert own.peak_bytes == max(live) < p.peak_bytes
    by_peak = [row.address for row in p.top(by="peak")]
    assert by_peak[0] == "1"
    assert {"0", "0.layer"} < set(by_peak)


def test_the_own_peak_is_unknown_without_a_timeline() -> None:
    p = replace(mt.profile(Attends().eval(), "1x128x16"), timeline=None)
    own = p.own_row(p.total)
    assert own is not None
    assert own.peak_bytes is None
    assert [row.address for row in p.top(by="peak")] == ["layer"]


def test_fewer_than_one_are_refused(p: mt.Profile) -> None:
    with pytest.raises(BadQuery, match="expected n of 1 or more, got 0"):
        ranking(p, 0)


class Solves(nn.Module):
    """Runs an operator that has no formula, and nothing else."""

    def forward(self, x):  # type: ignore[no-untyped-def]
        return x.cholesky_solve(x)


def test_why_there_is_no_section_is_said() -> None:
    lines = text(mt.profile(nn.Sequential(nn.Flatten(), nn.Identity()), "2x8")).splitlines()
    assert not {"by params", "by MACs"} & set(lines)
    assert "by peak memory" in lines
    assert "params: 0 in every layer" in lines
    assert "MACs: 0 in every layer" in lines
    lines = text(mt.profile(Solves(), "3x3")).splitlines()
    assert "MACs: unknown, no formula for aten.cholesky_solve.default" in lines


@pytest.mark.parametrize("width", [60, 80, 120])
def test_rows_never_wrap(p: mt.Profile, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = text(p).splitlines()
    table = lines[
        lines.index("by params") : [line.startswith("costs are those of a layer") for line in lines].index(True)
    ]
    rows = [line for line in table if line and not line.startswith("by ")]
    assert len(rows) == 30
    assert all(line.endswith(" %") and len(line) <= width for line in rows)


def test_numbers_of_a_column_end_at_the_same_place(p: mt.Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = text(p).splitlines()
    (head,) = [line for line in lines if "params k" in line]
    end = head.index("params k") + len("params k")
    rows = [line for line in lines if line.endswith(" %")]
    assert all(line[end - 1].isdigit() and line[end] == " " for line in rows)


def test_json_has_raw_numbers(p: mt.Profile) -> None:
    data = json.loads(as_json(p, 2))
    assert data["top"]["macs"]["whole"] == p.total.macs
    first = data["top"]["macs"]["layers"][0]
    assert first["macs"] == p[first["address"]].own.macs
    assert len(data["top"]["params"]["layers"]) == 2


def test_the_unit_of_all_is_that_of_the_largest_number() -> None:
    scale = scale_of_largest([1536.0, 10 * 1024.0], "bytes")
    assert (scale.unit, scale.write(1536.0), scale.write(10240.0)) == ("KiB", "1.50", "10.00")
    assert scale_of_largest([], "seconds").write(None) == "–"  # noqa: RUF001
    assert scale_of_largest([0.0], "joules").write(0.0) == "0"
    assert scale_of_largest([12.0], "count") == (1.0, "", 0)
