"""The page in a real browser: Debian's Chromium, driven by playwright. Pictures of it are kept in `artifacts/`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import quote

import pytest
import torch
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.results.metrics import METRICS
from microtome.units import count, size, write
from tests.report.pages import costing, hostile_model, hostile_profile, large, timed

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARTIFACTS = Path(__file__).parents[2] / "artifacts"

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt install chromium")


@dataclass
class Tab:
    """A page that is open, and what went wrong in it."""

    page: Any
    errors: list[str]

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def names(self) -> list[str]:
        """The addresses of the rows that the table shows."""
        return [str(one.get_attribute("title")) for one in self.page.locator("#layers tbody th").all()]

    def slide(self, name: str, value: float) -> None:
        self.page.locator(f"input[name={name}]").evaluate(
            "(input, value) => { input.value = value; input.dispatchEvent(new Event('input')) }", value
        )

    def until(self, holds: str) -> None:
        """Wait for what a script says; the page's policy refuses playwright's own way."""
        ends = perf_counter() + 120
        while not self.page.evaluate(holds):
            assert perf_counter() < ends, holds
            self.page.wait_for_timeout(10)

    def shoot(self, name: str) -> None:
        ARTIFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTIFACTS / f"{name}.png")


Open = Callable[..., Tab]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens pages in contexts of their own; at the end none may have had an error."""
    tabs: list[Tab] = []

    def open_(text: str, *, at: str = "", width: int = 1200, **options: Any) -> Tab:
        file = tmp_path / f"page{len(tabs)}.html"
        file.write_text(text, "utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(10_000)
        tab = Tab(context.new_page(), [])
        tab.page.on("console", lambda said: tab.errors.append(said.text) if said.type in ("error", "warning") else None)
        tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
        tab.page.on("request", lambda asked: tab.errors.append(asked.url) if asked.url.startswith("http") else None)
        tab.page.goto(file.as_uri() + at)
        tabs.append(tab)
        return tab

    yield open_
    for tab in tabs:
        tab.page.context.close()
    assert [error for tab in tabs for error in tab.errors] == []


@pytest.fixture(scope="module")
def profile() -> mt.Profile:
    model, x = zoo.build("tiny-resnet")
    with torch.no_grad():
        return timed(mt.profile(model, x))


@pytest.fixture(scope="module")
def cuts() -> mt.Cuts:
    return mt.cuts(*zoo.build("tiny-resnet"))


@pytest.fixture(scope="module")
def page(profile: mt.Profile, cuts: mt.Cuts) -> str:
    return profile.to_html(cuts=cuts)


def look_at_all(tab: Tab) -> None:
    """Bring every section near the window, so that its view is built."""
    for section in tab.page.locator("section").all():
        section.scroll_into_view_if_needed()
        tab.page.wait_for_timeout(50)


def test_all_views_are_drawn_without_an_error(opened: Open, profile: mt.Profile, cuts: mt.Cuts) -> None:
    tab = opened(profile.to_html(cuts=cuts, compare=timed(profile, speed=3.0)))
    look_at_all(tab)
    for name in ("memory", "roofline", "explorer"):
        tab.page.wait_for_selector(f"[id='section:{name}'] canvas")
    assert len(tab.texts(".icicle .node")) > 10
    assert "the peak" in tab.texts("[id='section:memory'] .status")[0]
    assert len(tab.texts("[id='section:compare'] .view tbody tr")) > 10
    tab.page.evaluate("scrollTo(0, 0)")
    ARTIFACTS.mkdir(exist_ok=True)
    tab.page.screenshot(path=ARTIFACTS / "light.png", full_page=True)


def test_the_table_says_with_a_script_what_it_says_without(opened: Open, page: str) -> None:
    plain = opened(page, java_script_enabled=False)
    rows = [text.split("\t") for text in plain.texts("#layers tbody tr")]
    tab = opened(page)
    tab.page.locator("#grid").evaluate("grid => { grid.style.maxHeight = 'none' }")
    tab.page.get_by_text("Open all").click()
    tab.until(f"document.querySelectorAll('#layers tbody th').length === {len(rows)}")
    text = "cell => [...cell.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join('')"
    cells = f"rows => rows.map(row => [...row.querySelectorAll('td')].map({text}))"
    scripted = tab.page.locator("#layers tbody tr:not(.space)").evaluate_all(cells)
    static = plain.page.locator("#layers tbody tr").count()
    assert static == len(scripted) == len(rows)
    for before, after in zip(rows, scripted, strict=True):
        assert [text.strip() for text in before[1:]] == after


def test_sort(opened: Open, page: str, profile: mt.Profile) -> None:
    tab = opened(page)
    header = tab.page.locator("thead button[data-name=macs]")
    header.click()
    layers = [row for row in profile if row.height == 1]
    down = sorted(layers, key=lambda row: -(row.macs or 0))
    assert tab.names()[:10] == [row.address for row in down[:10]]
    assert tab.page.locator("thead th[aria-sort=descending]").inner_text() == "MACs ↓"
    tab.page.locator("thead button[data-name=macs]").click()
    up = sorted(layers, key=lambda row: row.macs or 0)
    assert tab.names()[:10] == [row.address for row in up[:10]]
    tab.page.locator("thead button[data-name=macs]").click()
    assert tab.names()[:2] == ["(root)", profile.calls[1].address]


def test_operators_between_modules_are_rows_of_the_tree_and_of_the_layers(
    opened: Open, page: str, profile: mt.Profile
) -> None:
    tab = opened(page)
    tab.page.get_by_text("Open all").click()
    own = tab.page.locator("#layers tbody tr", has_text="(add)")
    assert [row.get_attribute("aria-level") for row in own.all()] == ["4"] * own.count()
    own.first.click()
    own.first.press("ArrowLeft")
    assert tab.page.locator("#layers tbody tr.on th").get_attribute("title") == "layer1.0"
    tab.page.locator("thead button[data-name=moved_bytes]").click()
    assert "layer1.0 (add)" in tab.names()
    assert tab.texts("[role=status]") == [f"{sum(row.height == 1 for row in profile)} of 43 calls"]
    tab.page.get_by_label("Rows", exact=True).select_option("all")
    assert "layer1.0 (add)" not in tab.names()


def test_search_keeps_what_matches_and_what_contains_it(opened: Open, page: str) -> None:
    tab = opened(page)
    tab.page.get_by_role("searchbox").fill("layer1.0.CONV")
    assert tab.names() == ["(root)", "layer1", "layer1.0", "layer1.0.conv1", "layer1.0.conv2"]
    tab.page.get_by_role("searchbox").fill("nothing like it")
    assert tab.names() == []
    assert tab.texts("[role=status]") == ["0 of 43 calls, 0 found"]


def test_search_by_name_or_kind_marks_what_matched(opened: Open, page: str, profile: mt.Profile) -> None:
    tab = opened(page)
    search = tab.page.get_by_role("searchbox")
    search.fill("CONV2d")
    convolutions = [row.address for row in profile if row.type == "Conv2d"]
    assert tab.texts("#layers tbody td mark") == ["Conv2d"] * len(convolutions)
    marked = "marks => marks.map(mark => mark.closest('tr').querySelector('th').title)"
    assert tab.page.locator("#layers tbody td mark").evaluate_all(marked) == convolutions
    assert f", {len(convolutions)} found" in tab.texts("[role=status]")[0]
    faded = "nodes => nodes.filter(node => node.className === 'node').map(node => node.ariaLabel.split(',')[0])"
    containing = {
        row.address or "(root)" for row in profile if any(one.startswith(row.address) for one in convolutions)
    }
    shown = set(tab.page.locator(".icicle .node").evaluate_all(faded))
    assert shown <= containing
    assert shown & set(convolutions)
    search.fill("layer1.0.conv")
    assert tab.texts("#layers tbody th mark") == ["conv", "conv"]
    kept = set(tab.page.locator(".icicle .node").evaluate_all(faded))
    assert kept == {"(root)", "layer1", "layer1.0", "layer1.0.conv1", "layer1.0.conv2"}
    opacity = "node => getComputedStyle(node).opacity"
    assert float(tab.page.locator(".node.other").first.evaluate(opacity)) < 0.5
    search.fill("")
    assert tab.page.locator("mark, .node.other").count() == 0


def test_columns_are_chosen(opened: Open, page: str) -> None:
    tab = opened(page)
    tab.page.get_by_text("Columns", exact=True).click()
    tab.page.get_by_label("weights", exact=True).check()
    assert tab.page.locator("thead button[data-name=param_bytes]").is_visible()
    assert tab.page.get_by_label(re.compile(r"^\s*energy . not measured")).is_disabled()


def test_the_tree_zooms_and_goes_back_by_its_breadcrumbs(opened: Open, page: str) -> None:
    tab = opened(page)
    tree = tab.page.locator(".icicle")
    tree.get_by_text("layer2", exact=True).click()
    assert tree.get_attribute("data-focus") == "layer2"
    assert tab.texts("[id='section:tree'] .crumbs button") == ["(root)", "layer2"]
    tab.page.locator("[id='section:tree'] .crumbs button").first.click()
    assert tree.get_attribute("data-focus") == ""
    tab.page.get_by_label("Size", exact=True).select_option("params")
    assert "of params" in tab.texts("[id='section:tree'] .status")[0]


SHOWN = "one => getComputedStyle(one).display !== 'none'"


def test_the_tree_is_coloured_by_kind_with_a_key_and_the_legend_follows_the_choice(opened: Open) -> None:
    tab = opened(timed(plain(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8))).to_html())
    kinds, ramp = (tab.page.locator(f"[id='section:tree'] {one}") for one in (".kinds", ".ramp"))
    assert (kinds.evaluate(SHOWN), ramp.evaluate(SHOWN)) == (True, False)
    colours = "marks => marks.map(mark => [mark.parentNode.textContent.split(' ')[0], mark.style.background])"
    explained = dict(tab.page.locator("[id='section:tree'] .key i").evaluate_all(colours))
    drawn = "nodes => nodes.map(node => [node.ariaLabel.split(', ')[1], node.style.background])"
    found = {
        kind: colour for kind, colour in tab.page.locator(".icicle .node").evaluate_all(drawn) if kind in explained
    }
    assert found == {kind: explained[kind] for kind in found}
    assert found.keys() == {"Linear", "LayerNorm", "ReLU"}
    assert len(set(found.values())) == len(found)
    tab.page.get_by_label("Color", exact=True).select_option("macs")
    assert (kinds.evaluate(SHOWN), ramp.evaluate(SHOWN)) == (False, True)
    tab.page.get_by_label("Color", exact=True).select_option("type")
    assert (kinds.evaluate(SHOWN), ramp.evaluate(SHOWN)) == (True, False)


