"""`microtome top`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from microtome.cli import main


def run(*words: Any) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


def test_the_costliest_are_printed_by_each_metric() -> None:
    result = run("top", "zoo:tiny-resnet", "-n", 3)
    assert result.exit_code == 0, result.output
    assert [line for line in result.output.splitlines() if line.startswith("by ")] == [
        "by params",
        "by MACs",
        "by peak memory",
    ]


def test_json_goes_to_a_file_or_to_the_terminal(tmp_path: Path) -> None:
    assert json.loads(run("top", "zoo:tiny-resnet", "--json", "-").stdout)["kind"] == "top"
    assert run("top", "zoo:tiny-resnet", "--json", tmp_path / "top.json").exit_code == 0
    assert len(json.loads((tmp_path / "top.json").read_text())["top"]["macs"]["layers"]) == 10


def test_a_wrong_word_is_told_with_exit_code_2() -> None:
    assert run("top", "zoo:tiny-resnet", "-n", 0).exit_code == 2
    result = run("top", "zoo:tiny-resnet", "--device", "nowhere")
    assert result.exit_code == 2
    assert "--device nowhere" in result.output
