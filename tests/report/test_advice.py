"""Python objects advise arguments, and the command line advises its options."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.errors import BadQuery
from microtome.report.formats import markdown
from microtome.report.formats import text as as_text
from microtome.report.html.overview import caveats
from microtome.report.notes import profile_notes
from microtome.report.row_selection import RowSelection
from microtome.report.top import text as of_top
from microtome.results.measurements import Spread, Timing
from microtome.results.metrics import METRICS, TIME, advise, on_command_line, why_missing
from tests.report.test_foreign_text import RESULTS


@pytest.fixture(scope="module")
def profile() -> mt.Profile:
    return mt.profile(*zoo.build("tiny-resnet"))


@pytest.mark.parametrize("kind", RESULTS)
def test_no_view_of_a_python_object_advises_an_option(kind: str) -> None:
    result = RESULTS[kind]()
    for text in (str(result), result._repr_html_(), result.to_markdown()):
        assert not re.search("--[a-z]", text)


def test_the_page_advises_in_the_interface_that_wrote_it(profile: mt.Profile, tmp_path: Path) -> None:
    page = profile.to_html()
    assert "add measure=[&quot;time&quot;]" in page
    assert "add --time" not in page
    profile.to_json(tmp_path / "profile.json")
    words = ["report", str(tmp_path / "profile.json"), "-o", str(tmp_path / "page.html")]
    assert CliRunner().invoke(main, words).exit_code == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "add --time of <code>microtome profile</code>" in page
    assert "measure=[" not in page
    assert "profile with --time of `microtome profile`, on the machine" in page


def test_the_command_line_leaves_the_advice_of_python_as_it_was(profile: mt.Profile) -> None:
    result = CliRunner().invoke(main, ["profile", "zoo:tiny-vit", "--sort", "time"])
    assert "to sort by: add --time" in result.output
    assert TIME.advice == 'measure=["time"]'
    with pytest.raises(BadQuery, match=r"add measure=\[\"time\"\]$"):
        profile.top(by="time_s")


def test_reasons_name_the_argument_or_the_option(profile: mt.Profile) -> None:
    for metric in METRICS.values():
        reason = why_missing(profile, metric)
        if metric.requires is not None and reason is not None:
            assert reason == f"not {metric.requires.done}: add {metric.requires.argument}"
            with on_command_line():
                assert why_missing(profile, metric) == f"not {metric.requires.done}: add {metric.requires.option}"


def test_what_time_stamps_do_not_explain_is_other_programs(profile: mt.Profile) -> None:
    timed = tuple(replace(row, time_s=1e-3) for row in profile)
    spread = Spread(47e-3, 46e-3, 50e-3, 45e-3, 56e-3, 30, 0)
    notes = profile_notes(replace(profile, calls=timed, timing=Timing(spread, 1.143, 1e-9, 2)))
    assert not any("time stamps add" in note for note in notes)
    assert any(
        "too busy for these times: passes with time stamps took 1.14 times as long, and the stamps take only" in note
        for note in notes
    )


def test_notes_name_the_argument_or_the_option(profile: mt.Profile) -> None:
    timed = tuple(replace(row, time_s=1e-3) for row in profile)
    timing = Timing(Spread(1.0, 0.9, 1.1, 0.8, 1.2, 9, 0), 1.5, 0.5 / len(timed), 2)
    slow = replace(profile, calls=timed, timing=timing)
    assert "are too long: measure with a smaller depth=" in profile_notes(slow)[-1]
    with on_command_line(["--depth"]):
        assert profile_notes(slow)[-1].endswith("are too long: measure with a smaller --depth")
    with on_command_line(["--top"]):
        assert profile_notes(slow)[-1].endswith("are too long: measure with a smaller --depth of `microtome profile`")


@pytest.mark.parametrize("options", [{"compiled": True}, {"fast_paths": False}])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_time_stamps_are_not_blamed_where_bare_passes_run_other_code(
    profile: mt.Profile, options: dict[str, Any], ratio: float
) -> None:
    rows = tuple(replace(row, time_s=0.0 if row.depth else 1.0) for row in profile)
    other = replace(profile, calls=rows, timing=replace(QUIET, ratio=ratio, backward_ratio=ratio, **options))
    notes = "\n".join(profile_notes(other))
    assert "time stamps add" not in notes
    assert BUSY not in notes
    assert "with them, and other code," in notes
    assert "Time stamps add" not in other.to_html()
    said = "compiled code runs as Python while calls are timed, and compiled in passes without time stamps"
    assert (said in notes) == ("compiled" in options)
    assert ("compiled, a forward takes 1 s" in other.to_html()) == ("compiled" in options)
    assert ("fast paths of torch, which skip calls, are disabled" in notes) == ("fast_paths" in options)


BUSY = "this machine was too busy for these times: "
QUIET = Timing(Spread(1.0, 0.99, 1.01, 0.98, 1.02, 30, 0), 1.01, 1e-6, 2)


@pytest.mark.parametrize(
    ("timing", "reason"),
    [
        (replace(QUIET, ratio=0.8), "passes with time stamps were faster than passes without. Close other programs"),
        (
            replace(QUIET, bare=Spread(1.0, 0.8, 1.2, 0.9, 1.1, 30, 0)),
            "the interquartile range of the passes without time stamps is 800 ms to 1.2 s. Close",
        ),
        (
            replace(QUIET, backward=QUIET.bare, backward_ratio=0.5),
            "backwards with time stamps were faster than backwards without. Close",
        ),
        (
            replace(QUIET, backward=Spread(1.0, 0.8, 1.2, 0.9, 1.1, 30, 0), backward_ratio=1.5),
            "the interquartile range of the backwards without time stamps is 800 ms to 1.2 s. Close",
        ),
    ],
)
def test_times_of_a_busy_machine_are_said_to_be_so_once(profile: mt.Profile, timing: Timing, reason: str) -> None:
    notes = [note for note in profile_notes(replace(profile, timing=timing)) if note.startswith(BUSY)]
    assert len(notes) == 1
    assert re.search(reason, notes[0])
    assert notes[0].endswith("measure more passes with repeat=")
    assert not any(note.startswith("time stamps add") for note in profile_notes(replace(profile, timing=timing)))
    first = caveats(replace(profile, timing=timing, unavailable={"energy": "no sensor"}))[0]
    assert first == f"{notes[0].replace('this', 'This', 1)}."


def test_calls_that_take_longer_than_the_call_around_them_are_noise(profile: mt.Profile) -> None:
    def notes(inner: float) -> list[str]:
        calls = tuple(
            replace(row, time_s=1.0 if not row.depth else inner if row.depth == 1 else 0.0) for row in profile
        )
        shown = profile_notes(replace(profile, calls=calls, timing=QUIET))
        return [note for note in shown if note.startswith(BUSY)]

    assert "the calls inside the model sum up to more than its own time" in notes(0.9)[0]
    assert notes(0.01) == []


@pytest.mark.parametrize(("passes", "own_s", "is_busy"), [(3, -0.2, True), (30, -0.2, True), (3, -0.001, False)])
def test_a_time_below_zero_is_noise_and_no_share(passes: int, own_s: float, is_busy: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))  # with which the model is among the costliest
    counted = mt.profile(model, "1x4")
    # The layers take 0.5 s and a bit more, and the model 1 s.
    times = zip(counted, (1.0, 0.5 - own_s, 0.5), (own_s, 0.5 - own_s, 0.5), strict=True)
    calls = tuple(replace(row, time_s=whole, own=replace(row.own, time_s=own)) for row, whole, own in times)
    timing = replace(QUIET, bare=replace(QUIET.bare, count=passes))
    p = replace(counted, calls=calls, timing=timing)
    assert p.by_type()["Sequential"].time_s == own_s  # files have the number
    tables = [as_text(p, RowSelection(by="type")), as_text(p, RowSelection(depth=1, sort="time")), of_top(p)]
    for shown in (*tables, markdown(p, RowSelection(by="type"))):
        assert not re.search(r"-\d", shown)
        words = " ".join(shown.split())
        assert "noise: " in words
        assert words.count(BUSY) == is_busy
    (line,) = [line for line in tables[0].splitlines() if line.startswith("Sequential │")]
    assert line.count("noise") == 2  # the time and its share


def test_a_count_of_one_is_singular() -> None:
    one = mt.profile(nn.Linear(1, 1, bias=False), "1x1")
    p = replace(one, environment={"cpu": "A", "threads": "1", "torch": "2"})
    refused = replace(mt.cuts(nn.Sequential(nn.Linear(1, 1)), "1x1"), offered=())
    results: list[Any] = [p, p.diff(mt.profile(nn.Linear(1, 2, bias=False), "1x1")), mt.profile(nn.Flatten()), refused]
    results += [mt.trace(nn.Linear(1, 1), "1x1"), mt.extract(nn.Sequential(nn.ReLU()), "1x1", "0")]
    shown = "\n".join((*map(str, results), *map(repr, results), p.to_html()))
    assert "1 parameter (1 trainable" in shown
    assert re.findall(r"(?<![\d.,])1 [a-z]{2,}s\b", shown) == []


@pytest.mark.parametrize("name", ["diff", "plan", "report", "top"])
def test_advice_names_the_command_of_an_option_that_the_running_one_lacks(
    name: str, profile: mt.Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    busy = replace(profile, timing=replace(QUIET, ratio=0.5))
    shown: list[str] = []
    monkeypatch.setattr(command, "callback", lambda: shown.extend(profile_notes(busy)))
    command.invoke(click.Context(command))
    notes = "\n".join(shown)
    assert "measure more passes with --repeat of `microtome profile`" in notes


def test_advice_keeps_what_follows_the_option_and_whole_commands() -> None:
    with on_command_line(["--cuts"]):
        assert advise("x", "--time --backward, on a GPU") == "--time --backward of `microtome profile`, on a GPU"
        assert advise("x", "microtome cuts --json") == "microtome cuts --json"
        assert advise("x", "--cuts") == "--cuts"
