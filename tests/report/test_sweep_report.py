"""A sweep as text and as a page, by hand-made numbers."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

import microtome as mt
from microtome.errors import BadFile, NoMatch
from microtome.results.link import LinkMeasurement
from microtome.results.sweep import CutTiming, Sweep

LINK = LinkMeasurement(rtt_s=0.01, jitter_s=0.001, up_bytes_per_s=1e6, down_bytes_per_s=2e6)


def timed(at: str | None, head_s: float, tail_s: float, planned_s: float | None = None) -> CutTiming:
    wire_s = 0.0 if at is None else 0.01
    total_s = head_s + wire_s + tail_s
    return CutTiming(
        at,
        "raw",
        head_s=head_s,
        wire_s=wire_s,
        tail_s=tail_s,
        total_s=total_s,
        total_q1_s=0.9 * total_s,
        total_q3_s=1.1 * total_s,
        sent_bytes=1000,
        planned_s=planned_s,
    )


def swept(*rows: CutTiming, model: str = "Net", no_plan: str = "") -> Sweep:
    return Sweep(
        model, "Inputs(1x3:float32)", "host:7070", "cuda", "raw", 5, LINK, rows, "no sensor: rapl: none", no_plan, {}
    )


#: The input 40 ms, 'a' 20 ms, all here 50 ms; the plan says 30, 35 and 60.
ROWS = timed("", 0.0, 0.03, 0.03), timed("a", 0.005, 0.005, 0.035), timed(None, 0.05, 0.0, 0.06)


def test_the_best_and_the_plans_are_marked_and_compared() -> None:
    sweep = swept(*ROWS)
    assert sweep.best.at == "a"
    assert sweep.planned is ROWS[0]
    assert [sweep[name] for name in ("(input)", "", "a", "all here", None)] == [ROWS[0], *ROWS, ROWS[2]]
    shown = str(sweep)
    assert "*  a " in shown
    assert "p  (input) " in shown
    assert "p the plan's: it says 30 ms, and it took 40 ms, 2 times the best (*)" in shown
    assert "cannot be told" not in shown
    for other in (sweep._repr_html_(), sweep.to_markdown()):  # without marks
        assert "(input): the plan" in other
        assert "2 times the best (bold)" in other


def test_what_cannot_be_told_from_the_best_is_named() -> None:
    near = timed("b", 0.006, 0.005)  # 21 ms: its middle half begins at 18.9, and that of the best ends at 22
    assert swept(*ROWS, near).tied == (near,)
    assert "cannot be told from the best: b" in str(swept(*ROWS, near))


def test_cuts_that_could_not_be_measured_are_said() -> None:
    failed = CutTiming("c", "raw", failed="too large")
    sweep = swept(*ROWS, failed)
    assert failed not in sweep.measured
    assert "1 could not be measured: such as c: too large" in str(sweep)
    assert "too large" in sweep.to_html()
    assert "no plan: the server has a stage" in str(swept(timed(None, 1, 0), no_plan="the server has a stage"))


class Page(HTMLParser):
    """The tags and the texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_a_bar_and_a_row_for_each_and_no_script() -> None:
    page = Page(swept(*ROWS).to_html())
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert page.tags.count("tr") == 1 + 3
    assert page.tags.count("rect") == 2 + 3 + 1  # (input) has no head, and all here has nothing else
    assert any("prefers-color-scheme:dark" in text for text in page.texts)


def test_what_models_and_servers_are_named_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    sweep = swept(timed(evil, 0.1, 0.1, 0.2), CutTiming(evil + "2", "raw", failed=evil), model=evil, no_plan=evil)
    page = sweep.to_html()
    assert "script" not in Page(page).tags
    assert "<script" not in page


def test_a_page_of_many_cuts_is_small(tmp_path: Path) -> None:
    rows = [
        timed(f"layer{at // 100}.{at % 100}.bottleneck.convolution.{at}", 1e-3 * at, 0.1, 0.1234) for at in range(522)
    ]
    swept(*rows).to_html(tmp_path / "s.html")
    assert (tmp_path / "s.html").stat().st_size < 400_000


def test_a_sweep_is_read_from_json_as_it_was(tmp_path: Path) -> None:
    sweep = swept(*ROWS)
    sweep.to_json(tmp_path / "s.json")
    assert mt.load(tmp_path / "s.json") == sweep
    assert sweep["a"] is ROWS[1]
    assert sweep[None] is ROWS[2]
    with pytest.raises(NoMatch, match="no module at path 'b'"):
        sweep["b"]
    swept(CutTiming("a", "raw", failed="no")).to_json(tmp_path / "none.json")
    with pytest.raises(BadFile, match="expected a measured cut, got none"):
        mt.load(tmp_path / "none.json")
