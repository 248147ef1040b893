"""`microtome graph`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from click.testing import CliRunner, Result

from microtome.cli import main


def run(*words: Any) -> Result:
    return CliRunner().invoke(main, ["graph", *map(str, words)])


def test_pictures_go_to_files(tmp_path: Path) -> None:
    files = tmp_path / "g.svg", tmp_path / "g.dot"
    result = run("zoo:tiny-resnet", "--svg", files[0], "--dot", files[1], "--depth", 1, "--at", "layer1.0")
    assert result.exit_code == 0, result.output
    assert "cut at layer1.0: 64.0 KiB cross" in "".join(ElementTree.parse(files[0]).getroot().itertext())
    assert files[1].read_text().startswith("digraph")
    assert result.stderr.startswith(f"written: {files[0]} (")
    assert f"{files[1]} (" in result.stderr


def test_a_picture_goes_to_the_terminal() -> None:
    assert run("zoo:tiny-vit", "--dot", "-").stdout.startswith("digraph microtome {")


def test_a_file_of_another_format_is_refused_before_the_model_runs(tmp_path: Path) -> None:
    result = run("zoo:tiny-vit", "--svg", str(tmp_path / "g.PNG"))
    assert result.exit_code == 2
    assert "--svg writes .svg: expected a file such as g.svg" in " ".join(result.output.split())
    assert "--dot writes .dot: expected" in run("zoo:tiny-vit", "--dot", str(tmp_path / "g.svg")).output
    assert not list(tmp_path.iterdir())
    assert run("zoo:tiny-vit", "--svg", str(tmp_path / "g.xml"), "--dot", str(tmp_path / "g.gv")).exit_code == 0


def test_wrong_words_exit_with_2(tmp_path: Path) -> None:
    result = run("zoo:tiny-vit")
    assert result.exit_code == 2
    assert "expected an output: --svg F or --dot F" in result.output
    assert run("zoo:tiny-vit", "--dot", "-", "--at", "nowhere").exit_code == 2
