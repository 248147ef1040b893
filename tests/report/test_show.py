"""`show` prints the selected rows and columns of every result."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery
from microtome.report.formats import text
from microtome.report.row_selection import RowSelection
from microtome.results.diff import Diff


@pytest.fixture(scope="module")
def profile() -> mt.Profile:
    return mt.profile(*zoo.build("tiny-resnet"))


@pytest.fixture(scope="module")
def cuts() -> mt.Cuts:
    return mt.cuts(*zoo.build("tiny-resnet"))


@pytest.fixture(scope="module")
def plan(cuts: mt.Cuts) -> mt.Plan:
    with torch.no_grad():
        timed = mt.profile(*zoo.build("tiny-resnet"), measure=["time"], repeat=3, warmup=0)
    return mt.plan(cuts, edge=timed, cloud=timed, link=mt.Link("20Mbps", rtt="1ms"))


@pytest.fixture(scope="module")
def diff(profile: mt.Profile) -> Diff:
    return profile.diff(mt.profile(zoo.build("tiny-resnet")[0], "4x3x32x32"))


Lines = Callable[..., list[list[str]]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """Return the cells of the rows that a call prints, the header first."""

    def show(result: Any, **options: Any) -> list[list[str]]:
        capsys.readouterr()
        result.show(**options)
        printed = capsys.readouterr().out.splitlines()
        return [[cell.strip() for cell in re.split("[┃│]", line)] for line in printed if re.search("[┃│]", line)]

    return show


def test_a_profile_is_grouped_sorted_and_limited(profile: mt.Profile, lines: Lines) -> None:
    head, *rows, total = lines(profile, by="type", sort="params", top=2, columns=["params", "macs"])
    assert head == ["module", "params k", "MACs M"]
    assert [row[0] for row in rows] == ["Conv2d", "BatchNorm2d"]
    assert total[0] == "total"
    assert [row[0] for row in lines(profile, depth=0)] == ["call", "(root)", "total"]
    assert lines(profile, columns="params")[0] == ["call", "params k"]


def test_cuts_are_sorted_by_the_least(cuts: mt.Cuts, lines: Lines) -> None:
    rows = lines(cuts, sort="bytes", top=3, columns=["bytes", "crosses"])
    least = sorted(cuts, key=lambda cut: cut.nbytes)[:3]
    assert [row[0].lstrip("* ") for row in rows[1:]] == [cut.at for cut in least]
    assert rows[0] == ["cut", "bytes", "crosses"]
    shown = [row[0].lstrip("* ") for row in lines(cuts, depth=1)]
    assert shown[-1] == "(output)"
    assert shown[shown.index("(input)") + 1 : -1] == [cut.at for cut in cuts if cut.depth == 1]


def test_a_plan_is_sorted_by_another_quantity(plan: mt.Plan, lines: Lines) -> None:
    rows = lines(plan, sort="sent", top=4, columns=["sent"])
    assert rows[0] == ["cut", "sent"]
    sizes = {candidate.name: sum(candidate.sent_bytes) for candidate in plan}
    shown = [sizes[row[0].lstrip("* ")] for row in rows[1:]]
    assert shown == sorted(shown)


def test_a_diff_shows_the_metrics_and_layers_that_are_chosen(diff: Diff, lines: Lines) -> None:
    rows = lines(diff, columns=["macs"], sort="macs", top=2)
    assert {row[0] for row in rows if row[0] not in ("total", "layer")} >= {"MACs"}
    layers = [row[0] for row in rows[rows.index(next(row for row in rows if row[0] == "layer")) + 1 :] if row[0]]
    changes = {layer.address: change for layer in diff.layers for change in layer.changes if change.quantity == "macs"}
    largest = sorted(changes, key=lambda address: -abs((changes[address].after or 0) - (changes[address].before or 0)))
    assert len(layers) == 2
    assert {changes[layer].after for layer in layers} == {changes[layer].after for layer in largest[:2]}
    shallow = lines(diff, depth=1)
    assert not any("." in row[0] for row in shallow)


@pytest.mark.parametrize(
    ("name", "header", "column"),
    [
        ("profile", "peak", "peak_bytes"),
        ("profile", "moved", "moved_bytes"),
        ("profile", "MACs", "macs"),
        ("profile", "FLOPs share", "share"),
        ("cuts", "head MACs", "head_macs"),
        ("plan", "passes/s", "throughput"),
        ("diff", "peak memory", "memory"),
    ],
)
def test_headers_are_names_of_columns(
    name: str, header: str, column: str, lines: Lines, request: pytest.FixtureRequest
) -> None:
    result = request.getfixturevalue(name)
    if name != "plan":
        assert lines(result, columns=[header]) == lines(result, columns=[column])
    assert lines(result, sort=header) == lines(result, sort=column)


def test_the_summary_and_top_take_headers(profile: mt.Profile, lines: Lines) -> None:
    summary = mt.profile(zoo.build("tiny-resnet")[0])
    assert lines(summary, sort="weights") == lines(summary, sort="param_bytes")
    assert profile.top(by="moved") == profile.top(by="moved_bytes")
    assert profile.top(by="share") == profile.top(by="FLOPs share") == profile.top(by="flops")


def test_the_top_takes_metrics_that_do_not_add_up(profile: mt.Profile) -> None:
    outputs = [row.output_bytes for row in profile.top(3, by="output")]
    assert outputs == sorted((row.output_bytes for row in profile if row.height == 1), reverse=True)[:3]
    line = profile.timeline
    assert line is not None
    peaks: dict[str, int] = {row.address: row.peak_bytes for row in profile if row.height == 1}
    for live, at in zip(line.live_bytes, line.calls, strict=True):
        if profile.calls[at].height > 1:  # of its own operators
            peaks[profile.calls[at].address] = max(live, peaks.get(profile.calls[at].address, 0))
    for name in ("peak", "peak memory", "memory"):
        costs = [peaks[row.address] for row in profile.top(5, by=name)]
        assert costs == sorted(peaks.values(), reverse=True)[:5]


@pytest.mark.parametrize("sort", ["peak", "output bytes", "madds"])
def test_the_column_to_sort_by_is_never_dropped(
    profile: mt.Profile, lines: Lines, sort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    header = {"peak": "peak MiB", "output bytes": "output KiB", "madds": "MAdds M"}[sort]
    assert header in lines(profile, sort=sort, top=2)[0]


def test_cuts_and_plans_keep_the_column_to_sort_by(
    cuts: mt.Cuts, plan: mt.Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    cuts.show(sort="head_params")
    assert "head params" not in capsys.readouterr().out.partition("no room for: ")[2]
    plan.show(sort="passes/s")
    assert "passes/s" not in capsys.readouterr().out.partition("no room for: ")[2]


def test_names_of_columns_may_have_a_unit_or_be_the_first_one(profile: mt.Profile, cuts: mt.Cuts, lines: Lines) -> None:
    assert lines(profile, columns=["call", "params k", "MACs M"]) == lines(profile, columns=["params", "macs"])
    assert lines(profile, sort="moved KiB") == lines(profile, sort="moved")
    assert lines(profile, by="op", columns=["operator", "MACs"]) == lines(profile, by="op", columns=["macs"])
    assert lines(cuts, columns=["cut", "bytes"]) == lines(cuts, columns=["bytes"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("profile", {"columns": ["peek"]}, "no column 'peek': did you mean 'peak_bytes'"),
        ("profile", {"columns": ["parms"]}, "no column 'parms': did you mean 'params'"),
        ("profile", {"sort": "time"}, "no row has a value of 'time' to sort by"),
        ("profile", {"depth": 1, "by": "op"}, "expected one of depth, granularity and by, got several"),
        ("profile", {"by": "layer"}, "expected by to be one of module, type, op, got 'layer'"),
        ("profile", {"top": 0}, "expected top of 1 or more, got 0"),
        ("profile", {"depth": "2"}, "expected depth of 0 or more, got '2'"),
        ("cuts", {"sort": "latency"}, "no column 'latency' to sort by: expected one of bytes, head_macs"),
        ("cuts", {"columns": ["byte"]}, "no column 'byte': did you mean 'bytes'"),
        ("plan", {"sort": "energy"}, "no candidate has a value of 'energy' to sort by"),
        ("plan", {"sort": "size"}, "no column 'size' to sort by"),
        ("diff", {"sort": "speed"}, "no column 'speed' to compare"),
    ],
)
def test_invalid_options_raise(
    name: str, options: dict[str, Any], message: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(BadQuery, match=message):
        request.getfixturevalue(name).show(**options)


def test_rows_cuts_and_candidates_have_short_reprs(profile: mt.Profile, cuts: mt.Cuts, plan: mt.Plan) -> None:
    assert repr(profile["layer1.0.conv1"]) == "<layer1.0.conv1: Conv2d, 576 params, 1.18 M MACs>"
    assert repr(profile.by_type()["Conv2d"]) == "<Conv2d: 10 runs, 10.7 k params, 9.36 M MACs>"
    assert repr(cuts["pool"]) == "<Cut at 'pool', 128 B>"
    assert repr(plan.winner).startswith(f"<Candidate {plan.winner.name!r}, ")
    assert len(repr(profile.top(10))) < 1000


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        y: torch.Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return y


class Encoder(nn.Module):
    def __init__(self, num_blocks: int = 5, odd: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Attention(), nn.GELU()) for _ in range(num_blocks))
        if odd is not None:
            self.blocks[odd] = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_identical_blocks_are_one_row_that_sums_them_up(lines: Lines) -> None:
    p = mt.profile(Encoder(), "2x4x8")
    rows = {row[0]: row for row in lines(p, columns=["params", "macs"])}
    assert rows["blocks.* ×5"][2] == rows["total"][2]  # noqa: RUF001
    # 2 products of (2, 4, 4) by 8 in each of 5 blocks
    assert rows["(scaled_dot_product_attention)"][2] == f"{5 * 2 * 2 * 4 * 4 * 8 / 1000:.2f}"
    assert "qkv" in rows
    every = [row[0] for row in lines(p, expand=True, depth=2)]
    assert [name for name in every if name.startswith("blocks")] == [f"blocks.{index}" for index in range(5)]


@pytest.mark.parametrize(
    ("odd", "names"),
    [
        (0, ["blocks.0", "blocks.[1-4] ×4"]),  # noqa: RUF001
        (4, ["blocks.[0-3] ×4", "blocks.4"]),  # noqa: RUF001
        (2, ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.4"]),
    ],
)
def test_blocks_that_differ_have_rows_of_their_own(odd: int, names: list[str], lines: Lines) -> None:
    p = mt.profile(Encoder(odd=odd), "2x4x8")
    assert [row[0] for row in lines(p) if row[0].startswith("blocks")] == names
    for name in names:  # the name of a row selects its calls
        path = name.partition(" ")[0]
        assert p[path]


def test_repeated_calls_of_a_module_are_one_row(lines: Lines) -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = self.layer(x)
            return x

    rows = {row[0]: row for row in lines(mt.profile(Repeats(), "2x8"), columns=["params", "macs"])}
    assert rows["layer#0…3 ×4"][1:] == ["72", "512"]  # noqa: RUF001


def test_files_have_every_call_and_nothing_else() -> None:
    p = mt.profile(Encoder(), "2x4x8")
    assert p.to_csv().count("\n") == len(p) + 1
    assert p.to_markdown().count("`blocks.") == 5


def test_a_notebook_displays_html_and_has_the_text(profile: mt.Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[Any] = []

    class Module:
        @staticmethod
        def get_ipython() -> Any:
            return type("Shell", (), {"kernel": None})()

    class Display:
        display = staticmethod(lambda bundle, raw: displayed.append((bundle, raw)))

    monkeypatch.setitem(__import__("sys").modules, "IPython", Module)
    monkeypatch.setitem(__import__("sys").modules, "IPython.display", Display)
    profile.show(top=3)
    ((bundle, is_raw),) = displayed
    assert is_raw
    assert "3 of 47 rows shown" in bundle["text/html"]
    assert bundle["text/plain"] == text(profile, RowSelection(top=3))
