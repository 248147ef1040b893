"""The page of a profile, as text: what is in it before any script runs, and what cannot get into it."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import OrderedDict
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.devices.machine import environment
from microtome.errors import BadQuery
from microtome.report.html import document
from microtome.report.html.data import bar_base, model_bytes
from microtome.report.html.table import alive_table, full_bar
from microtome.results.measurements import Alive, EnergyUse, Spread
from microtome.results.metrics import METRICS, on_command_line
from microtome.units import UNKNOWN, size
from tests.report.pages import HOSTILE, hostile_profile, large, timed


class Page(HTMLParser):
    """The elements of a page, and the texts in them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.page = page
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self._last = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._last = tag
        self.tags.append((tag, dict(attrs)))
        self.inside.setdefault(tag, []).append("")

    def handle_data(self, data: str) -> None:
        if self._last:
            self.inside[self._last][-1] += data

    @property
    def data(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.inside["script"][0])
        return found

    @property
    def policy(self) -> str:
        return next(str(attrs["content"]) for _, attrs in self.tags if attrs.get("http-equiv"))


@pytest.fixture(scope="module")
def profile() -> mt.Profile:
    model, x = zoo.build("tiny-resnet")
    with torch.no_grad():
        return mt.profile(model, x)


def test_the_policy_allows_what_the_page_holds_by_its_hash_and_nothing_else(profile: mt.Profile) -> None:
    page = Page(profile.to_html())
    scripts = re.findall(r"<script>(.*?)</script>", page.page, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", page.page, re.DOTALL)
    assert (len(scripts), len(styles)) == (3, 1)
    for text in (*scripts, *styles):
        assert f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in page.policy
    assert page.policy.startswith("default-src 'none';")
    assert "unsafe" not in page.policy
    assert page.policy.count("sha256-") == 4


def test_the_page_asks_for_nothing_and_has_no_inline_code_or_style(profile: mt.Profile) -> None:
    for tag, attrs in Page(profile.to_html()).tags:
        assert not {name for name in attrs if name.startswith("on") or name in ("style", "src", "srcset")}, tag
        assert str(attrs.get("href", "#")).startswith(("#", "data:,"))


def test_the_page_is_small(profile: mt.Profile) -> None:
    assert len(profile.to_html().encode()) < 400_000
    assert sum(len(text.encode()) for text in (*document.scripts(), document.style())) < 200_000


def test_libraries_carry_their_licences() -> None:
    hierarchy, plot, _ = document.scripts()
    assert "Copyright 2010" in hierarchy
    assert "Permission to use, copy, modify" in hierarchy
    assert "The MIT License" in plot
    assert "Leon Sorokin" in plot


def test_without_a_script_cards_table_and_bars_are_there(profile: mt.Profile) -> None:
    page = Page(profile.to_html())
    cards = dict(zip(page.inside["dt"], page.inside["b"], strict=False))
    assert cards["parameters"] == "11.1 k"
    assert cards["MACs"] == "9.36 M"
    rows = [attrs for tag, attrs in page.tags if tag == "th" and attrs.get("scope") == "row" and "title" in attrs]
    titles = [attrs["title"] for attrs in rows]
    assert [title for title in titles if "(add)" not in str(title)] == [row.address for row in profile]
    assert [title for title in titles if "(add)" in str(title)] == [
        f"layer{layer}.{block} (add)" for layer in (1, 2) for block in (0, 1)
    ]
    bars = {attrs["class"] for tag, attrs in page.tags if tag == "td" and "class" in attrs}
    assert {"n b100", "n b0"} < bars
    assert ".b100{--b:100%}" in document.style()


def test_code_in_a_sentence_is_set_as_code(profile: mt.Profile) -> None:
    with on_command_line(["--output"]):
        page = profile.to_html()
    texts = re.sub(r"<script.*?</script>|<style>.*?</style>", "", page, flags=re.DOTALL)
    assert "not measured: add --time of <code>microtome profile</code>" in texts
    assert "`" not in texts
    assert '"not measured: add --time of microtome profile"' in page  # for the script


def test_intervals_are_drawn_over_the_bars(profile: mt.Profile) -> None:
    page = Page(timed(profile).to_html())
    lines = [attrs for tag, attrs in page.tags if tag == "line"]
    assert len(lines) == len(profile)
    assert (lines[0]["x1"], lines[0]["x2"]) == ("90.0%", "100%")  # 0.9 and 1.1 of the whole, which the cell ends at


def test_of_what_does_not_add_up_the_most_is_a_full_bar(profile: mt.Profile) -> None:
    assert full_bar(profile, METRICS["macs"]) == profile.total.macs
    most = max(row.output_bytes for row in profile)
    assert full_bar(profile, METRICS["output_bytes"]) == most > profile.total.output_bytes


def test_bars_of_the_peak_begin_where_the_weights_end() -> None:
    # 4 MiB of weights and a bias of 4 KiB, and an input of 4 KiB, all float32.
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8, bias=False))
    profile = mt.profile(model.eval(), "1x1024")
    weights = 4 * (1024 * 1024 + 1024 + 1024 * 8)
    assert model_bytes(profile) == weights == bar_base(profile, METRICS["peak_bytes"])
    assert bar_base(profile, METRICS["macs"]) == 0
    page = Page(profile.to_html())
    table = page.page[page.page.index('id="layers"') :].partition("</table>")[0]
    bars = [int(cells[-1]) for row in table.split("<tr>")[2:] if (cells := re.findall(r'"n b(\d+)"', row))]
    above = [row.peak_bytes - weights for row in profile]
    assert bars == [round(100 * nbytes / max(above)) for nbytes in above]
    assert len(set(bars)) > 1


