"""Profiles as tables."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery
from microtome.report.call_tree import OWN_SHARE
from microtome.report.cuts import details
from microtome.report.formats import csv, markdown, text
from microtome.report.notes import profile_notes
from microtome.report.row_selection import RowSelection
from microtome.report.table import text as report_text
from microtome.report.top import text as of_top
from microtome.units import UNKNOWN


@pytest.fixture(scope="module")
def p() -> mt.Profile:
    return mt.profile(*zoo.build("tiny-decoder"), backward=True)


def rows(table: str) -> list[list[str]]:
    """The cells of the lines between the head and the total."""
    lines = [line for line in table.splitlines() if "│" in line]
    return [[cell.strip() for cell in line.split("│")] for line in lines]


GOLDEN = """\
Sequential on input 4x6
call   ┃ module     ┃ output ┃ params ┃ MACs ┃ FLOPs ┃ FLOPs share  ┃ moved B ┃ peak B
━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━╇━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━
(root) │ Sequential │ 4x3    │     83 │  288 │   652 │ ████ 100.0 % │     988 │    604
  0    │ Linear     │ 4x8    │     56 │  192 │   416 │ ██▌   63.8 % │     448 │    556
  1    │ ReLU       │ 4x8    │      0 │    0 │    32 │ ▎      4.9 % │     256 │    556
  2    │ Linear     │ 4x3    │     27 │   96 │   204 │ █▎    31.3 % │     284 │    604
───────┼────────────┼────────┼────────┼──────┼───────┼──────────────┼─────────┼───────
total  │            │ 4x3    │     83 │  288 │   652 │              │     988 │    604
83 parameters (83 trainable, 332 B); 288 MACs; 652 FLOPs (microtome convention)
counted: 100.0% of 6 operators, on meta tensors, with gradients: memory includes tensors saved for the backward"""


def test_a_small_table_is_drawn_so() -> None:
    p = mt.profile(nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), "4x6")
    # 4 x 6 by 6 x 8 and 32 biases, 32 ReLUs, 4 x 8 by 8 x 3 and 12 biases.
    assert p.total.flops == 2 * 192 + 32 + 32 + 2 * 96 + 12
    assert text(p) == GOLDEN


def test_the_tree_is_indented_and_ends_with_the_total(p: mt.Profile) -> None:
    lines = rows(str(p))
    names = ["(root)", "(add, arange)", "tokens", "positions", "layers.0", "(add, mul)", "norm1"]
    assert [line[0] for line in lines][:7] == names
    assert "\n    norm1 " in str(p)
    assert lines[-1][0] == "total"


def test_tied_parameters_are_in_brackets(p: mt.Profile) -> None:
    (head,) = [line for line in rows(str(p)) if line[0] == "lm_head"]
    assert "(2.05)" in head
    assert "parameters in brackets are counted elsewhere" in str(p)


def test_text_for_a_pipe_has_no_colours_and_every_column(p: mt.Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert "\x1b" not in str(p)
    assert "no room for:" not in str(p)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = str(p)
    assert max(map(len, narrow.splitlines())) <= 60
    assert "no room for:" in narrow
    assert "FLOPs" in narrow


class Wrap(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.inner(x)


@pytest.mark.parametrize(
    "view", [RowSelection(), RowSelection(columns=("params", "flops")), RowSelection(sort="flops")]
)
def test_numbers_stay_beside_long_names_and_deep_calls(view: RowSelection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = nn.Sequential()
    long.add_module("x" * 75 + "y" * 75, nn.Linear(8, 8))
    deep: nn.Module = nn.Linear(8, 8)
    for _ in range(40):
        deep = Wrap(deep)
    for model, end in ((long, "yyy"), (deep, "inner")):
        lines = text(mt.profile(model, "2x8"), view).splitlines()
        assert max(map(len, lines)) <= 80
        assert "FLOPs" in lines[1]
        last = [line for line in lines if "│" in line][-2].split("│")
        assert "…" in last[0]
        assert last[0].strip().endswith(end)
        assert "272" in [cell.strip() for cell in last]  # 2 x 8 by 8 x 8, and 16 biases


@pytest.fixture(scope="module")
def hostile() -> nn.Module:
    """Modules whose names would break a table: in a terminal, in Markdown, in the HTML that is made of it."""
    model = nn.Sequential()
    for name in ("new\nline", "\x1b[31mesc", "rtl\u202eabc", "|pipe|", "`tick`", "a<b>&amp;", "half\ud800"):
        model.add_module(name, nn.Linear(8, 8))
    return model


def test_names_cannot_break_a_table(hostile: nn.Module) -> None:
    p = mt.profile(hostile, "2x8")
    found = mt.cuts(hostile, "2x8")
    cost = found.best("bytes")
    for shown in (
        text(p),
        text(p, RowSelection(by="module")),
        of_top(p),
        str(found),
        report_text(details(cost, found)),
    ):
        assert not set("\x1b\u202e\ud800") & set(shown)
        assert "new\n" not in shown
    assert "new�line" in text(p)
    assert "�[31mesc" in of_top(p)
    assert "rtl�abc" in str(found)


def test_names_are_code_spans_in_markdown(hostile: nn.Module) -> None:
    for table in (mt.profile(hostile, "2x8").to_markdown(), mt.cuts(hostile, "2x8").to_markdown()):
        rows = [line for line in table.splitlines() if line.startswith("| ")]
        assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
        for name in ("`new�line`", "`�[31mesc`", "`\\|pipe\\|`", "`` `tick` ``", "`a<b>&amp;`"):
            assert name in table
    assert "a&lt;b&gt;&amp;amp;" in markdown(mt.profile(Wrap(Unused()), "2x8"))


class Unused(nn.Module):
    """Says in a note what never ran."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a<b>&amp;", nn.Linear(2, 2))

    def forward(self, x):  # type: ignore[no-untyped-def]
        return x + 1


