"""`microtome cuts` and `microtome split`."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import microtome as mt
from microtome import zoo
from microtome.cli import main


def run(*words: Any) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


def test_a_table_is_printed() -> None:
    result = run("cuts", "zoo:tiny-resnet", "--input", "1x3x64x64")
    assert result.exit_code == 0, result.output
    assert "zoo:tiny-resnet on x 1x3x64x64: 42 cuts" in result.output
    assert "* layer2.0.relu#1" in result.output


def test_depth_all_and_best_choose_what_is_shown() -> None:
    shallow = run("cuts", "zoo:tiny-resnet", "--depth", 1).output
    assert "shown: 5 of 42 cuts, those to depth 1" in shallow
    assert "layer1.0" not in shallow
    assert "layer1.0.conv1" in run("cuts", "zoo:tiny-resnet", "--all").output
    best = run("cuts", "zoo:tiny-decoder", "--best", "bytes").output
    assert best.startswith("zoo:tiny-decoder cut at tokens (Embedding): 3.00 KiB cross; the input has 192 B")


def test_markdown_has_the_details_of_the_best_cut() -> None:
    result = run("cuts", "zoo:tiny-decoder", "--best", "bytes", "--md", "-")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("**zoo:tiny-decoder cut at tokens (Embedding): 3.00 KiB cross; the input has 192 B")
    assert "| `tokens` | 2x12x32 | float32 | 3.00 KiB |" in result.stdout
    assert "- head: " in result.stdout


def test_json_csv_and_markdown_go_to_files_or_to_the_terminal(tmp_path: Path) -> None:
    names = tmp_path / "c.json", tmp_path / "c.csv", tmp_path / "c.md"
    result = run("cuts", "zoo:tiny-vit", "--depth", 1, "--json", names[0], "--csv", names[1], "--md", names[2])
    assert result.exit_code == 0, result.output
    found = mt.load(names[0])
    assert found == replace(mt.cuts(*zoo.build("tiny-vit")), name="zoo:tiny-vit")
    rows = list(csv.DictReader(io.StringIO(names[1].read_text())))
    assert [row["at"] for row in rows] == [cut.at for cut in found]
    assert "| **`patch_embed`** |" in names[2].read_text()
    assert f"written: {names[0]} (" in result.stderr
    assert json.loads(run("cuts", "zoo:tiny-vit", "--json", "-").stdout)["kind"] == "cuts"


def test_a_model_can_be_cut_without_its_weights() -> None:
    result = run("cuts", "zoo:tiny-unet", "--meta", "--best", "tail_params")
    assert result.exit_code == 0, result.output
    assert "tail: 0 MACs, 0 parameters (0 B)" in result.output


def test_stages_are_verified_and_written(tmp_path: Path) -> None:
    result = run("split", "zoo:tiny-unet", "--at", "middle", "--at", "down.1", "--to", tmp_path / "parts")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "zoo:tiny-unet cut at down.1, middle: bit-equal, on x 2x3x32x32"
    assert "96.0 KiB cross at down.1" in lines[2]
    assert lines[-1].endswith("from middle to the output")

    model, x = zoo.build("tiny-unet")
    value: Any = x
    with torch.no_grad():
        for index in range(3):
            value = mt.load_stage(lambda: zoo.build("tiny-unet")[0], tmp_path / "parts", index)(value)
        assert torch.equal(value, model(x))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cuts", "zoo:tiny-vit", "--all", "--depth", 2], "choose one of --depth, --all and --best"),
        (["cuts", "zoo:tiny-vit", "--best", "speed"], "'speed' is not one of"),
        (["cuts", "zoo:tiny-vit", "--depth", 0], "0 is not in the range"),
        (["cuts", "zoo:tiny-vit", "--json", "a", "--csv", "a"], "--json and --csv both write to 'a'"),
        (["cuts", "zoo:tiny-vit", "--input", "1x4x32x32"], "to have 3 channels, but got 4"),
        (["cuts", "torch.nn:Identity", "--input", "1x3", "--best", "bytes"], "has no cut whose bytes are known"),
        (["split", "zoo:tiny-vit", "--to", "a"], "Missing option '--at'"),
        (["split", "zoo:tiny-vit", "--at", "head"], "Missing option '--to'"),
        (["split", "zoo:tiny-vit", "--to", "a", "--at", "hed"], "no module at path 'hed'"),
        (
            ["split", "zoo:tiny-unet", "--to", "a", "--at", "pool"],
            "'pool' ran 2 times: say which of 'pool#0', 'pool#1'",
        ),
        (["split", "zoo:tiny-vit", "--to", "a", "--at", "auto"], "microtome plan finds the best cut"),
    ],
)
def test_what_is_wrong_is_said_in_short(
    words: list[Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())