def test_the_largest_tensors_at_the_peak_are_listed_and_the_others_added_up(profile: mt.Profile) -> None:
    large = [Alive("op", f"layer{at}", 1000) for at in range(14)]
    small = [Alive("op", "tiny", 1), Alive("input", "x", 2), Alive("rest", "", 7, 5)]
    line = profile.timeline
    assert line is not None
    line = replace(line, live_bytes=(14_010,) * len(line.live_bytes))
    table = alive_table(replace(line, alive=(*large, *small)))
    assert table.count("computed in layer") == 12
    assert "tiny" not in table
    assert "9 smaller tensors" in table  # two layers, tiny, x and five others
    assert "1.96 KiB" in table  # 2010 bytes
    few = alive_table(replace(line, alive=(large[0], small[0])))
    assert "computed in tiny" in few


def test_headline_and_chart_have_the_same_peak_with_the_weights_stated(profile: mt.Profile) -> None:
    for one in (profile, mt.profile(*zoo.build("tiny-resnet"), backward=True)):
        page = Page(one.to_html())
        memory = page.data["memory"]
        assert isinstance(memory, dict)
        assert one.timeline
        assert memory["live_bytes"][memory["peak"]] == one.peak_bytes
        assert memory["model_bytes"] == one.total.param_bytes + one.total.buffer_bytes
        cards = dict(zip(page.inside["dt"], zip(page.inside["b"], page.inside["span"], strict=False), strict=False))
        assert cards["peak memory"][0] == size(one.peak_bytes)
        assert f"{size(memory['model_bytes'])} weights and buffers" in cards["peak memory"][1]


def test_the_header_has_model_input_device_and_date(profile: mt.Profile) -> None:
    def facts(one: mt.Profile) -> dict[str, str]:
        return dict(re.findall(r"<li><small>(.*?)</small>(.*?)</li>", one.to_html()))

    assert "<h1>ResNet</h1>" in profile.to_html()
    assert facts(profile)["input"] == "x 2x3x32x32"
    assert facts(profile)["device"] == "none: counted, nothing measured"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", facts(profile)["page written"])
    machine = {"date": "2026-01-02 03:04 UTC", "cpu": "a CPU", "threads": "4", "torch": "2.9"}
    measured = facts(replace(profile, environment=machine))
    assert measured == {
        "input": "x 2x3x32x32",
        "device": "a CPU, 4 threads",
        "torch": "2.9",
        "measured": "2026-01-02 03:04 UTC",
    }
    assert facts(replace(profile, environment=machine | {"gpu": "a <GPU>"}))["device"] == "a &lt;GPU&gt;"