class Functional(nn.Module):
    """A layer, and the product of its output with itself: as many MACs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y @ y


def test_operators_between_modules_are_labelled_in_the_tree_and_the_key(opened: Open) -> None:
    tab = opened(mt.profile(Functional(), "8x8").to_html())
    assert "(mm) 50.0 %" in tab.texts("[id='section:tree'] .key span")
    (gap,) = tab.page.locator(".icicle .gap").all()
    assert gap.inner_text() == "(mm)"  # as in the table, and on the terminal
    assert gap.get_attribute("title") == "(mm): 50.0 % of MACs, in (root)"
    half, whole = gap.bounding_box()["width"], tab.page.locator(".icicle").bounding_box()["width"]
    assert half == pytest.approx(whole / 2, abs=2)
    tab = opened(plain(nn.Linear(8, 8), nn.Linear(8, 8)).to_html())
    assert tab.page.locator(".icicle .gap").count() == 0
    assert "(mm)" not in " ".join(tab.texts("[id='section:tree'] .key span"))
    tab = opened(mt.profile(nn.Sequential(Functional(), Functional(), nn.Identity()), "8x8").to_html())
    assert "(mm) 50.0 %" in tab.texts("[id='section:tree'] .key span")  # of two calls


def test_time_below_the_measured_depth_is_not_that_of_operators(opened: Open) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
    p = mt.profile(model, "8x8")
    seconds = {"": 8.0, "0": 6.0, "1": 1.0}  # so 1 second is that of the root's own code
    own = seconds | {"": 1.0}
    rows = [
        replace(row, time_s=seconds.get(row.address), own=replace(row.own, time_s=own.get(row.address))) for row in p
    ]
    tab = opened(replace(p, calls=tuple(rows)).to_html())
    tab.page.locator("[id='section:tree']").get_by_label("Size", exact=True).select_option("time_s")
    key = tab.texts("[id='section:tree'] .key span")
    assert "(no operators) 12.5 %" in key
    assert "not measured by layer (depth 1) 75.0 %" in key
    titles = [gap.get_attribute("title") for gap in tab.page.locator(".icicle .gap").all()]
    assert sorted(titles) == [
        "(no operators): 12.5 % of time, in (root)",
        "not measured by layer (depth 1): 75.0 % of time, in 0",
    ]
    tab.page.locator("[id='section:tree']").get_by_label("Size", exact=True).select_option("macs")
    assert "not measured" not in " ".join(tab.texts("[id='section:tree'] .key span"))


def test_the_key_tells_time_without_operators_from_that_of_operators(opened: Open) -> None:
    p = mt.profile(nn.Sequential(Functional(), nn.Identity()), "8x8")
    own = {"": 1.0, "0": 2.0}  # the second runs a product besides the call inside it
    whole = {"": 4.0, "0": 3.0, "1": 0.0}
    rows = [
        replace(row, time_s=whole.get(row.address, 1.0), own=replace(row.own, time_s=own.get(row.address, 1.0)))
        for row in p
    ]
    tab = opened(replace(p, calls=tuple(rows)).to_html())
    tab.page.locator("[id='section:tree']").get_by_label("Size", exact=True).select_option("time_s")
    key = tab.texts("[id='section:tree'] .key span")
    assert "(no operators) 25.0 %" in key
    assert "(mm) 50.0 %" in key


def test_a_permalink_zooms_the_tree(opened: Open, page: str) -> None:
    tab = opened(page, at="#layer2.0")
    tree = tab.page.locator(".icicle")
    assert tree.get_attribute("data-focus") == "layer2.0"
    tab.page.evaluate("location.hash = '#layer1.0.conv1'")  # a layer: the call around it
    tab.until("document.querySelector('.icicle').dataset.focus === 'layer1.0'")
    tab.page.evaluate("location.hash = '#section:memory'")
    assert tree.get_attribute("data-focus") == "layer1.0"


def test_the_roofline_says_which_layers_it_leaves_out(opened: Open) -> None:
    tab = opened(timed(plain(nn.Linear(8, 8), nn.Identity())).to_html())
    assert tab.texts("[id='section:roofline'] .omitted") == [
        "1 of 2 layers is drawn; 1 without FLOPs. The roof is the best rate of any layer, so a single layer is on it."
    ]
    tab = opened(timed(plain(nn.Linear(8, 8), nn.Linear(8, 8))).to_html())
    assert tab.texts("[id='section:roofline'] .omitted") == [""]


def test_the_ramp_follows_the_zoom(opened: Open, page: str, profile: mt.Profile) -> None:
    tab = opened(page)
    tab.page.get_by_label("Size", exact=True).select_option("macs")
    tab.page.get_by_label("Color", exact=True).select_option("macs")
    brightest = "nodes => nodes.map(node => [node.ariaLabel.split(', ')[0], node.style.background])"
    assert f"{count(profile.total.macs)} (MACs)" in tab.texts(".ramp")[0]
    before = dict(tab.page.locator(".icicle .node").evaluate_all(brightest))
    tab.page.locator(".icicle").get_by_text("layer2", exact=True).click()
    assert f"{count(profile['layer2'].macs)} (MACs, the most in layer2)" in tab.texts(".ramp")[0]
    after = dict(tab.page.locator(".icicle .node").evaluate_all(brightest))
    assert before["layer2"] != after["layer2"] == before["(root)"]


def test_the_ramp_of_a_peak_begins_at_the_weights(opened: Open, page: str, profile: mt.Profile) -> None:
    tab = opened(page)
    tab.page.get_by_label("Color", exact=True).select_option("peak_bytes")
    weights = profile.total.param_bytes + profile.total.buffer_bytes
    assert tab.texts(".ramp span") == [size(weights), f"{size(profile.total.peak_bytes)} (peak memory)"]
    tab.page.get_by_label("Color", exact=True).select_option("macs")
    assert tab.texts(".ramp span")[0] == "0"


def test_the_table_fits_1280_pixels(opened: Open, profile: mt.Profile) -> None:
    measured: dict[str, Any] = {name: 1 for name, metric in METRICS.items() if metric.requires and metric.value is None}
    rows = tuple(replace(row, **measured) for row in profile)
    peaks = tuple(replace(row, measured_peak_bytes=row.peak_bytes) for row in profile)
    for one in (profile, replace(profile, calls=rows), replace(profile, calls=peaks)):
        tab = opened(one.to_html(), width=1280)
        assert tab.page.locator("#layers thead th").count() > 6
        assert tab.page.locator("#grid").evaluate("grid => grid.scrollWidth <= grid.clientWidth")
        cut_off = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth).map(cell => cell.textContent)"
        assert tab.page.locator("#layers thead button, #layers tbody tr:first-child td").evaluate_all(cut_off) == []
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 1280


def plain(*inside: nn.Module) -> mt.Profile:
    return mt.profile(nn.Sequential(*inside).eval(), "2x8")


def widths(tab: Tab) -> dict[str, float]:
    """Of the calls in the tree, by their names, in parts of the picture."""
    told = "nodes => nodes.map(node => [node.ariaLabel, parseFloat(node.style.width) / node.parentNode.clientWidth])"
    return {label.split(",")[0]: wide for label, wide in tab.page.locator(".icicle .node").evaluate_all(told)}


def test_the_tree_says_what_is_not_known_and_what_costs_nothing(opened: Open) -> None:
    model = plain(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8))
    tab = opened(costing(model, "macs", {"0": None}).to_html())
    assert set(widths(tab)) == {"(root)", "2"}
    reason = "– MACs of 1 call not known (no formula is known for its operators): 0."  # noqa: RUF001
    assert tab.texts(".left") == [f"{reason} 1 call costs nothing."]
    tab.page.get_by_label("Color", exact=True).select_option("same")
    assert "; grey: not known" in tab.texts(".ramp")[0]
    many = plain(*(nn.Linear(8, 8) for _ in range(9)))
    tab = opened(costing(many, "macs", {str(at): None for at in range(7)}).to_html())
    assert tab.texts(".left")[0].endswith("0, 1, 2, 3, 4 and 2 more.")
    tab = opened(plain(nn.Identity()).to_html())
    tab.page.get_by_label("Size", exact=True).select_option("macs")
    assert tab.texts(".left") == ["2 calls cost nothing."]


def test_the_tree_counts_every_call_that_it_hides(opened: Open) -> None:
    profile = large(10_000)
    deep = sum(row.depth == 2 for row in profile)
    tab = opened(profile.to_html())
    assert tab.texts(".left") == [f"{deep:,} calls are too narrow or too deep to draw: zoom in."]
    tab.page.locator(".icicle .node").nth(1).click()
    assert tab.texts(".left") == [""]
    tab = opened(
        costing(plain(nn.Linear(8, 8), nn.Linear(8, 8)), "macs", {"": 100_001, "0": 100_000, "1": 1}).to_html()
    )
    assert tab.texts(".left") == ["1 call is too narrow or too deep to draw: zoom in."]


def test_the_tree_is_as_wide_as_the_shares_that_it_says(opened: Open) -> None:
    profile = timed(plain(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)))
    times: dict[str, float | None] = {"": 0.010, "0": 0.005, "0.0": 0.004, "0.1": 0.004, "1": 0.004}
    tab = opened(costing(profile, "time_s", times).to_html())
    # Of 10 ms are 5 a half, and the two of 4 in them are drawn to fit, a quarter each.
    expected = {"(root)": 1, "0": 0.5, "0.0": 0.25, "0.1": 0.25, "1": 0.4}
    assert widths(tab) == pytest.approx(expected, abs=1e-3)
    whole = (
        "In 1 call the parts take more than the whole, by up to 60.0 % (medians of their own): they are drawn to fit."
    )
    assert tab.texts(".left") == [whole]
    tab.page.locator(".icicle .node").nth(1).hover()
    status = tab.texts("[id='section:tree'] .status")[0]
    assert "50.0 % of time" in status
    assert "The calls inside take 60.0 % more than the whole (medians of their own)." in status


def test_the_tree_and_the_table_are_used_by_keyboard(opened: Open, page: str) -> None:
    tab = opened(page)
    tree = tab.page.locator(".icicle")
    tree.locator("[tabindex='0']").focus()
    for key in ("ArrowDown", "ArrowRight", "Enter"):
        tab.page.keyboard.press(key)
    assert tree.get_attribute("data-focus") not in ("", None)
    tab.page.keyboard.press("Escape")
    assert tree.get_attribute("data-focus") == ""
    tab.page.locator("#layers tbody tr[tabindex='0']").focus()
    for key in ("ArrowLeft", "ArrowRight", "ArrowDown", "ArrowDown", "Enter"):
        tab.page.keyboard.press(key)
    assert tab.page.url.endswith("#" + tab.names()[2])
    assert tab.page.evaluate("document.activeElement.closest('tr').className") == "on"


def test_the_path_of_a_call_is_copied(opened: Open, page: str) -> None:
    tab = opened(page, at="#layer1.0.conv1")
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.page.bring_to_front()  # a page that is not in front may not write there
    tab.page.keyboard.press("c")
    tab.until("document.querySelector('[role=status]').textContent.startsWith('Copied')")
    assert tab.page.evaluate("navigator.clipboard.readText()") == "layer1.0.conv1"


def test_a_permalink_shows_its_call(opened: Open, page: str) -> None:
    tab = opened(page, at="#layer2.0.conv2")
    assert tab.page.locator("#layers tr.on th").get_attribute("title") == "layer2.0.conv2"
    tab.page.get_by_text("Close all").click()
    tab.page.evaluate("location.hash = '#layer1.0.conv1'")
    tab.until("document.querySelector('#layers tr.on th')?.title === 'layer1.0.conv1'")
    assert tab.page.locator("#layers tr.on").is_visible()


def test_a_permalink_that_no_call_has_says_so(opened: Open, page: str) -> None:
    for at, name in {"#nope.nope": "nope.nope", "#%3Cb%3E": "<b>", "#%E0%A4%A": "%E0%A4%A"}.items():
        tab = opened(page, at=at)
        assert tab.texts("[role=alert]") == [f"There is no call '{name}' in this run."]
        assert tab.page.locator("[role=alert]").is_visible()
    for good in ("#layer1.0.conv1", "#section:memory"):
        tab.page.evaluate("hash => { location.hash = hash }", good)
        tab.page.wait_for_selector("[role=alert]", state="hidden")


def test_a_permalink_leads_to_its_row_without_a_script(opened: Open, page: str) -> None:
    tab = opened(page, at="#layer2.0.conv2", java_script_enabled=False)
    assert tab.page.locator("#layers tr:has(:target) th").get_attribute("title") == "layer2.0.conv2"
    assert tab.page.locator("#layers :target").bounding_box()["y"] < 900
    hostile = hostile_profile()
    for row in list(hostile)[1:]:
        link = quote(row.address.replace("\ud800", "\ufffd"), safe="")
        found = opened(hostile.to_html(), at=f"#{link}", java_script_enabled=False).page.locator(
            "#layers tr:has(:target)"
        )
        assert found.count() == 1, row.address


def test_modules_called_as_parts_of_the_page_do_not_break_it(opened: Open) -> None:
    model = nn.Sequential()
    for name in ("data", "grid", "layers", "controls", "section:memory", "uPlot"):
        model.add_module(name, nn.Linear(8, 8))
    tab = opened(timed(mt.profile(model, "2x8")).to_html(), at="#data")
    look_at_all(tab)
    tab.page.wait_for_selector("[id='section:memory'] canvas")
    assert tab.page.locator("#layers tr.on th").get_attribute("title") == "data"


def test_names_are_readable_however_deep(opened: Open) -> None:
    model: nn.Module = nn.Linear(8, 8)
    for _ in range(40):
        model = nn.Sequential(model)
    page = mt.profile(model, "2x8").to_html()
    sides = "(name, way) => name.closest('th').getBoundingClientRect()[way] - name.getBoundingClientRect().left"
    for width, least in ((1200, 90), (400, 40)):
        tab = opened(page, width=width)
        names = tab.page.locator("#layers tbody th a").all()
        assert len(names) == 40
        assert min(name.evaluate(sides, "right") for name in names) > least
        steps = [name.evaluate(sides, "left") for name in names]
        assert steps[:32] == sorted(set(steps[:32]), reverse=True)
        assert tab.page.locator("#layers tr[data-at='40']").get_attribute("aria-level") == "41"
        tab.shoot(f"deep-{width}")
        still = opened(page, width=width, java_script_enabled=False)
        clipped = "name => name.getBoundingClientRect().right > name.closest('th').getBoundingClientRect().right"
        assert not any(name.evaluate(clipped) for name in still.page.locator("#layers tbody th a").all())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_that_goes_on_to_the_right_fades_there(opened: Open, page: str, scheme: str) -> None:
    tab = opened(page, color_scheme=scheme, width=700)
    fades = "grid => getComputedStyle(grid).maskImage !== 'none'"
    grid = tab.page.locator("#grid")
    grid.scroll_into_view_if_needed()
    tab.page.wait_for_selector("#grid.more")
    assert grid.evaluate(fades)
    tab.shoot(f"fade-{scheme}")
    grid.evaluate("grid => { grid.scrollLeft = grid.scrollWidth }")
    tab.page.wait_for_selector("#grid:not(.more)")
    assert not grid.evaluate(fades)


# Keeps the charts by the ids of their sections; another scheme draws all of them again.
SPY = """() => {
  const real = uPlot;
  window.charts = {};
  window.uPlot = Object.assign(function (options, data, place) {
    const isPayload = place.className === "payload";
    return charts[place.closest("section").id.slice(8) + (isPayload ? ":sent" : "")] = new real(options, data, place);
  }, real);
}"""


def spied(tab: Tab) -> Tab:
    look_at_all(tab)
    tab.page.evaluate(SPY)
    tab.page.emulate_media(color_scheme="dark")
    tab.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return tab


def test_the_roof_has_its_corner_and_reaches_both_ends(opened: Open, page: str, profile: mt.Profile) -> None:
    tab = spied(opened(page))
    x, roof = tab.page.evaluate("charts.roofline.data.map(series => [...series])")
    layers = [row for row in profile if row.height == 1 and row.flops and row.moved_bytes and row.time_s]
    peak = max(row.flops / row.time_s for row in layers)  # type: ignore[operator]
    speed = max(row.moved_bytes / row.time_s for row in layers)  # type: ignore[operator]
    assert (x[1], roof[1]) == pytest.approx((peak / speed, peak))
    assert x == sorted(x)
    assert [x[0], x[-1]] == tab.page.evaluate("[charts.roofline.scales.x.min, charts.roofline.scales.x.max]")
    assert roof == pytest.approx([min(peak, at * speed) for at in x])


def test_every_operator_has_its_width_and_its_number_on_the_axis(opened: Open) -> None:
    for model in (nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))):
        profile = mt.profile(model.eval(), "2x8")
        assert profile.timeline
        live = list(profile.timeline.live_bytes)
        tab = spied(opened(profile.to_html()))
        for is_from_zero in (False, True):
            tab.page.get_by_label("from zero").set_checked(is_from_zero)
            low, high = tab.page.evaluate("[charts.memory.scales.y.min, charts.memory.scales.y.max]")
            assert low < max(live) < high
            assert (low == 0) >= is_from_zero
        x, y, weights = tab.page.evaluate("charts.memory.data.map(series => [...series])")
        assert x == [at + 0.5 for at in range(len(live) + 1)]
        assert y == [*live, live[-1]]
        assert set(weights) == {profile.total.param_bytes}
        assert tab.page.evaluate("charts.memory.axes[0]._values") == [str(at + 1) for at in range(len(live))]
        chart = tab.page.locator("[id='section:memory'] .u-over")
        box = chart.bounding_box()
        for at in range(len(live)):
            chart.hover(position={"x": box["width"] * (at + 0.9) / len(live), "y": 50})
            assert tab.texts("[id='section:memory'] .status")[0].startswith(f"Operator {at + 1} of {len(live)}")
    tab.page.locator("[id='section:memory']").screenshot(path=ARTIFACTS / "memory.png")


def test_changes_within_noise_are_marked_as_a_diff_does(opened: Open, profile: mt.Profile) -> None:
    near = timed(profile, speed=1.02)
    moved = costing(near, "time_s", {"stem.0": 1.0})
    tab = opened(profile.to_html(compare=moved))
    look_at_all(tab)
    rows = [text.split("\t") for text in tab.texts("[id='section:compare'] .view tbody tr")]
    real = {layer.address for layer in profile.diff(moved).layers}
    assert real == {"stem.0"}
    assert [row[0] for row in rows if row[-1] != "noise"] == [rows[0][0]] == ["stem.0"]
    assert len(rows) > 10
    assert "changes are noise: the middle halves" in tab.texts("[id='section:compare'] .view p")[0]
    totals = dict(text.split("\t")[::3] for text in tab.texts("[id='section:compare'] > .scroll tbody tr"))
    assert totals["time"] == "noise"
    tab.page.locator("[id='section:compare']").screenshot(path=ARTIFACTS / "compare.png")


def test_runs_without_a_call_in_common_are_not_called_the_same(opened: Open, profile: mt.Profile) -> None:
    tab = opened(profile.to_html(compare=mt.profile(*zoo.build("tiny-vit"))))
    look_at_all(tab)
    assert tab.texts("[id='section:compare'] .view tbody") == ["No call is in both runs: there is nothing to compare."]
    tab = opened(profile.to_html(compare=profile))
    look_at_all(tab)
    assert tab.texts("[id='section:compare'] .view tbody") == ["No call in both runs differs in time."]


#: Exponents of ten: bits a second, seconds, and times as fast.
SETTINGS = [
    *((bandwidth, -4, -2, 3) for bandwidth in (4, 5, 5.5, 6, 6.5, 7, 7.5, 8, 10)),
    *((7.3, rtt, -2, 1) for rtt in (-3, -2, -1, 0)),
    *((8, -3.5, edge, 2.5) for edge in (-1.5, -1, 0, 2)),
    *((8, -3.5, -1.5, cloud) for cloud in (-1, 0, 3)),
]


def test_the_best_cut_is_the_one_that_the_plan_names(
    opened: Open, page: str, profile: mt.Profile, cuts: mt.Cuts
) -> None:
    tab = opened(page)
    view = tab.page.locator("[id='section:explorer'] .view")
    view.scroll_into_view_if_needed()
    tab.page.wait_for_selector("input[name=cloud]")
    winners = set()
    for setting in SETTINGS:
        for name, value in zip(("bandwidth_bps", "rtt_s", "edge", "cloud"), setting, strict=True):
            tab.slide(name, value)
        now = json.loads(view.get_attribute("data-now"))
        plan = mt.plan(
            cuts,
            edge=timed(profile, speed=now["edge"]),
            cloud=timed(profile, speed=now["cloud"]),
            link=mt.Link(float(now["bandwidth_bps"]), float(now["rtt_s"])),
        )
        assert view.get_attribute("data-best") == plan.winner.name
        winners.add(plan.winner.name)
    assert tab.texts(".verdict .best") == [plan.winner.name]
    assert len(winners) >= 3
    assert {"all on edge"} < winners
    for name, value in {"bandwidth_bps": 8.3, "rtt_s": -3.5, "edge": -1.5, "cloud": 1}.items():
        tab.slide(name, value)
    tab.page.wait_for_timeout(100)
    ARTIFACTS.mkdir(exist_ok=True)
    view.screenshot(path=ARTIFACTS / "explorer.png")


@pytest.fixture(scope="module")
def many_cuts() -> tuple[mt.Profile, mt.Cuts]:
    """Those of 12 blocks of 15 layers, so 192 cuts with those at the ends of blocks."""
    blocks = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(15))) for _ in range(12))
    model = nn.Sequential(*blocks).eval()
    return timed(mt.profile(model, "2x8")), mt.cuts(model, "2x8")


def test_many_cuts_are_grouped_by_module_and_opened_by_a_click(
    opened: Open, many_cuts: tuple[mt.Profile, mt.Cuts]
) -> None:
    profile, cuts = many_cuts
    assert len(cuts) == 192
    tab = spied(opened(profile.to_html(cuts=cuts)))
    chart = tab.page.locator("[id='section:explorer'] .chart")
    widest = "Math.abs(charts.explorer.valToPos(1, 'x') - charts.explorer.valToPos(0, 'x'))"
    values = "charts['explorer:sent'].axes[0]._values"
    assert {f"{at} ▸" for at in range(11)} <= set(tab.page.evaluate(values))
    assert int(chart.get_attribute("data-bars")) < 40
    assert tab.page.evaluate(widest) > 12
    place = tab.page.evaluate(f"{values}.indexOf('3 ▸')")
    over = tab.page.locator("[id='section:explorer'] .bars .u-over")
    x = tab.page.evaluate("at => charts.explorer.valToPos(at, 'x')", place)
    over.hover(position={"x": x, "y": 100})
    assert "the best of 16 cuts in 3: click to see them" in tab.texts(".tip")[0]
    over.click(position={"x": x, "y": 100})
    assert chart.get_attribute("data-bars") == "16"
    assert tab.texts("[id='section:explorer'] .crumbs button") == ["all 192 cuts", "3"]
    assert tab.page.evaluate(values) == [*(f"3.{at}" for at in range(15)), "3"]
    tab.page.locator("[id='section:explorer'] .crumbs button").first.click()
    assert tab.texts("[id='section:explorer'] .crumbs button") == ["all 192 cuts"]
    chart.focus()
    for key in ("ArrowRight",) * (place + 1) + ("Enter",):
        tab.page.keyboard.press(key)
    assert tab.texts("[id='section:explorer'] .crumbs button") == ["all 192 cuts", "3"]
    tab.page.keyboard.press("Escape")
    box = over.bounding_box()
    tab.page.mouse.move(box["x"] + x, box["y"] + 50)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + x + 3 * tab.page.evaluate(widest), box["y"] + 60, steps=4)
    tab.page.mouse.up()
    assert tab.texts("[id='section:explorer'] .crumbs button")[-1] == "3 to 6"
    tab.page.locator("[id='section:explorer']").screenshot(path=ARTIFACTS / "many-cuts.png")


def test_a_bar_of_the_explorer_shows_its_row(opened: Open, page: str, profile: mt.Profile, cuts: mt.Cuts) -> None:
    tab = spied(opened(page))
    plan = mt.plan(cuts, edge=profile, cloud=timed(profile, speed=10.0), link=mt.Link("20Mbps", rtt="15ms"))
    names = tab.page.evaluate("charts['explorer:sent'].axes[0]._values")
    x = tab.page.evaluate("at => charts.explorer.valToPos(at, 'x')", names.index("layer2.0.conv2"))
    tab.page.locator("[id='section:explorer'] .bars .u-over").hover(position={"x": x, "y": 100})
    one = plan["layer2.0.conv2"]
    rows = dict(text.split("\t") for text in tab.texts(".tip tr"))
    assert rows == {
        "edge": write(one.seconds("run", where="edge"), "seconds"),
        "link": write(one.seconds("encode", "send", "decode", "back"), "seconds"),
        "cloud": write(one.seconds("run", where="cloud"), "seconds"),
        "total": write(one.latency_s, "seconds"),
        "sends": size(sum(one.sent_bytes)),
    }


def test_axis_labels_keep_what_differs(opened: Open) -> None:
    model = nn.Sequential()
    inner = nn.Sequential()
    for at in range(6):
        inner.add_module(f"encoder_layer_with_a_long_name_{at}", nn.Linear(8, 8))
    model.add_module("encoder", nn.Sequential(inner))
    model.add_module("head", nn.Linear(8, 8))
    tab = spied(opened(timed(mt.profile(model.eval(), "2x8")).to_html(cuts=mt.cuts(model.eval(), "2x8"))))
    labels = tab.page.evaluate("charts['explorer:sent'].axes[0]._values")
    assert len(set(labels)) == len(labels) > 6
    ends = [label for label in labels if label.endswith(("name_0", "name_5"))]
    assert ends == ["encode…h_a_long_name_0", "encode…h_a_long_name_5"]


def test_labels_of_marks_are_above_the_plot(opened: Open, page: str) -> None:
    tab = opened(page)
    look_at_all(tab)
    tab.page.evaluate(
        """() => {
          window.written = [];
          const real = CanvasRenderingContext2D.prototype.fillText;
          CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
            const plot = this.canvas.closest(".uplot").querySelector(".u-over");
            written.push([text, y, plot.offsetTop * devicePixelRatio]);
            return real.call(this, text, x, y, ...rest);
          };
        }"""
    )
    tab.page.emulate_media(color_scheme="dark")
    tab.until("written.some(([text]) => text.startsWith('best:'))")
    marks = [one for one in tab.page.evaluate("written") if one[0].startswith(("best:", "peak "))]
    assert {text.split()[0] for text, _, _ in marks} == {"best:", "peak"}
    assert all(bottom < top for _, bottom, top in marks)


def test_a_line_that_is_off_the_scale_is_said(opened: Open, page: str) -> None:
    tab = opened(page)
    tab.page.locator("[id='section:explorer'] .view").scroll_into_view_if_needed()
    tab.page.wait_for_selector("input[name=cloud]")
    legend = "[id='section:explorer'] .key span"
    assert "all on the edge" in tab.texts(legend)
    for name, value in {"bandwidth_bps": 10, "rtt_s": -4, "edge": -2, "cloud": 3}.items():
        tab.slide(name, value)
    tab.page.locator(legend, has_text="all on the edge: ").wait_for()
    takes = re.search(r"All on the edge takes (.*?),", tab.texts(".verdict")[0])
    assert takes
    assert f"all on the edge: {takes[1]}, off the scale" in tab.texts(legend)
    assert "all on the cloud" in tab.texts(legend)


def test_without_a_script_cards_and_table_are_seen(opened: Open, page: str, profile: mt.Profile) -> None:
    tab = opened(page, java_script_enabled=False)
    assert tab.page.get_by_text("11.1 k").first.is_visible()
    assert tab.page.locator("#layers tbody a[name], #layers tbody tr:first-child").count() == len(profile)
    assert tab.page.locator("#layers tbody tr").count() == len(profile) + 4  # residual additions
    bar = "cell => getComputedStyle(cell).backgroundSize"
    assert tab.page.locator("#layers td.b100").first.evaluate(bar).startswith("100%")
    assert tab.page.get_by_text("The split explorer: drawn where JavaScript may run.").is_visible()
    tab.shoot("no-script")


def test_a_hostile_name_runs_nothing_and_is_shown(opened: Open) -> None:
    profile = timed(hostile_profile())
    cuts = mt.cuts(hostile_model().eval(), "2x4")
    tab = opened(profile.to_html(cuts=cuts, compare=profile))
    look_at_all(tab)
    assert "all on edge" in tab.texts(".verdict")[0]
    tab.page.locator(".icicle .node").nth(1).hover()
    tab.page.get_by_role("searchbox").fill("<b>bo")
    tab.page.wait_for_timeout(100)
    assert tab.page.evaluate("typeof hacked") == "undefined"
    assert tab.page.locator("img, main i:not(.key i), main b b").count() == 0
    assert "\"'><b>bold</b>" in tab.texts("#layers tbody th a")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_telephone_and_both_schemes(opened: Open, page: str, scheme: str) -> None:
    tab = opened(page, width=400, color_scheme=scheme)
    look_at_all(tab)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 400
    assert tab.texts("#layers thead th")[:2] == ["call", "time"]
    paper = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is (scheme == "light")
    tab.page.evaluate("scrollTo(0, 0)")
    tab.page.screenshot(path=ARTIFACTS / f"narrow-{scheme}.png", full_page=True)
    wide = opened(page, color_scheme=scheme)
    wide.shoot(f"wide-{scheme}")


@pytest.mark.slow
def test_it_prints_every_row(opened: Open, page: str, profile: mt.Profile) -> None:
    tab = opened(page)
    tab.page.get_by_text("Open all").click()
    tab.page.emulate_media(media="print")
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert len(tab.names()) == len(profile) + 4  # residual additions
    assert tab.page.locator("details:not(.menu):not([open])").count() == 0
    for hidden in (".toc", ".controls", ".sliders input"):
        assert not any(tab.page.locator(hidden).evaluate_all("all => all.map(one => one.offsetParent !== null)"))
    tab.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.page.locator("details[open]").count() == 0


def test_a_capture_of_the_whole_page_has_every_chart(opened: Open, page: str) -> None:
    tab = opened(page)  # nothing is scrolled into view
    blank = """canvas => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return new Set(new Uint32Array(data.buffer)).size < 5;
    }"""
    for name in ("memory", "roofline", "explorer"):
        canvases = tab.page.locator(f"[id='section:{name}'] .uplot canvas").all()
        assert canvases
        assert not any(canvas.evaluate(blank) for canvas in canvases)


@pytest.mark.slow
def test_ten_thousand_calls_open_soon_and_only_rows_in_sight_are_in_the_page(opened: Open) -> None:
    text = large(10_000).to_html()
    began = perf_counter()
    tab = opened(text)
    tab.until("document.documentElement.dataset.ready === '1'")
    taken = perf_counter() - began
    tab.page.get_by_text("Open all").click()
    assert tab.texts("[role=status]") == ["10,000 of 10,000 calls"]
    assert tab.page.locator("#layers tbody tr").count() < 100
    tab.page.locator("#grid").evaluate("grid => { grid.scrollTop = grid.scrollHeight }")
    tab.page.wait_for_selector("#layers th[title='blocks.98.layer_098'], #layers th[title='blocks.99.layer_000']")
    ARTIFACTS.mkdir(exist_ok=True)
    (ARTIFACTS / "opened.txt").write_text(f"10,000 calls: {len(text.encode()):,} bytes, open after {taken:.2f} s\n")