def test_a_terminal_gets_colours_unless_it_wants_none(p: mt.Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in str(p)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in str(p)


def test_rich_prints_a_profile(p: mt.Profile) -> None:
    file = io.StringIO()
    Console(file=file, width=200).print(p)
    assert "lm_head" in file.getvalue()


def test_views_choose_rows(p: mt.Profile) -> None:
    assert [line[0] for line in rows(text(p, RowSelection(depth=1)))] == [
        *["(root)", "(add, arange)", "tokens", "positions", "layers.0", "layers.1", "norm", "lm_head", "total"]
    ]
    assert [line[0] for line in rows(text(p, RowSelection(by="type")))][:2] == ["Linear", "SelfAttention"]
    assert [line[0] for line in rows(text(p, RowSelection(by="op")))][:2] == ["aten.addmm.default", "aten.mm.default"]
    largest = [line[0] for line in rows(text(p, RowSelection(sort="params", top=2)))]
    assert largest == ["layers.0.mlp.0", "layers.1.mlp.0", "total"]
    assert [line[0] for line in rows(text(p, RowSelection(granularity=9)))] == ["(root)", "total"]
    assert [line[0] for line in rows(text(p, RowSelection(sort="macs", depth=1, top=1)))] == ["layers.0", "total"]


def test_it_is_said_where_rows_are_without_the_layers_inside_them(p: mt.Profile) -> None:
    note = "costs are those of a layer itself, without the layers inside it"
    for view in (RowSelection(sort="flops"), RowSelection(by="type"), RowSelection(by="type", sort="params")):
        assert note in text(p, view)
        assert f"- {note}" in markdown(p, view)
    for view in (RowSelection(), RowSelection(by="module", sort="flops"), RowSelection(by="op")):
        assert note not in text(p, view)
    for view in (RowSelection(granularity=2), RowSelection(sort="flops", depth=1)):
        assert "(own): the layer itself, without the layers inside it" in text(p, view)


def test_a_row_without_the_layers_inside_it_differs_in_its_name_from_that_of_the_whole(p: mt.Profile) -> None:
    view = RowSelection(sort="params", depth=1, columns=("params", "macs"))
    shown = text(p, view)
    assert ["(root) (add, arange)", "0", "0"] in rows(shown)
    assert "(root) (add, arange): the layer itself, without the layers inside it" in shown
    assert ",Decoder (own),0,0" in csv(p, view).splitlines()
    # The shape of what the root returns is not that of a sum inside it.
    assert ["(root) (add, arange)", ""] in rows(text(p, RowSelection(granularity=1, columns=("outputs",))))
    assert ["(add, arange)", ""] in rows(text(p, RowSelection(columns=("outputs",))))
    assert next(iter(p.rows(depth=1))).output_bytes is None


class Functional(nn.Module):
    """A layer, and the product of its output with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y @ y


def test_operators_have_no_time_of_calls_that_were_not_measured() -> None:
    # The layer inside is below the depth, so what the block takes is not known to be its operator's.
    whole = mt.profile(nn.Sequential(Functional()), "8x8", measure="time", repeat=3)
    shallow = mt.profile(nn.Sequential(Functional()), "8x8", measure="time", repeat=3, depth=1)
    view = RowSelection(columns=("macs", "time"))
    ((_, macs, time),) = [line for line in rows(text(whole, view)) if line[0] == "(mm)"]
    assert macs == "0.51"  # 8 x 8 x 8
    assert time != UNKNOWN
    assert [line for line in rows(text(shallow, view)) if line[0] == "(mm)"] == [["(mm)", "0.51", UNKNOWN]]
    note = "measured to depth 1: the time of 1 call below it is part of the own time of the calls around them"
    assert note in profile_notes(shallow)
    assert note not in profile_notes(whole)


class Shifted(nn.Module):
    """Two layers, and a shift of 64 elements between them: 64 of 66,688 FLOPs, and 0.8 % of the bytes moved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 64), nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x) + 1.0)
        return y


