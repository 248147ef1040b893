"""What changed between two profiles."""

from __future__ import annotations

import csv as csv_format
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, silu

import microtome as mt
from microtome import zoo
from microtome.errors import BadFile, BadQuery
from microtome.report.diff import ChangeSelection
from microtome.report.formats import csv, markdown, text
from microtome.results.diff import MetricChange
from microtome.results.measurements import Spread
from microtome.results.profile import Coverage, UnknownOp
from microtome.units import UNKNOWN, count


def net(width: int = 8, *, last: bool = True, name: str = "a") -> mt.Profile:
    layers = {name: nn.Linear(4, width), "act": nn.ReLU(), "b": nn.Linear(width, 2)}
    model = nn.Sequential()
    for word, layer in layers.items():
        if last or word != "b":
            model.add_module(word, layer)
    return mt.profile(model, torch.ones(1, 4))


def timed(profile: mt.Profile, seconds: float, half: float) -> mt.Profile:
    """Every call took so long, and spread by a half of it around."""
    spread = Spread(seconds, seconds - half, seconds + half, seconds - half, seconds + half, 9, 0)
    rows = tuple(replace(row, time_s=seconds, spreads={"time_s": spread}) for row in profile)
    return replace(profile, calls=rows)


def test_a_profile_does_not_differ_from_itself() -> None:
    same = net().diff(net())
    assert same.layers == ()
    assert (same.unchanged, same.noise) == (4, 0)
    assert all(change.growth == 0 for change in same.totals)
    assert "no layer changed; 4 as before" in text(same)


def test_totals_and_layers_say_what_grew() -> None:
    # 4 x 8 and 8 x 2 MACs grow to 4 x 16 and 16 x 2.
    grown = net().diff(net(16))
    assert (grown["macs"].before, grown["macs"].after, grown["macs"].growth) == (48, 96, 1.0)
    assert {layer.address: layer.note for layer in grown.layers} == {
        "a": "output 1x8 to 1x16",
        "b": "",
        "act": "output 1x8 to 1x16",
    }
    assert grown.layers[0].changes[1] == MetricChange("macs", 32, 64)
    assert "+100.0 %" in text(grown)


def test_layers_are_added_and_removed() -> None:
    fewer = net().diff(net(last=False))
    removed, root = fewer.layers  # the root returns the output of another layer
    assert [(layer.address, layer.what, layer.note) for layer in (removed, root)] == [
        ("b", "removed", ""),
        ("", "changed", "output 1x2 to 1x8"),
    ]
    assert "Linear removed" in text(fewer)
    renamed = net().diff(net(name="first"))
    assert {(layer.address, layer.what) for layer in renamed.layers} == {("a", "removed"), ("first", "added")}
    assert "layers: 1 added, 1 removed; 3 as before" in text(renamed)


