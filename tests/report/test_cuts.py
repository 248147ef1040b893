"""Cuts as tables."""

from __future__ import annotations

import csv as csv_format
import io
from dataclasses import replace

import pytest
from rich.console import Console
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.report.cuts import CutSelection, details
from microtome.report.formats import csv, markdown, text
from microtome.report.table import text as report_text
from microtome.results.cuts import Cut, Live


@pytest.fixture(scope="module")
def unet() -> mt.Cuts:
    return mt.cuts(*zoo.build("tiny-unet"))


def names(table: str) -> list[str]:
    """The first cells of the rows, without marks."""
    return [line.split("│")[0].strip("* ") for line in table.splitlines() if "│" in line]


def wide(count: int, refused: tuple[Cut, ...] = ()) -> mt.Cuts:
    """Cuts of a deep model with long names: blocks of a hundred calls each, with less to send from block to block."""
    cuts = []
    for at in range(count):
        address = f"backbone.encoder.block{at // 100}"
        address += "" if at % 100 == 99 else f".attention.output.projection.{at % 100}"
        nbytes = 4096 * (count - at // 100)
        live = (Live(address, address, (nbytes // 4,), "float32", nbytes),)
        depth = 1 if at % 100 == 99 else 4
        costs = at, count - at, at, count - at, 4 * at, 4
        cuts.append(Cut(at, address, "Linear", depth, live, nbytes, *costs, dominates=at % 100 == 0))
    value = Live("args[0]", None, (8, 3), "float32", 96)
    return mt.Cuts("Deep", (value,), (value,), tuple(cuts), refused, "meta")


GOLDEN = """\
Sequential on input 4x6: 3 cuts
           ┃        ┃       ┃          ┃ head ┃ tail ┃   head ┃   tail ┃
cut        ┃ module ┃ bytes ┃          ┃ MACs ┃ MACs ┃ params ┃ params ┃ crosses
━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━╇━━━━━━━━━━╇━━━━━━╇━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━━━
  (input)  │        │  96 B │ ██████   │      │      │        │        │ input
* 0        │ Linear │ 128 B │ ████████ │  192 │   96 │     56 │     27 │ itself
  1        │ ReLU   │ 128 B │ ████████ │  192 │   96 │     56 │     27 │ itself
* 2        │ Linear │  48 B │ ███      │  288 │    0 │     83 │      0 │ itself
  (output) │        │  48 B │ ███      │      │      │        │        │
fewest bytes: 2, 48 B; the first with fewer than the input's 96 B: 2
*: sends fewer bytes than every cut before it
read from a run on meta tensors
itself: the output of the call at the cut"""


def test_a_small_table_is_drawn_so() -> None:
    # 4 x 6 by 6 x 8 is 192 products and gives 4 x 8 floats; 4 x 8 by 8 x 3 is 96 and gives 4 x 3.
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    assert str(mt.cuts(net, "4x6")) == GOLDEN


def test_what_crosses_is_named_and_the_cuts_own_output_comes_first(unet: mt.Cuts) -> None:
    (line,) = [line for line in text(unet).splitlines() if line.strip().startswith("up.deep")]
    assert line.endswith("│ itself, down.0, down.1")
    assert [live.name for live in unet["up.deep"].live] == ["down.0", "down.1", "up.deep"]


class Pooled(nn.Module):
    """Drops elements of a view in place."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.drop, self.fc = nn.AdaptiveAvgPool2d(1), nn.Dropout(inplace=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.fc(self.drop(self.pool(x).flatten(1)))
        return dropped


def test_an_argument_that_the_call_at_the_cut_changed_is_explained() -> None:
    shown = text(mt.cuts(Pooled().train(), "2x3x4x4"))
    assert "itself(args[0])" in shown
    explained = "itself: the output of the call at the cut; itself(args[0]): its argument, after the call changed it"
    assert explained in " ".join(shown.split())


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("which", ["unet", "wide"])
def test_no_line_of_the_table_wraps(unet: mt.Cuts, which: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = text(unet if which == "unet" else wide(40), CutSelection(every=True))
    table = [line for line in shown.splitlines() if "│" in line]
    assert max(map(len, shown.splitlines())) <= columns
    assert len(table) == 2 + (25 if which == "unet" else 40)
    assert all(line[:2] in ("  ", "* ") and line[2] != " " for line in table)
    assert len({line.count("│") for line in table}) == 1


def test_what_there_is_no_room_for_is_said(unet: mt.Cuts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert "no room for: module, tail MACs, head params" in text(unet)
    monkeypatch.setenv("COLUMNS", "50")
    assert "itself +2" in text(unet)


def test_a_terminal_of_80_columns_has_bars_of_what_crosses(unet: mt.Cuts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cells = {
        line.split("│")[0].strip("* "): line.split("│")[2].strip() for line in text(unet).splitlines() if "│" in line
    }
    most = max(unet, key=lambda cut: cut.nbytes)
    assert cells[most.at] == "█" * 8
    assert cells["head"] < cells[most.at]


def test_of_hundreds_of_cuts_those_of_little_depth_and_those_marked_are_shown() -> None:
    deep = wide(300)
    shown = names(str(deep))
    assert shown[1:-1] == [cut.at for cut in deep if cut.dominates or cut.depth == 1]
    assert "shown: 6 of 300 cuts, those to depth 1 and those marked *" in str(deep)
    assert "shown: 6 of 300 cuts, those to depth 1 and those in bold" in deep._repr_html_()
    assert len(names(text(deep, CutSelection(every=True)))) == 302
    assert len(names(text(deep, CutSelection(depth=1)))) == 5
    assert "shown: 3 of 300 cuts, those to depth 1\n" in text(deep, CutSelection(depth=1))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_at_a_depth_those_are_marked_that_send_less_than_all_above_them(depth: int) -> None:
    cuts = mt.cuts(*zoo.build("tiny-resnet"))
    shown = [cut for cut in cuts if cut.depth <= depth]
    least = [cut.at for at, cut in enumerate(shown) if all(cut.nbytes < above.nbytes for above in shown[:at])]
    lines = text(cuts, CutSelection(depth=depth)).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("* ")] == least
    assert "*: sends fewer bytes than every cut to this depth before it" in lines
    assert ("layer2.0" in least) == (depth == 2)


def test_places_that_are_refused_are_listed_by_reason() -> None:
    class Scales(nn.Sequential):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1  # which both sides would do
            y: Tensor = super().forward(x)
            return y * self.runs

    shown = str(mt.cuts(Scales(*(nn.Linear(3, 3) for _ in range(4))), "2x3"))
    assert shown.startswith("Scales on x 2x3: 0 cuts, 4 places refused\n")
    assert shown.count("refused at") == 1
    assert "refused at 0, 1, 2 and 1 more: " in shown
    assert "'runs' of the model is state" in " ".join(shown.split())
    assert "│" not in shown


def test_of_many_reasons_some_are_told() -> None:
    one = wide(1)[0]
    refused = tuple(replace(one, index=1 + at, at=f"r{at}", refused=f"because of {at}") for at in range(9))
    shown = str(wide(1, refused))
    assert "refused at r0: because of 0\n" in shown
    assert shown.count("because of") == 4
    assert shown.endswith("refused at 5 more places for other reasons of the kind")


def test_a_model_in_which_no_module_runs_has_a_word_on_that() -> None:
    assert "none runs inside this one" in str(mt.cuts(nn.Linear(3, 3), "1x3"))
    assert str(mt.cuts(nn.Linear(3, 3), "1x3")).startswith("Linear on input 1x3: 0 cuts\n")


def test_counts_that_are_not_known_are_dashes() -> None:
    cuts = wide(2)
    unknown = replace(cuts, offered=tuple(replace(cut, head_macs=None, tail_macs=None) for cut in cuts))
    assert text(unknown).count("│    – │    – │") == 2  # noqa: RUF001


def test_one_cut_is_told_with_all_that_crosses(unet: mt.Cuts) -> None:
    shown = report_text(details(unet["pool#1"], unet))
    assert shown.startswith("UNet cut at pool#1 (MaxPool2d): 104 KiB cross; the input has 24.0 KiB")
    assert [line.split("│")[0].strip() for line in shown.splitlines() if "│" in line] == ["down.0", "down.1", "pool#1"]
    assert "2x8x32x32" in shown
    assert "head: 1.03 M MACs, 1.44 k parameters (5.62 KiB)" in shown


def test_rich_draws_the_same_table(unet: mt.Cuts) -> None:
    file = io.StringIO()
    Console(file=file, width=140).print(unet)
    assert "merge.shallow.2" in file.getvalue()
    assert unet.table() == str(unet)


def test_markdown_has_every_cut_with_full_names(unet: mt.Cuts) -> None:
    table = markdown(unet)
    lines = table.splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 2 + len(unet)
    assert {line.count("|") for line in rows} == {9}
    assert "| `down.0`, `down.1`, `up.deep` |" in table
    assert "| **`head`** |" in table
    assert "- bold: sends fewer bytes" in table
    assert len([line for line in markdown(unet, CutSelection(depth=1)).splitlines() if line.startswith("| ")]) == 2 + 10
    assert unet.to_markdown() == table


def test_csv_has_every_place_with_raw_numbers_and_reasons() -> None:
    refused = replace(wide(1)[0], index=5, at="late", refused="because", dominates=False)
    rows = list(csv_format.DictReader(io.StringIO(csv(wide(3, (refused,))))))
    assert [row["at"] for row in rows][-1] == "late"
    assert rows[-1]["refused"] == "because"
    assert rows[0]["nbytes"] == str(4096 * 3)
    assert rows[0]["refused"] == ""
    assert rows[0]["live"] == wide(3)[0].at
    assert len(rows) == 4