def test_measurements_have_their_date() -> None:
    found = environment()["date"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", found)


def test_device_times_and_energies_have_cards(profile: mt.Profile) -> None:
    calls = tuple(replace(row, device_s=0.002, energy_j=0.5, net_energy_j=0.25) for row in timed(profile))
    use = EnergyUse("share", "nvml", Spread(0.5, 0.4, 0.6, 0.45, 0.55, 5, 0), 70.0, 0.01, 0.0, 0.0, {})
    page = Page(replace(profile, calls=calls, energy=use).to_html())
    cards = dict(zip(page.inside["dt"], zip(page.inside["b"], page.inside["span"], strict=False), strict=False))
    assert cards["device time"] == ("2 ms", f"95 %: {UNKNOWN}; host 9.79 ms")
    assert cards["energy"] == ("500 mJ", "nvml, by share; 50.0 % above idle")


def quiet(page: str) -> str:
    found = re.search(r'<p class="quiet">(.*?)</p>', page)
    assert found
    return re.sub("<.*?>", "", found[1])


def test_what_was_not_measured_is_one_quiet_line_and_no_card(profile: mt.Profile) -> None:
    page = Page(profile.to_html())
    assert page.inside["dt"] == ["peak memory", "MACs", "parameters"]
    counted = f"{profile.coverage.ops} operators counted on meta tensors, microtome convention."
    missing = "Not measured: time, memory, energy, load; not counted: the backward (how to)."
    assert quiet(page.page) == f"{counted} {missing}"
    assert "Not measured: memory, energy, load; " in quiet(timed(profile).to_html())


def test_unknown_is_a_dash_with_its_reason_and_never_0(profile: mt.Profile) -> None:
    assert "not measured: add measure=[&quot;time&quot;]" in profile.to_html()
    unavailable = replace(profile, unavailable={"energy": "no sensor: rapl cannot be read"})
    assert "not measured: no sensor: rapl cannot be read" in unavailable.to_html()
    calls = (profile.calls[0], replace(profile.calls[1], macs=None), *profile.calls[2:])
    some = Page(replace(profile, calls=calls).to_html())
    assert [attrs["title"] for tag, attrs in some.tags if tag == "td" and "no formula" in (attrs.get("title") or "")]


def test_what_needs_times_says_so_where_there_are_none(profile: mt.Profile) -> None:
    page = profile.to_html()
    assert "There are no times to weigh cuts by: profile with measure=[&quot;time&quot;]" in page
    assert "There are no times to compute rates from" in page
    assert "No cuts were given: write profile.to_html(file, cuts=mt.cuts(model, inputs))" in timed(profile).to_html()


def test_hostile_names_stay_text() -> None:
    profile = hostile_profile()
    page = Page(profile.to_html(compare=profile))
    seen = {tag for tag, _ in page.tags}
    assert not seen & {"img", "i"}
    assert page.page.count("<script") == 4  # the data, two libraries and the page's own
    assert "<i>Linear" not in page.page
    assert "<!--" not in page.page
    data = json.dumps(page.data)
    for name in HOSTILE:
        assert json.dumps(name)[1:-1] in data
    page.page.encode("utf-8")


def test_the_data_block_holds_no_markup() -> None:
    block = re.search(r'id="data">(.*?)</script>', hostile_profile().to_html(), re.DOTALL)
    assert block
    assert "<" not in block[1]


def test_the_explorer_prices_what_the_plan_prices(profile: mt.Profile) -> None:
    model, x = zoo.build("tiny-resnet")
    cuts, fast = mt.cuts(model, x), timed(profile)
    data = Page(fast.to_html(cuts=cuts)).data["explorer"]
    assert isinstance(data, dict)
    plan = mt.plan(cuts, edge=fast, cloud=fast, link=mt.Link("20Mbps", rtt="15ms"))
    assert sorted(data["names"]) == sorted(candidate.name for candidate in plan)
    for at, name in enumerate(data["names"]):
        candidate = plan[name]
        wire_s = (0.015 + (data["sent"][at] + data["back"][at]) / 2.5e6) if data["crosses"][at] else 0.0
        spent = data["edge_s"][at] + data["encode_s"][at] + data["decode_s"][at] + data["cloud_s"][at]
        assert spent + wire_s == pytest.approx(candidate.latency_s)


def test_the_other_run_is_the_cloud_where_it_can_be(profile: mt.Profile) -> None:
    cuts = mt.cuts(*zoo.build("tiny-resnet"))
    fast = timed(profile)
    data = Page(fast.to_html(cuts=cuts, compare=timed(profile, speed=4.0))).data["explorer"]
    assert isinstance(data, dict)
    whole = data["names"].index("all on cloud, raw input")
    assert data["cloud_s"][whole] == pytest.approx(fast.total.elapsed_s / 4)  # type: ignore[operator]
    vit = timed(mt.profile(*zoo.build("tiny-vit")))
    page = fast.to_html(cuts=cuts, compare=vit)
    assert "the other run cannot be the cloud" in page


def test_many_cuts_are_planned_in_parts_with_the_same_result(
    profile: mt.Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from microtome.report.html import explorer

    cuts = mt.cuts(*zoo.build("tiny-resnet"))
    whole = explorer.explorer(timed(profile), cuts, None)
    monkeypatch.setattr(explorer, "_AT_ONCE", 5)
    assert explorer.explorer(timed(profile), cuts, None) == whole


def test_cuts_without_times_are_left_out_and_that_is_said(profile: mt.Profile) -> None:
    cuts = mt.cuts(*zoo.build("tiny-resnet"))
    calls = [row if row.depth < 2 else replace(row, elapsed_s=None) for row in timed(profile)]
    deep = sum(cut.depth > 1 for cut in cuts)
    page = replace(timed(profile), calls=tuple(calls)).to_html(cuts=cuts)
    assert f"{deep} of {len(cuts)} cuts are left out: a profile has no times so deep" in page


def test_two_runs_are_shown_with_what_changed(profile: mt.Profile) -> None:
    page = timed(profile).to_html(compare=timed(profile, speed=2.0))
    assert "Two runs" in page
    assert "-50.0 %" in page
    other = mt.profile(*zoo.build("tiny-vit"))
    data = Page(profile.to_html(compare=other)).data["compare"]
    assert isinstance(data, dict)
    assert data["only_here"]["count"] == len(profile) - 1  # the root alone has the same address


def shallow(profile: mt.Profile, depth: int, speed: float = 1.0) -> mt.Profile:
    """The profile with times down to a depth."""
    rows = [row if row.depth <= depth else replace(row, time_s=None, spreads={}) for row in timed(profile, speed=speed)]
    return replace(timed(profile), calls=tuple(rows))


@pytest.mark.parametrize(("before", "after", "depth"), [(9, 9, 9), (2, 2, 2), (1, 1, 1), (2, 1, 1), (1, 9, 1)])
def test_calls_at_the_measured_depth_are_compared(before: int, after: int, depth: int, profile: mt.Profile) -> None:
    here, there = shallow(profile, before), shallow(profile, after, speed=3.0)
    data = Page(here.to_html(compare=there)).data["compare"]
    assert isinstance(data, dict)
    times = {row.address: value for row, value in zip(profile, data["there"]["time_s"], strict=True)}
    innermost = {row.address for row in profile if row.depth == depth or (row.depth < depth and row.height == 1)}
    assert {address for address, value in times.items() if value is not None} == innermost
    changed = {layer.address for layer in here.diff(there).layers if any(c.quantity == "time" for c in layer.changes)}
    assert changed == innermost
    assert sum(filter(None, data["here"]["time_s"])) == pytest.approx(sum(here[name].time_s or 0 for name in innermost))


def test_counts_of_two_runs_are_compared_without_the_calls_inside() -> None:
    class Repeated(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.layer, self.times = nn.Linear(4, 4), times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            for _ in range(self.times):
                y = y + 1.0
            return y

    before, after = (mt.profile(nn.Sequential(Repeated(times)), "1x4") for times in (1, 5))
    data = Page(before.to_html(compare=after)).data["compare"]
    assert isinstance(data, dict)
    assert data["here"]["flops"] == [0, 4, 36]
    assert data["there"]["flops"] == [0, 20, 36]


def test_calls_in_one_run_alone_are_named() -> None:
    before = nn.Sequential(OrderedDict(a=nn.Linear(4, 4)))
    after = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), norm=nn.Sequential(nn.LayerNorm(4))))
    x = torch.ones(1, 4)
    data = Page(mt.profile(before, x).to_html(compare=mt.profile(after, x))).data["compare"]
    assert isinstance(data, dict)
    assert data["only_here"] == {"count": 0, "first": []}
    assert data["only_there"] == {"count": 2, "first": ["norm"]}


