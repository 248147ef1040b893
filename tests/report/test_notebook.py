"""What notebooks show."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.results.requests import RequestLog
from tests.report.test_foreign_text import RESULTS

HOSTILE = "<script>alert(1)</script>&\"'"
VOID = {"br"}


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
        assert {name for name, _ in attrs} <= {"style", "title"}
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
    }


@pytest.mark.parametrize("kind", ["profile", "cuts", "plan", "trace", "recording", "recorder"])
def test_html_is_whole_without_script_and_with_names_escaped(results: dict[str, Any], kind: str) -> None:
    found = Checked(results[kind]._repr_html_())
    assert set(found.tags) <= {"div", "span", "br", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert HOSTILE in found.text
    assert "last" in found.text


def test_a_profile_says_what_its_text_says(results: dict[str, Any]) -> None:
    text = Checked(results["profile"]._repr_html_()).text
    # Two linear layers of 4 x 4 + 4 and 4 x 2 + 2 parameters.
    assert "params30" in text
    assert "time share" in text
    assert "FLOPs share" in Checked(mt.profile(Named(), "1x4")._repr_html_() or "").text


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