def shifted(own_s: float, blocks: int = 1) -> mt.Profile:
    """A profile in which all calls take a second, and the shifts of each block so long."""
    model = nn.Sequential(*[nn.Sequential(Shifted(), nn.Linear(256, 128)) for _ in range(blocks)])
    counted = mt.profile(model, "1x128")
    times = {1: (1.0 - blocks * own_s) / (3 * blocks)}
    inside = {"Shifted": 2 * times[1] + own_s, "Linear": times[1]}
    inside["Sequential"] = inside["Shifted"] + inside["Linear"]
    calls = []
    for row in counted:
        time = 1.0 if not row.depth else inside[row.type]
        own = own_s if row.type == "Shifted" else time if row.height == 1 else 0.0
        calls.append(replace(row, time_s=time, own=replace(row.own, time_s=own)))
    return replace(counted, calls=tuple(calls))


def own_names(profile: mt.Profile, **options: Any) -> list[str]:
    return [line[0] for line in rows(text(profile, RowSelection(**options))) if line[0].startswith("(add")]


def test_operators_between_modules_have_a_row_by_the_largest_of_their_shares() -> None:
    counted = mt.profile(Shifted(), "1x128")
    own = counted.total.own
    assert (own.flops or 0) / (counted.total.flops or 1) < OWN_SHARE
    assert own.moved_bytes / counted.total.moved_bytes < OWN_SHARE
    assert own_names(counted) == []
    for profile, names in ((shifted(0.2), ["(add)"]), (shifted(0.02), ["(add)"]), (shifted(0.002), [])):
        assert own_names(profile) == names
        assert ("`(add)`" in markdown(profile)) is bool(names)
        assert ("(add)" in profile._repr_html_()) is bool(names)
        assert (">(add)<" in profile.to_html()) is bool(names)


def test_operators_that_only_move_bytes_have_a_row() -> None:
    """A concatenation of 16 floats reads and writes 128 bytes, those of the layer are 4 x (16 + 16 x 16 + 16 + 16)."""

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            return torch.cat([y[:, :8], y[:, 8:]], 1)

    p = mt.profile(Doubled(), "1x16")
    assert (p.total.own.flops, p.total.own.moved_bytes) == (0, 128)
    assert [line[0] for line in rows(str(p))] == ["(root)", "(cat)", "layer", "total"]


def test_own_time_without_operators_has_a_row() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    counted = mt.profile(model, "1x4")
    root, layer = (replace(row, time_s=time) for row, time in zip(counted, (1.0, 0.5), strict=True))
    p = replace(counted, calls=(replace(root, own=replace(root.own, time_s=0.5)), layer))
    assert [line[0] for line in rows(str(p))] == ["(root)", "(no operators)", "0", "total"]


