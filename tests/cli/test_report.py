"""`microtome report`, and `--html` and `--open` of `microtome profile`."""

from __future__ import annotations

import json
import webbrowser
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.cli.options.outputs import open_page
from microtome.errors import BadFile, Unsupported


def run(*words: Any) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    urls: list[str] = []

    def open_(url: str) -> bool:
        urls.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", open_)
    return urls


def test_a_page_is_written_with_cuts_and_opened(tmp_path: Path, opened: list[str]) -> None:
    file = tmp_path / "report.html"
    result = run("profile", "zoo:tiny-resnet", "--time", "--repeat", 3, "--warmup", 1, "--html", file, "--open")
    assert result.exit_code == 0, result.output
    assert '"names":["all on edge",' in file.read_text("utf-8")
    assert opened == [file.as_uri()]


def test_a_page_without_times_has_no_cuts_and_goes_to_the_terminal() -> None:
    result = run("profile", "zoo:tiny-resnet", "--html", "-")
    assert result.exit_code == 0
    assert result.stdout.startswith("<!doctype html>")
    assert "There are no times to weigh cuts by" in result.stdout


def test_where_cuts_cannot_be_found_the_page_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise Unsupported("it is not traced")

    monkeypatch.setattr(import_module("microtome.split.cuts.cuts"), "cuts", refuse)
    file = tmp_path / "report.html"
    result = run("profile", "zoo:tiny-resnet", "--time", "--repeat", 3, "--warmup", 1, "--html", file)
    assert result.exit_code == 0
    assert "Note: the page does not show cuts: it is not traced" in result.stderr
    assert "No cuts were given" in file.read_text("utf-8")


def test_a_page_is_made_of_files(tmp_path: Path, opened: list[str]) -> None:
    model, x = zoo.build("tiny-resnet")
    mt.profile(model, x, measure="time", repeat=3, warmup=1).to_json(tmp_path / "p.json")
    mt.cuts(model, x).to_json(tmp_path / "cuts.json")
    file = tmp_path / "report.html"
    words = (
        "report",
        tmp_path / "p.json",
        "-o",
        file,
        "--cuts",
        tmp_path / "cuts.json",
        "--compare",
        tmp_path / "p.json",
    )
    result = run(*words, "--open")
    assert result.exit_code == 0, result.output
    assert f"{file}: " in result.output
    assert "Two runs" in file.read_text("utf-8")
    assert opened == [file.as_uri()]
    assert run("report", tmp_path / "p.json", "-o", "-").stdout.startswith("<!doctype html>")


def test_a_page_has_its_size_in_the_units_of_other_files(tmp_path: Path) -> None:
    run("profile", "zoo:tiny-resnet", "--json", tmp_path / "p.json")
    result = run("report", tmp_path / "p.json", "-o", tmp_path / "p.html")
    assert " KiB, zoo:tiny-resnet on x 2x3x32x32" in result.output


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    mt.cuts(*zoo.build("tiny-resnet")).to_json(tmp_path / "cuts.json")
    result = run("report", tmp_path / "cuts.json", "-o", tmp_path / "report.html")
    assert result.exit_code == 2
    assert "(see microtome profile --json), got a file of kind 'cuts'" in result.output


def test_a_missing_profile_is_named_before_a_missing_page(tmp_path: Path) -> None:
    result = run("report", tmp_path / "none.json")
    assert (result.exit_code, "none.json': No such file" in result.output) == (2, True), result.output
    mt.profile(*zoo.build("tiny-resnet")).to_json(tmp_path / "p.json")
    result = run("report", tmp_path / "p.json")
    assert (result.exit_code, "Missing option '-o' / '--output'" in result.output) == (2, True), result.output


def test_only_a_page_in_a_file_is_opened() -> None:
    for words, message in (
        (["profile", "zoo:tiny-resnet", "--open"], "expected --html FILE, got none"),
        (["report", "p.json", "-o", "-", "--open"], "expected -o FILE, got -"),
    ):
        result = run(*words)
        assert result.exit_code == 2
        assert f"--open needs a page in a file: {message}" in result.output


def test_without_a_browser_the_file_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _: False)
    open_page("report.html")
    assert "there is no browser to open report.html in" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_said_in_words(tmp_path: Path) -> None:
    p = mt.profile(*zoo.build("tiny-resnet"))
    p.to_json(tmp_path / "p.json")
    result = run("report", tmp_path / "p.json", "-o", tmp_path / "none" / "x.html")
    assert result.exit_code == 2
    assert f"Error: cannot write '{tmp_path}/none/x.html': No such file or directory" in result.output
    with pytest.raises(
        BadFile, match=r"cannot write '.*/none/x.html': No such file or directory: create the folder first"
    ):
        p.to_html(tmp_path / "none" / "x.html")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"macs": "many"}, "calls[1].macs: expected an integer, got 'many'"),
        ({"time_s": float("nan")}, "calls[1].time_s: expected a number, got 'NaN'"),
        ({"params": None}, "calls[1].params: expected an integer, got None"),
        ({"type": 7}, "calls[1].type: expected a string, got 7"),
        ({"own": {"flops": [1]}}, "calls[1].own.flops: expected an integer, got [1]"),
    ],
)
def test_a_profile_with_a_wrong_value_is_refused_with_its_file_and_field(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = json.loads(mt.profile(*zoo.build("tiny-resnet")).to_json())
    row = data["calls"][1]
    row |= change | {"own": row["own"] | change.get("own", {})}
    file = tmp_path / "p.json"
    file.write_text(json.dumps(data))
    result = run("report", file, "-o", tmp_path / "x.html")
    assert result.exit_code == 2
    assert result.stderr == f"Error: '{file}' is not a profile: {message}\n"