class Own(nn.Module):
    """A layer, then operators outside any layer."""

    def __init__(self, ops: Sequence[Callable[[torch.Tensor], torch.Tensor]], width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.ops = ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for op in self.ops:
            x = op(x)
        return x


def own(*ops: Callable[[torch.Tensor], torch.Tensor], width: int = 8) -> mt.Profile:
    return mt.profile(Own(ops, width), "1x4")


@pytest.mark.parametrize(
    ("after", "note", "changes"),
    [
        # One FLOP for each of 8 elements.
        ([gelu] * 5, "runs aten.gelu.default 1 to 5 times", [MetricChange("flops", 8, 40)]),
        ([silu], "runs aten.gelu.default 1 to 0 times, aten.silu.default 0 to 1 times", []),
        (
            [gelu, lambda x: x[:, :4]],
            "output 1x8 to 1x4",
            [MetricChange("output", 32, 16)],
        ),
    ],
)
def test_a_call_whose_own_operators_or_output_changed_is_not_as_before(
    after: list[Any], note: str, changes: list[MetricChange]
) -> None:
    changed = own(gelu).diff(own(*after))
    assert [(layer.address, layer.note, list(layer.changes)) for layer in changed.layers] == [("", note, changes)]
    assert changed.unchanged == 1
    assert "layers: 1 changed; 1 as before" in text(changed)


def test_an_output_of_another_dtype_is_a_change() -> None:
    (root,) = own(torch.Tensor.half).diff(own(torch.Tensor.bfloat16)).layers
    assert (root.address, root.note) == ("", "output float16 to bfloat16")


def test_views_are_no_change() -> None:
    assert own(gelu).diff(own(lambda x: x.view(8).view(1, 8), gelu)).layers == ()


@pytest.mark.parametrize(
    ("freeze", "note"),
    [(True, "trainable 40 to 0"), (False, "weights 160 B to 80 B; read 176 B to 96 B")],
)
def test_counts_that_no_column_compares_are_changes_too(freeze: bool, note: str) -> None:
    # 4 x 8 weights and 8 of the bias, with 4 bytes each or with 2; also read are 4 inputs.
    before = own()
    row = before["layer"]
    amounts = {"trainable_params": 0} if freeze else {"param_bytes": 80, "read_bytes": row.own.read_bytes - 80}
    rows = tuple(replace(one, own=replace(one.own, **amounts)) if one is row else one for one in before)
    changed = before.diff(replace(before, calls=rows))
    assert [(layer.address, layer.note) for layer in changed.layers] == [("layer", note)]


def test_a_backward_that_costs_less_is_a_change() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    both = mt.profile(model, "1x4", backward=True)
    model[0].requires_grad_(False)
    frozen = mt.profile(model, "1x4", backward=True)
    assert [layer.address for layer in both.diff(frozen).layers] == ["0", "1"]  # which computes no gradient for it
    model.requires_grad_(True)
    assert both.diff(mt.profile(model, "1x4")).layers == ()  # a backward that was not counted is no change


def test_costs_of_a_call_with_calls_inside_are_called_its_own() -> None:
    shown = text(own(gelu).diff(own(gelu, gelu)))
    assert rows(shown)[1] == ["", "own FLOPs", "8", "16", "+100.0 %"]


def test_flops_are_shown_where_macs_are_not_or_on_request() -> None:
    changed = own(gelu).diff(own(gelu, width=16))
    names = [row[1] for row in rows(text(changed))]
    assert names.count("FLOPs") == 0
    assert names.count("own FLOPs") == 1
    assert "FLOPs" in [row[1] for row in rows(text(changed, ChangeSelection(sort="flops")))]


def test_the_counts_of_calls_agree_with_the_table() -> None:
    def repeated(times: int) -> mt.Profile:
        return mt.profile(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(times))), "1x4")

    removed = repeated(3).diff(repeated(2))
    shown = text(removed)
    assert rows(shown)[0][:2] == ["2", "Sequential removed, with 2 calls inside"]
    assert "layers: 3 removed; 7 as before, by their own costs" in shown
    assert removed.unchanged + len(removed.layers) == 10  # calls of the larger model


@pytest.fixture(scope="module")
def pruned() -> tuple[mt.Profile, mt.Profile]:
    """A profile, and one in which a block is an identity."""
    model, x = zoo.build("tiny-resnet")
    small: Any = zoo.build("tiny-resnet")[0]
    small.layer2[1] = nn.Identity()
    return mt.profile(model, x), mt.profile(small, x)


def rows(shown: str) -> list[list[str]]:
    """The cells of the table of layers."""
    lines = shown.partition("what changed")[2].splitlines()
    return [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]


@pytest.mark.parametrize("view", [ChangeSelection(), ChangeSelection(depth=2)])
def test_a_module_stands_for_calls_that_were_all_removed(
    view: ChangeSelection, pruned: tuple[mt.Profile, mt.Profile]
) -> None:
    block = pruned[0]["layer2.1"]
    shown = text(pruned[0].diff(pruned[1]), view)
    assert rows(shown) == [
        ["layer2.1", "ResidualBlock to Identity; 7 calls removed", "", "", ""],
        ["", "params", count(block.params), "0", "−100.0 %"],  # noqa: RUF001
        ["", "MACs", count(block.macs), "0", "−100.0 %"],  # noqa: RUF001
    ]
    assert "show(expand=True) lists each" in shown
    added = text(pruned[1].diff(pruned[0]), view)
    assert "Identity to ResidualBlock; 7 calls added" in added
    expanded = rows(text(pruned[0].diff(pruned[1]), ChangeSelection(expand=True)))
    assert sum("removed" in row[1] for row in expanded) == 7


def test_a_removed_module_is_one_row(pruned: tuple[mt.Profile, mt.Profile]) -> None:
    model: Any = zoo.build("tiny-resnet")[0]
    del model.layer2[1]
    removed = pruned[0].diff(mt.profile(model, "2x3x32x32"))
    assert rows(text(removed))[0][:2] == ["layer2.1", "ResidualBlock removed, with 7 calls inside"]
    assert rows(text(removed))[1][2:] == [count(pruned[0]["layer2.1"].params), UNKNOWN, "gone"]