@pytest.mark.parametrize(("passes", "name"), [(5, "range of 5 passes"), (6, "95 %")])
def test_the_interval_of_few_passes_is_named_their_range(passes: int, name: str, profile: mt.Profile) -> None:
    spread = Spread(0.003, 0.002, 0.004, 0.001, 0.005, passes, 0)
    rows = [replace(row, spreads={"time_s": spread}) for row in timed(profile)]
    page = replace(timed(profile), calls=tuple(rows)).to_html()
    assert f"{name}: 1 ms to 5 ms" in page
    assert f'"intervals":{{"time_s":"{name}"}}' in page


def test_two_runs_of_other_conventions_are_not_comparable(profile: mt.Profile) -> None:
    other = replace(profile, convention="<b>fvcore")
    page = profile.to_html(compare=other)
    assert "the counts are not comparable: they are of the conventions microtome and &lt;b&gt;fvcore" in page
    assert "the counts are not comparable" not in profile.to_html(compare=profile)


def test_what_is_noise_needs_passes_and_the_same_layer_in_both(profile: mt.Profile) -> None:
    def noise(other: mt.Profile) -> list[int]:
        data = Page(timed(profile).to_html(compare=other)).data["compare"]
        assert isinstance(data, dict)
        found: list[int] = data["noise"]["time_s"]
        return found

    layers = [at for at, row in enumerate(profile) if not profile.children(row)]
    assert noise(timed(profile, speed=1.02)) == layers
    assert noise(timed(profile, speed=3.0)) == []
    unrepeated = (replace(row, spreads={}) for row in timed(profile, speed=1.02))
    assert noise(replace(profile, calls=tuple(unrepeated))) == []


