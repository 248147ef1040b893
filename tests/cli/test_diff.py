"""`microtome diff`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.results.measurements import Spread, Timing


def run(*words: Any) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, words)])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    for name, width in (("a", 100), ("b", 107)):
        mt.profile(nn.Sequential(nn.Linear(4, width)), "1x4").to_json(tmp_path / f"{name}.json")
    return tmp_path / "a.json", tmp_path / "b.json"


def test_what_changed_is_printed(files: tuple[Path, Path]) -> None:
    result = run(*files)
    assert result.exit_code == 0, result.output
    assert "+7.0 %" in result.output


def test_a_profile_of_a_busy_machine_is_noted(files: tuple[Path, Path]) -> None:
    wide = Spread(1.0, 0.5, 2.0, 0.6, 1.8, 30, 0)
    replace(mt.load(files[1]), timing=Timing(wide, 1.0, 1e-6, 2)).to_json(files[1])
    result = run(*files)
    assert result.exit_code == 0
    assert f"Note: {files[1]}: the machine was too busy for these times: the interquartile range" in result.stderr
    assert f"Note: {files[0]}" not in result.stderr


def test_the_page_compares_the_first_profile_with_the_second(files: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run(*files, "--html", page)
    assert result.exit_code == 0
    assert 'id="section:compare"' in page.read_text()
    assert mt.load(files[1]).inputs in page.read_text()
    assert "+7.0 %" in result.output
    assert "--open needs a page in a file" in run(*files, "--open").output


def test_layers_are_selected_by_depth_and_number(tmp_path: Path) -> None:
    for name, width in (("a", 100), ("b", 107)):
        blocks = [nn.Sequential(nn.Linear(4, width * n), nn.Linear(width * n, 4)) for n in (1, 2, 3)]
        mt.profile(nn.Sequential(*blocks), "1x4").to_json(tmp_path / f"{name}.json")
    files = tmp_path / "a.json", tmp_path / "b.json"

    def layers(*options: Any) -> list[str]:
        table = run(*files, *options, "--md", "-").output
        names = [line.split("|")[1].strip(" `") for line in table.splitlines() if line.count("|") > 2]
        return list(dict.fromkeys(name for name in names if name[:1].isdigit()))

    assert layers() == ["2.0", "2.1", "1.0", "1.1", "0.0", "0.1"]
    assert layers("--top", 2) == ["2.0", "2.1"]
    assert layers("--depth", 1) == ["2", "1", "0"]
    assert layers("--depth", 1, "--top", 1) == ["2"]
    assert run(*files, "--top", 0).exit_code == 2


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        *[("macs=5%", 1), ("macs=7%", 0), ("macs=10%,params=1%", 1), ("macs=10% params=10%", 0)],
        *[("MACs=5%", 1), ("MACs=7%,", 0), ("output bytes=5%", 1), ("macs=7% peak memory=1%", 1), ("peak=50%", 0)],
    ],
)
def test_growth_over_a_limit_exits_with_1(files: tuple[Path, Path], limit: str, code: int) -> None:
    result = run(*files, "--fail-over", limit)
    assert result.exit_code == code, result.output
    assert ("Over the limit" in result.output) == bool(code)


@pytest.mark.parametrize(
    "limits",
    [
        ["--fail-over", "macs=5%", "--fail-over", "params=6.5%"],
        ["--fail-over", "macs=5%", "params=6.5%"],
        ["--fail-over=macs=5%", "params=6.5%,flops=50%"],
        ["--fail-over", "MACs=5%", "Params=6.5%"],
    ],
)
def test_limits_may_be_given_several_times(files: tuple[Path, Path], limits: list[str]) -> None:
    result = run(*limits, *files, "--md", "-")
    assert result.exit_code == 1
    assert "Over the limit: MACs +7.0 %, expected at most 5 %" in result.stderr
    assert "Over the limit: params +7.0 %, expected at most 6.5 %" in result.stderr
    assert result.stdout.startswith("**Sequential on")


def test_the_name_of_a_model_is_not_a_profile(files: tuple[Path, Path]) -> None:
    result = run("zoo:tiny-vit", files[1])
    assert result.exit_code == 2
    assert "expected a file of a profile, which microtome profile zoo:tiny-vit --json F writes" in result.stderr


@pytest.mark.parametrize("limit", ["macs", "macs=5", "macs=-5%", "macs=x%", "speed=5%", "macs=1%,macs=2%", "macs=nan%"])
def test_wrong_limits_exit_with_2(files: tuple[Path, Path], limit: str) -> None:
    assert run(*files, "--fail-over", limit).exit_code == 2


def test_an_unknown_metric_and_an_empty_limit_are_refused(files: tuple[Path, Path]) -> None:
    assert "no metric 'memroy' to compare: did you mean 'memory'?" in run(*files, "--fail-over", "memroy=5%").output
    assert "macs is set twice" in run(*files, "--fail-over", "macs=5%,MACs=6%").output
    assert "such as macs=5%, got an empty string" in run(*files, "--fail-over", ",").output


def test_what_was_not_measured_cannot_be_limited(files: tuple[Path, Path]) -> None:
    result = run(*files, "--fail-over", "time=10%")
    assert result.exit_code == 2
    assert "measure both with --time" in result.output


def test_files_that_are_no_profiles_exit_with_2(files: tuple[Path, Path], tmp_path: Path) -> None:
    assert run(files[0], tmp_path / "none.json").exit_code == 2
    mt.cuts(*zoo.build("tiny-resnet")).to_json(tmp_path / "cuts.json")
    result = run(files[0], tmp_path / "cuts.json")
    assert result.exit_code == 2
    assert "got a file of kind 'cuts'" in result.output


def test_json_and_markdown_go_to_files(files: tuple[Path, Path], tmp_path: Path) -> None:
    assert run(*files, "--json", tmp_path / "d.json", "--md", tmp_path / "d.md").exit_code == 0
    assert mt.load(tmp_path / "d.json")["macs"].growth == pytest.approx(0.07)
    assert "| MACs | 400 | 428 | +7.0 % |" in (tmp_path / "d.md").read_text()
