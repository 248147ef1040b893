"""The one renderer of tables."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtome.report.notebook import page
from microtome.report.table import Bar, Column, Line, Names, Note, Report, Segments, Styled, Table, text
from microtome.report.text import StackedBar, shorten, stacked_bars
from microtome.results.base import Result
from tests.report.test_foreign_text import COLOURS, RESULTS


@pytest.fixture(scope="module", params=list(RESULTS))
def result(request: pytest.FixtureRequest) -> Result:
    return RESULTS[request.param]()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_of_a_result_is_wider_than_the_terminal(
    result: Result, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    plain = str(result).splitlines()
    assert max(map(len, plain)) <= width
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    drawn = str(result)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", drawn)
    assert [line.rstrip() for line in COLOURS.sub("", drawn).splitlines()] == plain


NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=60)


@given(
    st.lists(st.tuples(NAMES, st.lists(st.integers(0, 10**9), min_size=3, max_size=3)), min_size=1, max_size=5),
    st.permutations([0, 1, 2]),
    st.integers(40, 160),
)
def test_columns_are_left_out_by_importance_and_named(
    rows: list[tuple[str, list[int]]], importance: list[int], width: int
) -> None:
    headers = ("first", "second", "third")
    columns = [Column(header, importance=at) for header, at in zip(headers, importance, strict=True)]
    lines = tuple(Line((name, *map(str, numbers))) for name, numbers in rows)
    report = Report("a title", (Table((Column("name", align="left"), *columns), lines),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        shown = text(report)
    table, _, left_out = shown.partition("no room for: ")
    header = table.splitlines()[1]
    assert max(map(len, shown.splitlines())) <= width
    kept = [column for column in columns if f" {column.header}" in header.replace("┃", " ")]
    missing = [column for column in columns if column not in kept]
    assert [column.header for column in missing] == [name for name in left_out.split(", ") if name]
    assert all(one.importance < other.importance for one in kept for other in missing)  # type: ignore[operator]
    for column in kept:
        at = headers.index(column.header)
        assert all(str(numbers[at]) in table for _, numbers in rows)


def test_a_pipe_has_room_for_every_column_and_full_names(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (Column("name", align="left"), *(Column(f"column {at}", importance=at) for at in range(20)))
    wide = Report("t", (Table(columns, (Line(("x" * 100, *map(str, range(20)))),)),))
    monkeypatch.delenv("COLUMNS", raising=False)
    _, head, _, row = text(wide).splitlines()
    assert [cell.strip() for cell in head.split("┃")] == [column.header for column in columns]
    assert [cell.strip() for cell in row.split("│")] == ["x" * 100, *map(str, range(20))]
    monkeypatch.setenv("COLUMNS", "140")
    assert "no room for: " in text(wide)
    monkeypatch.delenv("COLUMNS")
    assert text(Report("nothing", ())) == "nothing"


def test_columns_without_an_importance_are_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = (Column("name", align="left"), Column("must"), Column("may", importance=0))
    shown = text(Report("t", (Table(columns, (Line(("x" * 80, "1" * 20, "2" * 20)),)),)))
    assert "no room for: may" in shown
    assert "1" * 20 in shown


def test_a_note_goes_with_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    last = Column("last", importance=0)
    report = Report(
        "t", (Table((Column("name"), last), (Line(("x" * 30, "2" * 30)),)),), ("always", Note("of the last", (last,)))
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert "of the last" in text(report)
    assert "without columns" in text(replace(report, notes=(Note("without columns", ()),)))
    monkeypatch.setenv("COLUMNS", "40")
    assert text(report).splitlines()[-2:] == ["always", "no room for: last"]


GOLDEN = """\
t
         ┃ share        ┃   count ┃
name     ┃ of all       ┃       k ┃ crosses
━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━
*   long │ ██    50.0 % │ 1,234.5 │ itself, block.0 +2
  b      │ ████ 100.0 % │       2 │ one
─────────┼──────────────┼─────────┼─────────────────────
  total  │              │       3 │"""


def test_bars_marks_units_totals_and_lists_are_drawn_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "56")
    columns = (
        Column("name", align="left"),
        Column("share\nof all", align="left", bar_width=4),
        Column("count\n", unit="k"),
        Column("crosses", align="left"),
    )
    lines = (
        Line(("  long", Bar(0.5, "50.0 %"), "1,234.5", Names(("itself", "block.0", "block.1", "block.2"))), mark="*"),
        Line(("b", Bar(1.0, "100.0 %"), Styled("2", "red"), Names(("one",)))),
        Line(("total", "", "3", ""), kind="total"),
    )
    assert text(Report("t", (Table(columns, lines),))) == GOLDEN


def test_html_escapes_names_and_draws_bars() -> None:
    columns = (Column("a\n<b>"), Column("c"))
    report = Report("<t>", (Table(columns, (Line(("<x>", Segments(((0.5, "#123456"),), "<tip>"))),)),), ("<note>",))
    html = page(report)
    for escaped in ("&lt;t&gt;", "a &lt;b&gt;", "&lt;x&gt;", "&lt;tip&gt;", "&lt;note&gt;"):
        assert escaped in html
    assert "width:90.0px" in html
    assert "<x>" not in html


@pytest.mark.parametrize(("width", "is_whole"), [(60, False), (80, True), (120, True)])
def test_the_names_of_bars_are_whole_where_there_is_room(width: int, is_whole: bool) -> None:
    name = "features.5.block.2.scale_activation"  # 35 characters, which --at accepts
    bars = [StackedBar(name, "*", 1.0, (("#", 1.0, True),)), StackedBar("all", " ", 0.5, (("#", 0.5, True),))]
    lines = [line.plain for line in stacked_bars(bars, 1.0, width, {})]
    assert (name in lines[0]) == is_whole
    assert width - 2 <= len(lines[0]) <= width
    assert lines[0].count("#") >= 24


def test_names_are_shortened_and_keep_their_indices() -> None:
    assert shorten("encoder.layer.11.attention.output", 20) == "en…la…11.at…output"
    assert shorten("encoder.layer.11.attention.output", 10) == "enc…output"  # no room for the index
    assert len(shorten(" " * 30 + "x" * 30, 20)) == 20


def test_columns_without_an_importance_are_left_out_last_and_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (Column("name", align="left"), Column("first"), Column("second"), Column("third", importance=0))
    table = Table(columns, (Line(("a", *("1234567890" * 2 for _ in columns[1:]))),))
    for width, left_out in ((100, ""), (70, "third"), (45, "second, third"), (24, "first, second, third")):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = text(Report("a title", (table,)))
        assert " ".join(shown.partition("no room for: ")[2].split()) == left_out
        assert "…" not in shown