@pytest.mark.parametrize(("depth", "address"), [(0, ""), (1, "layer2"), (2, "layer2.0"), (3, "layer2.0.conv1")])
def test_at_a_depth_a_layer_has_the_changes_of_all_calls_inside_it(depth: int, address: str) -> None:
    model, x = zoo.build("tiny-resnet")
    other: Any = zoo.build("tiny-resnet")[0]
    other.layer2[0].conv1 = nn.Conv2d(8, 16, 1, stride=2, bias=False)
    before, after = mt.profile(model, x), mt.profile(other, x)
    shown = text(before.diff(after), ChangeSelection(depth=depth, columns=("params",)))
    numbers = [count(profile[address].params) for profile in (before, after)]
    ((name, _, *found, _),) = rows(shown)
    assert (name, found) == (address or "(root)", numbers)


def test_changes_that_cancel_are_said() -> None:
    one, two = (mt.profile(nn.Sequential(nn.Sequential(*them)), "1x4") for them in ORDERS)
    assert rows(text(one.diff(two), ChangeSelection(depth=1))) == [["0", "calls inside, not their sum", "", "", ""]]


#: The same layers, with an activation before and after.
ORDERS = (nn.ReLU(), nn.Linear(4, 4)), (nn.Linear(4, 4), nn.ReLU())


def test_another_kind_of_module_is_told() -> None:
    one = mt.profile(nn.Sequential(nn.ReLU()), "1x4")
    two = mt.profile(nn.Sequential(nn.Tanh()), "1x4")
    assert [layer.note for layer in one.diff(two).layers] == ["ReLU to Tanh"]


def test_times_that_meet_are_noise() -> None:
    near = timed(net(), 1.0, 0.2).diff(timed(net(), 1.1, 0.2))
    assert near["time"].is_noise
    assert (near.layers, near.noise, near.over({"time": 0.05})) == ((), 3, ())
    assert "│  noise" in text(near)
    far = timed(net(), 1.0, 0.02).diff(timed(net(), 1.1, 0.02))
    assert not far["time"].is_noise
    # Of calls with calls inside, only those are told.
    assert {layer.address for layer in far.layers} == {"a", "act", "b"}
    assert [change.quantity for change in far.over({"time": 0.05, "macs": 0.0})] == ["time"]
    assert far.over({"time": 0.2}) == ()


def test_less_is_never_over_a_limit_and_something_from_nothing_is() -> None:
    assert net(16).diff(net()).over({"macs": 0.0}) == ()
    assert MetricChange("macs", 0, 5).growth == inf
    assert MetricChange("time", None, 5.0).growth is None


def test_what_is_not_known_cannot_be_limited() -> None:
    same = net().diff(net())
    with pytest.raises(BadQuery, match=r"time is not known of both profiles: measure both with measure=\[\"time\"\]"):
        same.over({"time": 0.1})
    with pytest.raises(BadQuery, match="no metric 'speed' to compare: expected one of params, macs, "):
        same.over({"speed": 0.1})
    with pytest.raises(BadQuery, match="no metric 3 to compare: expected one of params, macs, "):
        same[3]  # type: ignore[index]
    with pytest.raises(BadQuery, match="expected a profile to compare with, or a file of one, got a int"):
        net().diff(3)  # type: ignore[arg-type]


def test_a_layer_that_cannot_be_counted_any_more_is_no_gain() -> None:
    before = net()
    unknown = Coverage(3, (UnknownOp("mine.op.default", 1, ("b",)),), ())
    rows = tuple(
        replace(row, macs=None, own=replace(row.own, macs=None)) if row.address == "b" else row for row in before
    )
    after = replace(before, calls=rows, coverage=unknown)
    lost = before.diff(after)
    assert [(layer.address, layer.changes) for layer in lost.layers] == [("b", (MetricChange("macs", 16, None),))]
    assert "not known" in text(lost)
    assert "after, 2 of 3 operators, an unknown share of the work, are counted: no formula for mine.op.default" in text(
        lost
    )
    with pytest.raises(BadQuery, match="macs of .* leaves out mine.op.default, which has no formula"):
        lost.over({"macs": 0.05})
    assert after.diff(after).over({"macs": 0.05}) == ()  # as much is left out of both
    assert after.diff(before).over({"macs": 0.05}) == ()
    often = replace(after, coverage=Coverage(3, (UnknownOp("mine.op.default", 2, ("b",)),), ()))
    assert after.diff(often).uncounted == ("mine.op.default",)