def test_a_note_has_the_share_of_operators_without_a_row() -> None:
    rule = "operators between modules have a row from 1 % of the model in any column"
    note = f"{rule}; the others have 1.6 % of time together"
    assert own_names(shifted(0.008, blocks=2), depth=3) == []
    assert note in text(shifted(0.008, blocks=2), RowSelection(depth=3))
    assert "have a row from" not in text(shifted(0.008, blocks=2), RowSelection(depth=2))  # inside the calls shown
    assert "have a row from" not in text(shifted(0.002), RowSelection(depth=3))
    # Identical blocks share a row, which has the sum.
    assert own_names(shifted(0.008, blocks=3)) == ["(add)"]
    assert own_names(shifted(0.008, blocks=3), expand=True, depth=3) == []


def test_rows_of_operators_make_the_tree_no_shallower() -> None:
    """29 blocks with a layer each make 59 calls, for which there is room."""
    p = mt.profile(nn.Sequential(*[Functional() for _ in range(29)]), "8x8")
    shown = text(p, RowSelection(expand=True))
    assert "shown to depth" not in shown
    assert sum(line[0] == "(mm)" for line in rows(shown)) == 29


def test_numbers_of_a_column_have_one_unit(p: mt.Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*seconds: float) -> list[str]:
        calls = tuple(replace(row, time_s=time) for row, time in zip(p.calls, seconds, strict=False))
        table = text(replace(p, calls=calls, timeline=None), RowSelection(columns=("time",), depth=1, calls_only=True))
        lines = [line.replace("┃", "│") for line in table.splitlines()]
        return [line.split("│")[1].strip() for line in lines if "│" in line]

    monkeypatch.setenv("COLUMNS", "80")
    assert timed(2.05e-3, 396e-6) == ["time ms", "2.05", "0.40", "2.05"]
    assert timed(2.05e-3, 4.1e-6) == ["time ms", "2.05", "<0.01", "2.05"]
    assert timed(2.05, 0.0, 4.1e-9) == ["time s", "2.05", "0", "<0.01", "2.05"]


def test_times_have_the_bars_where_they_were_measured(p: mt.Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    calls = tuple(replace(row, time_s=1e-3 if row.depth else 4e-3) for row in p)
    shown = text(replace(p, calls=calls), RowSelection(depth=1))
    assert "│ █     25.0 %" in shown
    assert "FLOPs share" in shown.partition("no room for")[2]
    assert "█" not in markdown(replace(p, calls=calls))


def test_a_small_model_is_counted_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    head = str(mt.profile(*zoo.build("tiny-resnet"))).splitlines()[1]
    assert [cell.strip() for cell in head.split("┃")] == [
        *["call", "module", "params k", "MACs M", "FLOPs M", "FLOPs share"],
    ]


def test_views_choose_columns(p: mt.Profile) -> None:
    head = text(p, RowSelection(columns=("macs", "madds", "intensity", "dtype", "inputs"))).splitlines()[1]
    assert [cell.strip() for cell in head.split("┃")] == ["call", "MACs k", "MAdds M", "FLOPs/B", "dtype", "input"]
    with pytest.raises(BadQuery, match="^no column 'speed': did you mean 'spread'\\? expected one of type, "):
        text(p, RowSelection(columns=("speed",)))
    with pytest.raises(BadQuery, match=r"^no column 'flop': did you mean 'flops'\? expected one of type, "):
        text(p, RowSelection(columns=("flop",)))
    for name in ("speed", "type"):
        with pytest.raises(BadQuery, match=f"^no column '{name}' to sort by: expected one of params, "):
            text(p, RowSelection(sort=name))


def test_the_runtime_of_an_accelerator_is_that_of_its_backend(p: mt.Profile) -> None:
    environment = {"cpu": "a CPU", "threads": "4", "torch": "2.8", "gpu": "a GPU", "gpu_runtime": "Level Zero 1.2"}
    shown = str(replace(p, environment=environment))
    assert "measured on a CPU, 4 threads, torch 2.8; a GPU, Level Zero 1.2\n" in shown
    assert "CUDA" not in shown


def test_sorting_by_what_is_known_of_no_call_is_an_error_that_says_what_to_add(p: mt.Profile) -> None:
    with pytest.raises(BadQuery, match=r"no row has a value of 'time' to sort by: add measure=\[\"time\"\]$"):
        text(p, RowSelection(sort="time"))
    with pytest.raises(BadQuery, match=r"add measure=\[\"load\"\]"):
        text(p, RowSelection(sort="cpu"))
    with pytest.raises(BadQuery, match=r"add measure=\[\"energy\"\]"):
        csv(p, RowSelection(by="module", sort="energy_share"))
    plain = mt.profile(nn.Linear(2, 2), "1x2")
    with pytest.raises(BadQuery, match="add backward=True"):
        markdown(plain, RowSelection(sort="backward_macs"))
    with pytest.raises(BadQuery, match=r"no formula is known for aten.cholesky_solve.default"):
        text(mt.profile(Solves(), "3x3"), RowSelection(sort="macs"))


def test_a_large_model_is_shown_as_deep_as_there_is_room() -> None:
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.ReLU())) for _ in range(30)]
    for block in blocks[::2]:
        block.append(nn.Identity())  # or they would be identical
    deep = nn.Sequential(*blocks)
    shown = str(mt.profile(deep, "1x2"))
    assert "shown to depth 1 of 3" in shown
    assert len(rows(shown)) == 32