def test_cuts_and_profiles_may_be_files(profile: mt.Profile, tmp_path: Path) -> None:
    cuts = mt.cuts(*zoo.build("tiny-resnet"))
    cuts.to_json(tmp_path / "cuts.json")
    timed(profile).to_json(tmp_path / "other.json")
    others = {"cuts": tmp_path / "cuts.json", "compare": tmp_path / "other.json"}
    assert timed(profile).to_html(tmp_path / "page.html", **others) == str(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text("utf-8"))
    assert page.data["explorer"].keys() >= {"names", "sent"}  # type: ignore[attr-defined]
    assert page.data["compare"] is not None
    with pytest.raises(BadQuery, match="expected the cuts that microtome.cuts returns, or the file that holds it, got"):
        profile.to_html(cuts=tmp_path / "other.json")
    with pytest.raises(BadQuery, match="expected a profile to compare with, or the file"):
        profile.to_html(compare=3)


def test_a_profile_of_before_says_that_it_has_no_memory_over_the_run(profile: mt.Profile) -> None:
    assert "written by an older microtome, which kept no memory" in replace(profile, timeline=None).to_html()


def test_of_many_calls_the_table_without_a_script_has_some_and_says_so() -> None:
    page = large().to_html()
    assert "of 10,000 calls are listed; with JavaScript all are." in page
    assert page.count("<tr>") < 1500


def test_a_model_that_runs_no_operator_has_a_page() -> None:
    assert "No operator ran." in mt.profile(nn.Identity(), torch.ones(1)).to_html()
