"""What notebooks show."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.capture.attention.attention import Attention
from microtome.report.pictures.attention import overview
from microtome.results.requests import RequestLog
from microtome.units import UNKNOWN
from tests.report.test_foreign_text import RESULTS

HOSTILE = "<script>alert(1)</script>&\"'"
VOID = {"br", "img"}


class Checked(HTMLParser):
    """Reads HTML and notes its tags and its text; every tag must be closed in its order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert {name for name, _ in attrs} <= ({"style", "title"} if tag != "img" else {"style", "src"})
        assert tag != "img" or str(dict(attrs)["src"]).startswith("data:image/png;base64,")
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class Named(nn.Module):
    """A module whose name is hostile, as names may be."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(4, 4))
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.get_submodule(HOSTILE)(x))
        return y


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model, x = Named(), torch.ones(1, 4)
    profile = mt.profile(model, x, measure=["time"], repeat=3, warmup=1)
    cuts = mt.cuts(model, x)
    folder = tmp_path_factory.mktemp("acts")
    with mt.record(model, "*", to=folder) as recorder:
        model(x)
    return {
        "profile": profile,
        "cuts": cuts,
        "plan": mt.plan(cuts, edge=profile, cloud=profile, link=mt.Link("20Mbps", rtt="15ms")),
        "trace": mt.trace(model, x),
        "recording": mt.load(folder),
        "recorder": recorder,
        "features": mt.extract(model, x, "*"),
        "diff": profile.diff(replace(profile, calls=profile.calls[:-2])),
        "attention": Attention((HOSTILE, "last"), (torch.rand(1, 2, 5, 5), torch.rand(1, 2, 5, 5))),
    }


@pytest.mark.parametrize(
    "kind",
    ["profile", "cuts", "plan", "trace", "recording", "recorder", "features", "diff", "attention"],
)
def test_html_is_whole_without_script_and_with_names_escaped(results: dict[str, Any], kind: str) -> None:
    found = Checked(results[kind]._repr_html_())
    assert set(found.tags) <= {"div", "span", "br", "b", "table", "thead", "tbody", "tr", "th", "td", "img"}
    assert HOSTILE in found.text
    assert "last" in found.text


def test_a_profile_says_what_its_text_says(results: dict[str, Any]) -> None:
    text = Checked(results["profile"]._repr_html_()).text
    # Two linear layers of 4 x 4 + 4 and 4 x 2 + 2 parameters.
    assert "params30" in text
    assert "time share" in text
    assert "FLOPs share" in Checked(mt.profile(Named(), "1x4")._repr_html_() or "").text


def rows_of(html: str) -> list[list[str]]:
    """The texts of the cells of each row."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", html)
    cells = ([re.sub("<.*?>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows)
    return [[unescape(cell).strip("\xa0") for cell in row] for row in cells if row]


def test_the_cap_hides_the_middle_and_neither_the_costliest_nor_the_last_rows() -> None:
    wide = [8] * 100
    wide[55:57] = [500, 500]  # layers 54 to 56 are the costliest, in the middle
    layers = [nn.Linear(before, after, bias=at % 2 == 0) for at, (before, after) in enumerate(itertools.pairwise(wide))]
    profile = mt.profile(nn.Sequential(*layers), "1x8")
    rows = rows_of(profile._repr_html_())
    names = [row[0] for row in rows]
    assert names[-1] == "total"
    assert {"(root)", "0", "97", "98", "54", "55", "56"} < set(names)
    gaps = [int(name.split()[1]) for name in names if name.startswith("… ")]
    shown = len(names) - len(gaps) - 1
    assert min(gaps) > 1  # a single row takes no more room than the line that would stand for it
    assert shown == 66  # 40, and the single rows between them
    assert shown + sum(gaps) == len(profile)
    assert f"{shown} of 100 rows shown; the total includes all" in profile._repr_html_()
    assert "… " not in str(profile)
    kept = [row[0] for row in rows_of(mt.cuts(nn.Sequential(*layers), "1x8")._repr_html_())]
    assert {"0", "98"} < set(kept)
    assert sum(name.startswith("… ") for name in kept) >= 1


def test_features_have_shapes_statistics_and_pictures() -> None:
    model, x = zoo.build("tiny-resnet")
    feats = mt.extract(model, x, ["layer1.*", "pool", "fc"])
    html = feats._repr_html_()
    rows = {row[0]: row for row in rows_of(html)}
    assert list(rows) == list(feats.addresses)
    out = feats["fc"].double()
    expected = [f"{float(value):.4g}" for value in (out.mean(), out.std(), out.min(), out.max())]
    assert rows["fc"][1:3] == ["2x10", "float32"]
    assert rows["fc"][4:8] == expected
    assert re.findall(r"<th[^>]*>(.*?)</th>", html)[4:8] == ["mean", "std", "min", "max"]
    assert html.count("<img ") == len(feats.addresses)


def test_features_without_values_have_no_statistics_and_no_pictures() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(1, 4)
    html = mt.extract(model, x, "*")._repr_html_()
    assert [row[4:] for row in rows_of(html)] == [[UNKNOWN] * 5] * 2
    with torch.no_grad():
        several = mt.extract(nn.LSTM(4, 4), torch.ones(3, 2, 4), [""], stop=False)
    assert "3x2x4, 1x2x4, 1x2x4" in several._repr_html_()


def test_attention_has_a_picture_of_each_layer() -> None:
    model, x = zoo.build("tiny-vit")
    found = mt.attention(model, x)
    html = found._repr_html_()
    assert html.count("<img ") == len(found)
    assert all(f"{layer}</span>" in html for layer in found.layers)
    long = Attention(tuple(map(str, range(50))), (torch.rand(1, 2, 300, 300),) * 50)
    assert long._repr_html_().count("<img ") == 24
    assert "shown: 24 of 50 layers" in long._repr_html_()
    one_query = overview(torch.rand(2, 3, 1, 8)).pixels  # a row for each of 3 heads, 8 keys of 20 pixels
    assert one_query.shape == (3 * 20, 8 * 20, 3)
    assert overview(torch.rand(1, 2, 1000, 500)).pixels.shape == (160, 160, 3)


def test_a_diff_has_its_changes_in_front_and_in_colour(results: dict[str, Any]) -> None:
    profile = mt.profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "1x4")
    larger = mt.profile(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), "1x4")
    html = profile.diff(larger)._repr_html_()
    assert Checked(html).text.index("MACs+100.0 %") < Checked(html).text.index("before")
    assert "color:#d1493f" in html
    assert "color:#2e9e5b" in larger.diff(profile)._repr_html_()


def test_large_results_are_cut_and_say_so() -> None:
    model, x = zoo.build("tiny-resnet")
    html = mt.trace(model, x)._repr_html_()
    assert "shown: 13 of 43 calls" in html
    assert len(mt.cuts(model, x)._repr_html_() or "") < 100_000


@pytest.mark.parametrize("kind", RESULTS)
def test_every_kind_of_result_has_a_table(kind: str) -> None:
    found = Checked(RESULTS[kind]()._repr_html_())
    assert found.tags.count("tr") > 1


def test_a_log_without_requests_is_shown() -> None:
    log = RequestLog("Net", "host:7070", "cpu", 1, 1.0, 1, ())
    assert "not run: 0 requests in 1 s" in str(log)
    assert "not run" in Checked(log._repr_html_()).text


# -- in a kernel -------------------------------------------------------------------------------------------------------

SETUP = """
import contextlib, io
import microtome as mt
from microtome import zoo
from tests.plan import synthetic

model, x = zoo.build("tiny-resnet")
profile, sizes = mt.profile(model, x), synthetic.cuts([400, 40])
times = synthetic.profile([0.1, 0.2])
results = {
    "profile": profile,
    "cuts": mt.cuts(model, x),
    "plan": mt.plan(sizes, edge=times, cloud=times, link=mt.Link("8Mbps"), costs=synthetic.costs(sizes)),
    "diff": profile.diff(mt.profile(model, "4x3x32x32")),
    "codecs": synthetic.costs(sizes),
}
"""
KINDS = ("profile", "cuts", "plan", "diff", "codecs")
#: Prints whether the text is as outside of a notebook; displays nothing.
TEXTS = """
for name, result in results.items():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print(result)
    print(name, str(result).count("\\n") > 3, f"{result}" == str(result), printed.getvalue() == f"{result}\\n")
"""


@pytest.mark.integration
def test_a_result_is_text_in_a_kernel_and_is_displayed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shows = [f"results[{kind!r}].show()" for kind in KINDS]
    notebook = new_notebook(cells=[new_code_cell(source) for source in (SETUP, TEXTS, *shows, "results['cuts']")])
    root = Path(__file__).parents[2]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(root)}}).execute()
    setup, texts, *shown = (cell.outputs for cell in notebook.cells)
    assert setup == []
    # A kernel may send a stream in parts.
    assert {(output.output_type, output.get("name")) for output in texts} == {("stream", "stdout")}
    assert "".join(output.text for output in texts) == "".join(f"{kind} True True True\n" for kind in KINDS)
    for outputs in shown:
        (output,) = outputs
        assert "<table" in output.data["text/html"]
        assert output.data["text/plain"]