def test_markdown_keeps_the_tree_and_what_it_rests_on(p: mt.Profile) -> None:
    lines = markdown(p).splitlines()
    assert lines[0] == r"**Decoder on input\_ids 2x12:int64**"
    assert lines[2].startswith("| call | module | output | params | MACs | FLOPs |")
    own = ["(add, arange)", *["(add, mul)", "(scaled_dot_product_attention)"] * 2]
    assert [line.split("`")[1] for line in lines if "| (own) |" in line] == own
    assert sum(line.startswith("|") for line in lines) == len(p) + len(own) + 3
    assert "\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}`tokens`" in lines[6]
    assert lines[-1].startswith("- ")


def test_csv_of_groups_has_their_numbers(p: mt.Profile) -> None:
    lines = csv(p, RowSelection(by="op")).splitlines()
    assert lines[0].startswith("name,runs,params")
    assert lines[1].startswith("aten.addmm.default,8,")


class Solves(nn.Module):
    """Runs an operator that has no formula, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return x.cholesky_solve(x)


def test_what_is_not_counted_is_said() -> None:
    shown = str(mt.profile(Solves(), "3x3"))
    assert "no FLOP formula for aten.cholesky_solve.default (1)" in shown
    assert "modules that never ran: spare" in shown


def test_sums_that_leave_operators_out_are_marked() -> None:
    # 3 x 3 by 3 x 3 is counted; what solves is not.
    p = mt.profile(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Sequential(Solves(), nn.ReLU())), "3x3")
    chosen = ("macs", "flops")
    assert rows(text(p, RowSelection(columns=chosen))) == [
        ["(root)", "≥ 27", "≥ 63"],
        ["0", "27", "54"],
        ["1", "≥ 0", "≥ 9"],
        ["0", "≥ 0", "≥ 0"],  # which lays its input out anew first
        ["1", "0", "9"],
        ["total", "≥ 27", "≥ 63"],
    ]
    assert "≥: without operators that have no formula; shares are of what is counted" in text(p)
    assert "| (root) | ≥ 27 | ≥ 63 |" in markdown(p, RowSelection(columns=chosen))
    assert csv(p, RowSelection(columns=chosen)).splitlines()[1] == ",27,63"
    groups = {line[0]: line[1:] for line in rows(text(p, RowSelection(by="type", columns=chosen)))}
    assert groups["Linear"] == ["27", "54"]
    assert groups["total"] == ["≥ 27", "≥ 63"]
    groups = {line[0]: line[1:] for line in rows(text(p, RowSelection(by="module", columns=chosen)))}
    assert groups["1"] == ["≥ 0", "≥ 9"]
    assert groups["1.1"] == ["0", "9"]


def test_nothing_is_marked_where_all_is_counted(p: mt.Profile) -> None:
    assert "≥" not in text(p)


def test_a_profile_is_short_where_it_is_only_named(p: mt.Profile) -> None:
    assert repr(p) == "<Profile of Decoder, 25 calls, microtome convention>"
