"""`microtome plan`."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import microtome as mt
from microtome import zoo
from microtome.cli import main

LINK = ["--bandwidth", "20Mbps", "--rtt", "15ms"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options that name profiles of both sides."""
    folder = tmp_path_factory.mktemp("profiles")
    with torch.no_grad():
        p = mt.profile(*zoo.build("tiny-resnet"), measure="time", repeat=3)
    p.to_json(folder / "edge.json")
    p.to_json(folder / "cloud.json")
    return ["--edge", str(folder / "edge.json"), "--cloud", str(folder / "cloud.json")]


def run(*words: Any) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, words)])


def test_a_table_and_a_chart_are_printed(files: list[str]) -> None:
    result = run("zoo:tiny-resnet", *files, *LINK)
    assert result.exit_code == 0, result.output
    for words in (
        "all on edge",
        "all on cloud, raw input",
        "all on cloud, input by zstd",
        "layer1",
        "█ edge",
        "░ codec, link",
    ):
        assert words in result.output
    assert "* all on edge" in result.output
    assert "best cut by bandwidth: all on edge at any bandwidth" in result.output


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_line_of_table_or_chart_is_wider_than_the_terminal(
    files: list[str], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run(
        "zoo:tiny-resnet", *files, *LINK, "--codec", "raw", "--codec", "fp16+zstd"
    ).stdout.splitlines()  # notes of a busy machine go to stderr
    assert max(map(len, lines)) <= columns
    bars = [line for line in lines if "█" in line or "░" in line][1:]
    assert bars
    assert all(line[:2] in ("  ", "* ") and line[2] != " " for line in bars)


def test_json_csv_and_markdown_go_to_files_or_to_the_terminal(files: list[str], tmp_path: Path) -> None:
    names = tmp_path / "p.json", tmp_path / "p.csv", tmp_path / "p.md"
    result = run("zoo:tiny-resnet", *files, *LINK, "--json", names[0], "--csv", names[1], "--md", names[2])
    assert result.exit_code == 0, result.output
    plan = mt.load(names[0])
    assert isinstance(plan, mt.Plan)
    assert plan.winner.name in result.output
    rows = list(csv.DictReader(io.StringIO(names[1].read_text())))
    assert [row["name"] for row in rows] == [candidate.name for candidate in plan]
    assert float(rows[0]["latency_s"]) == plan.winner.latency_s
    assert f"**{plan.winner.name}**" in names[2].read_text()
    alone = run("zoo:tiny-resnet", *files, *LINK, "--json", "-")
    assert json.loads(alone.stdout)["kind"] == "plan"


def test_objectives_limits_and_codecs(files: list[str]) -> None:
    words = ["--objective", "throughput", "--limit", "edge=1KB", "--codec", "raw", "--codec", "fp16", "--jitter", "2ms"]
    result = run("zoo:tiny-resnet", *files, *LINK, *words, "--json", "-")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["objective"] == "throughput"
    assert data["limits"] == {"edge": 1000}
    assert {codec for candidate in data["candidates"] for codec in candidate["codecs"]} == {"raw", "fp16"}
    assert data["candidates"][data["chosen"]]["name"].startswith("all on cloud")
    shown = run("zoo:tiny-resnet", *files, *LINK, *words).output
    assert "candidates are refused; " in shown
    assert "jitter of the links adds up to" in shown


def test_codecs_may_be_joined_by_commas(files: list[str]) -> None:
    result = run("zoo:tiny-resnet", *files, *LINK, "--codec", "raw, fp16", "--codec", "zstd,", "--json", "-")
    assert result.exit_code == 0, result.output
    codecs = {codec for one in json.loads(result.stdout)["candidates"] for codec in one["codecs"]}
    assert codecs == {"raw", "fp16", "zstd"}


def test_top_limits_every_output(files: list[str], tmp_path: Path) -> None:
    names = tmp_path / "p.json", tmp_path / "p.csv", tmp_path / "p.md"
    words = ["--json", names[0], "--csv", names[1], "--md", names[2]]
    result = run("zoo:tiny-resnet", *files, *LINK, "--top", 2, *words)
    assert result.exit_code == 0, result.output
    assert sum("│" in line for line in result.output.splitlines()) == 2
    data = json.loads(names[0].read_text())
    assert (data["kind"], data["of"], len(data["rows"])) == ("rows", "plan", 2)
    assert len(list(csv.DictReader(io.StringIO(names[1].read_text())))) == 2
    assert sum(line.startswith("| ") for line in names[2].read_text().splitlines()) == 2 + 2
    with pytest.raises(
        mt.MicrotomeError, match="has selected rows of a 'plan', not the whole result: write it without"
    ):
        mt.load(names[0])


def test_a_side_can_be_slower_than_its_profile(files: list[str]) -> None:
    words = [*files, *LINK, "--slower", "edge=1000"]
    result = run("zoo:tiny-resnet", *words, "--slower", "cloud=0.5", "--json", "-")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["candidates"][data["chosen"]]["name"].startswith("all on cloud")
    assert data["notes"][:2] == ["edge: measured times multiplied by 1000", "cloud: measured times multiplied by 0.5"]
    assert (
        "expected a factor, such as cloud=10, got 'x'" in run("zoo:tiny-resnet", *words, "--slower", "cloud=x").output
    )


def test_codecs_are_measured_on_the_run_and_can_be_taken_from_files(files: list[str], tmp_path: Path) -> None:
    file = tmp_path / "codecs.json"
    result = run("zoo:tiny-resnet", *files, *LINK, "--measure-codecs", file)
    assert result.exit_code == 0, result.output
    assert "what a run of the model gave" in result.output
    assert "zstd" in str(mt.load(file))
    again = run("zoo:tiny-resnet", *files, *LINK, "--codec-costs", f"edge={file}", "--codec-costs", f"cloud={file}")
    assert again.exit_code == 0, again.output
    assert "codecs: measured on each device" in again.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bandwidth", "fast"], "expected a bandwidth, such as 20Mbps (bits) or 2.5MB/s (bytes), got 'fast'"),
        (["--rtt", "soon"], "expected a time, such as 15ms or 0.2s, got 'soon'"),
        (["--limit", "moon=1GB"], "expected edge=VALUE or cloud=VALUE, got 'moon=1GB'"),
        (["--limit", "edge=1GB", "--limit", "edge=2GB"], "edge is set twice"),
        (["--limit", "edge=1", "--limit", "cloud=1"], "no placement of the model is within the limits"),
        (["--objective", "speed"], "'speed' is not one of"),
        (["--objective", "energy"], "with --energy of `microtome profile`, or estimate it with --energy-model of"),
        (["--codec", "zip"], "no codec 'zip'"),
        (["--edge", "/no/such.json"], "cannot read '/no/such.json': No such file"),
        (["--codec-costs", "edge=/no/such.json"], "cannot read '/no/such.json'"),
        (["--codec-costs", "edge=a", "--measure-codecs", "b"], "choose one of --codec-costs and --measure-codecs"),
        (["--json", "a", "--csv", "a"], "--json and --csv both write to 'a'"),
        (["--input", "3x3x32x32"], "expected inputs of 3x3x32x32"),
    ],
)
def test_what_is_wrong_is_said_in_short(files: list[str], words: list[str], message: str) -> None:
    defaults = [*files, *LINK]
    names = [name for name in defaults[::2] if name not in words]
    others = [word for name in names for word in (name, defaults[defaults.index(name) + 1])]
    result = run("zoo:tiny-resnet", *others, *words)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_profiles_of_another_model_or_without_times_are_refused(files: list[str], tmp_path: Path) -> None:
    assert "the cuts are of a ViT" in run("zoo:tiny-vit", *files, *LINK).output
    mt.profile(*zoo.build("tiny-resnet")).to_json(tmp_path / "p.json")
    static = run("zoo:tiny-resnet", *files[:2], *LINK, "--cloud", tmp_path / "p.json")
    assert static.exit_code == 2
    assert "the profile of 'cloud' has no times" in static.output
    assert "Missing option '--cloud'" in run("zoo:tiny-vit", "--edge", tmp_path / "p.json", *LINK).output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile with a backward."""
    file = tmp_path_factory.mktemp("profiles") / "gpu.json"
    mt.profile(*zoo.build("tiny-resnet"), measure="time", backward=True, repeat=3).to_json(file)
    return file


def test_training_is_planned_over_a_chain_of_devices(trained: Path, tmp_path: Path) -> None:
    chain = [word for name in ("a", "b", "c") for word in ("--profile", f"{name}={trained}")]
    words = ["--objective", "training", "--micro-batches", 8, "--schedule", "gpipe", "--optimizer-state", 0]
    file = tmp_path / "plan.json"
    result = run(*words, "zoo:tiny-resnet", *chain, "--bandwidth", "10Gbps", "--limit", "a=1GB", "--json", file)
    assert result.exit_code == 0, result.output
    assert "training on 8 micro-batches of x 2x3x32x32, gpipe" in result.output
    plan = mt.load(file)
    assert (plan.micro_batches, plan.schedule, list(plan.devices)) == (8, "gpipe", ["a", "b", "c"])
    assert plan.limits == {"a": 10**9}
    assert all(stage.optimizer_bytes == 0 for stage in plan.winner.training.stages)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--objective", "training"], "a plan of training needs micro-batches, such as --micro-batches 8, got None"),
        (["--micro-batches", "2"], "--micro-batches is of training: expected --objective training, got 'latency'"),
        (["--schedule", "1f1b"], "--schedule is of training: expected --objective training, got 'latency'"),
        (["--optimizer-state", "0"], "--optimizer-state is of training: expected --objective training, got 'latency'"),
        (["--profile", "a"], "expected NAME=F, got 'a'"),
        (["--profile", "a=F", "--profile", "a=F"], "a is set twice"),
        (["--profile", "a=F", "--limit", "b=1GB"], "expected a=VALUE, got 'b=1GB'"),
        (["--profile", "a=F"], "choose --profile, or --edge and --cloud"),
        (["--schedule", "zero-bubble"], "'zero-bubble' is not one of"),
    ],
)
def test_wrong_options_of_chains_and_training_are_refused(files: list[str], words: list[str], message: str) -> None:
    result = run("zoo:tiny-resnet", *files, *LINK, *words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