def test_the_peak_of_a_backward_counts_and_gradients_are_told() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        bare = mt.profile(model, torch.ones(1, 64))
    trained = mt.profile(model, torch.ones(1, 64), backward=True)
    changed, same = bare.diff(trained), trained.diff(trained)
    assert same["memory"].after == trained.peak_bytes == max(trained.timeline.live_bytes if trained.timeline else ())
    assert trained.peak_bytes > trained.total.peak_bytes  # the gradients of weights are as large as the weights
    assert changed["memory"].after == trained.total.peak_bytes
    assert "memory is that of the forward: one of the two has no backward" in changed.notes
    assert "memory is not comparable: after, it holds what a backward needs" in changed.notes
    assert trained.diff(trained)["backward"].growth == 0.0
    with pytest.raises(BadQuery, match="backward is not known of both profiles: count both with backward=True"):
        changed.over({"backward": 0.1})


def test_other_inputs_conventions_and_machines_are_noted() -> None:
    model, x = zoo.build("tiny-resnet")
    one = replace(mt.profile(model, x), environment={"cpu": "A", "torch": "2"})
    two = replace(mt.profile(model, "1x3x32x32", convention="fvcore"), environment={"cpu": "B", "torch": "2"})
    notes = " ".join(one.diff(two).notes)
    for words in ("the inputs differ", "conventions microtome and fvcore", "measured with other cpu: A and B"):
        assert words in notes


def test_markdown_survives_hostile_names_and_folds_many_layers() -> None:
    hostile = net().diff(net(name="x|`y`<b>"))
    lines = markdown(hostile).splitlines()
    (line,) = [line for line in lines if "added" in line and line.startswith("|")]
    assert line == "| `` x\\|`y`<b> `` | Linear added |  |  |  |"
    tables = [line for line in lines if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") in (5, 6) for line in tables)
    model, x = zoo.build("tiny-resnet")
    many = mt.profile(model, x).diff(mt.profile(model, "1x3x32x32"))
    assert "<details><summary>" in markdown(many)
    assert "shown: the 30 layers that changed the most" in markdown(many)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", '"many"'])
def test_numbers_that_are_none_are_refused_in_files(tmp_path: Path, number: str) -> None:
    file = tmp_path / "diff.json"
    text_ = net().diff(net(16)).to_json()
    file.write_text(text_.replace('"before": 58', f'"before": {number}', 1))  # 4 x 8 + 8 and 8 x 2 + 2 parameters
    with pytest.raises(BadFile, match=r"is not a diff: totals\[0\].before: expected a number, got"):
        mt.load(file)


def test_it_is_read_from_json_as_it_was(tmp_path: Path) -> None:
    grown = timed(net(), 1.0, 0.02).diff(timed(net(16), 1.1, 0.02))
    grown.to_json(tmp_path / "diff.json")
    assert mt.load(tmp_path / "diff.json") == grown
    rows = list(csv_format.DictReader(io.StringIO(csv(grown))))
    assert [row["after"] for row in rows if row["quantity"] == "macs" and row["address"] == ""] == ["96"]


def test_files_tell_own_numbers_from_those_with_the_calls_inside() -> None:
    layer = mt.profile(nn.Sequential(nn.Linear(4, 2)), torch.ones(1, 4))
    block = mt.profile(nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))), torch.ones(1, 4))
    grown = layer.diff(block)
    rows = {(row["address"], row["quantity"]): row for row in csv_format.DictReader(io.StringIO(csv(grown)))}
    # 4 x 2 before, 4 x 8 and 8 x 2 after: the block itself multiplies nothing.
    assert (rows["0", "macs"]["before"], rows["0", "macs"]["after"]) == ("8", "48")
    assert (rows["0", "own_macs"]["before"], rows["0", "own_macs"]["after"]) == ("8", "0")
    assert rows["0.1", "macs"]["after"] == "16"
    assert ("0.1", "own_macs") not in rows
    assert {layer.is_own for layer in grown.layers} == {True}
    assert {layer.is_own for layer in grown.modules} == {False}


@pytest.mark.parametrize("width", [60, 80])
def test_rows_never_wrap(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    model, x = zoo.build("tiny-decoder")
    p = mt.profile(model, x)
    halved = replace(p, calls=tuple(replace(row, own=replace(row.own, macs=1), output_bytes=7) for row in p))
    table = [line for line in text(p.diff(halved)).splitlines() if "│" in line]
    assert len(table) > 20
    assert all(len(line) <= width and line.endswith(("%", "same", "new")) for line in table)
