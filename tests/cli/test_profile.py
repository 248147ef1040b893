"""`microtome profile`."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import save_file

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.units import size


def run(*words: Any) -> Result:
    return CliRunner().invoke(main, ["profile", *map(str, words)])


def test_a_table_is_printed() -> None:
    result = run("zoo:tiny-resnet", "--depth", 1)
    assert result.exit_code == 0
    assert "layer1" in result.output
    assert "layer1.0" not in result.output
    assert "9,355,584 MACs" in result.output


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["--granularity", 2], "stem"),
        (["--by", "type"], "Conv2d"),
        (["--by", "op"], "aten.convolution.default"),
        (["--sort", "macs", "--top", 1], "layer1.0.conv1"),
    ],
)
def test_views(words: list[Any], first: str) -> None:
    result = run("zoo:tiny-resnet", *words)
    assert result.exit_code == 0, result.output
    assert next(line for line in result.output.splitlines() if "│" in line).startswith(first)


def test_json_csv_and_markdown_go_to_files_or_to_the_terminal(tmp_path: Path) -> None:
    files = tmp_path / "p.json", tmp_path / "p.csv", tmp_path / "p.md"
    result = run("zoo:tiny-vit", "--json", files[0], "--csv", files[1], "--md", files[2], "--backward")
    assert result.exit_code == 0
    assert "total" in result.stdout
    told = ", ".join(f"{file} ({size(file.stat().st_size)})" for file in files)
    assert result.stderr.endswith(f"written: {told}\n")
    expected = mt.profile(*zoo.build("tiny-vit"), backward=True)
    assert mt.load(files[0]) == replace(expected, name="zoo:tiny-vit")
    assert next(csv.DictReader(io.StringIO(files[1].read_text())))["type"] == "ViT"
    assert files[2].read_text().startswith("**zoo:tiny-vit on x 2x3x32x32**")
    alone = run("zoo:tiny-vit", "--json", "-")
    assert json.loads(alone.stdout)["model"] == "ViT"
    assert "written" not in alone.stderr


def test_json_has_the_selected_rows_as_csv_has(tmp_path: Path) -> None:
    words = ["--sort", "macs", "--top", 2, "--columns", "type,macs"]
    result = run("zoo:tiny-resnet", *words, "--json", tmp_path / "p.json", "--csv", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "p.json").read_text())
    assert (data["kind"], data["of"], data["name"]) == ("rows", "profile", "zoo:tiny-resnet")
    best = mt.profile(*zoo.build("tiny-resnet")).top(2, by="macs")
    assert data["rows"] == [{"address": row.address, "type": row.type, "macs": row.macs} for row in best]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "p.csv").read_text())))
    assert [row["address"] for row in rows] == [row["address"] for row in data["rows"]]
    by_type = json.loads(run("zoo:tiny-resnet", "--by", "type", "--json", "-").stdout)["rows"]
    assert by_type[0]["name"] == "Conv2d"
    with pytest.raises(mt.MicrotomeError, match="selected rows of a 'profile', not the whole result: write it without"):
        mt.load(tmp_path / "p.json")


def test_a_named_column_that_was_not_measured_says_how_to_measure_it() -> None:
    assert "time: not measured: add --time" in run("zoo:tiny-resnet", "--columns", "params,time,time_share").output
    assert "add --time" not in run("zoo:tiny-resnet", "--columns", "params").output


def test_convention_columns_training_and_meta() -> None:
    assert (
        "MACs; 9,355,584 FLOPs (torchvision convention)" in run("zoo:tiny-resnet", "--convention", "torchvision").output
    )
    assert "MAdds" in run("zoo:tiny-resnet", "--columns", "madds, params").output
    assert "MAdds" in run("zoo:tiny-resnet", "--columns", "call,MAdds M,").output
    assert "19,866,270 FLOPs" in run("zoo:tiny-resnet", "--train").output
    huge = run("torch.nn:Linear", "--meta", "--arg", "in_features=1000000", "--arg", "out_features=1000000", "--input", "8x1000000")  # fmt: skip  # noqa: E501
    assert "1,000,001,000,000 parameters" in huge.output


def test_energy_is_estimated_without_data() -> None:
    result = run("zoo:tiny-vit", "--meta", "--energy-model", "flop=1e-12")
    assert result.exit_code == 0, result.output
    assert "energy" in result.output


def test_weights_are_loaded(tmp_path: Path) -> None:
    model, _ = zoo.build("tiny-vit", seed=3)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    assert run("zoo:tiny-vit", "--weights", tmp_path / "w.safetensors").exit_code == 0
    wrong = run("zoo:tiny-resnet", "--weights", tmp_path / "w.safetensors")
    assert wrong.exit_code == 2
    assert "Error:" in wrong.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zoo:tiny-rasnet"], "tiny-resnet"),
        (["zoo:tiny-resnet", "--input", "2x4x32x32"], "in the call 'stem.0' (Conv2d)\n  no layer ran before"),
        (["zoo:tiny-vit", "--input", "1y3"], "cannot read '1y3'"),
        (["zoo:tiny-vit", "--columns", "speed"], "no column 'speed'"),
        (["zoo:tiny-vit", "--sort", "speed"], "no column 'speed'"),
        (["zoo:tiny-vit", "--sort", "time"], "no row has a value of 'time' to sort by: add --time"),
        (["zoo:tiny-vit", "--depth", "1", "--by", "op"], "choose one of --depth, --granularity and --by"),
        (["zoo:tiny-vit", "--granularity", "0"], "0 is not in the range"),
        (["zoo:tiny-vit", "--convention", "thop"], "'thop' is not one of"),
        (["zoo:tiny-vit", "--device", "nowhere"], "--device nowhere: expected a device of this machine, cpu"),
        (["zoo:tiny-vit", "--device", "cuda:99", "--time"], "--device cuda:99: "),
        (["zoo:tiny-vit", "--time", "--repeat", "0"], "0 is not in the range"),
        (["zoo:tiny-vit", "--time", "--budget", "0"], "0 is not in the range"),
        (["zoo:tiny-vit", "--energy", "--meter", "crystal"], "expected a meter of nvml"),
        (["zoo:tiny-vit", "--energy-model", "flop"], "watts=W, got 'flop'"),
        (["zoo:tiny-vit", "--repeat", "50"], "--repeat needs something to measure: add --time"),
        (
            ["zoo:tiny-vit", "--warmup", "5", "--memory"],
            "--warmup is of repeated passes, and --memory measures one: add --time",
        ),
        (["zoo:tiny-vit", "--budget", "1"], "--budget needs something to measure: add --time"),
        (["zoo:tiny-vit", "--device-time", "graph", "--load"], "--device-time needs something to measure: add --time"),
        (["zoo:tiny-vit", "--energy-method", "replay", "--time"], "--energy-method needs energy to distribute: add"),
        (
            ["zoo:tiny-vit", "--energy-method", "share", "--energy-model", "flop=1e-12"],
            "--energy-method is of measured energy: leave out --energy-model",
        ),
        (["zoo:tiny-vit", "--meter", "nvml", "--time"], "--meter needs something to measure: add --energy"),
        (
            ["zoo:tiny-vit", "--meter", "nvml", "--energy-model", "flop=1e-12"],
            "--meter needs something to measure: leave out --energy-model",
        ),
        (["zoo:tiny-vit", "--energy", "--meter", "csv:/no/file"], "/no/file does not exist"),
        (["zoo:tiny-vit", "--device", "cpu", "--meta"], "choose one of --meta and --device"),
        (
            ["zoo:tiny-vit", "--time", "--load", "--meta"],
            "--meta builds a model without data, which cannot run for --time, --load: leave out --meta",
        ),
        (["zoo:tiny-vit", "--json", "a", "--csv", "a"], "--json and --csv both write to 'a'"),
        (["zoo:tiny-vit", "--json", ""], "--json: expected the name of a file, or - for stdout"),
        (
            ["zoo:tiny-vit", "--by", "type", "--columns", "dtype"],
            "of types: expected one of runs",
        ),
        (
            ["zoo:tiny-vit", "--by", "op", "--sort", "params"],
            "no column 'params' of operators to sort by: expected one of runs",
        ),
        (["zoo:tiny-vit", "--input", "1,3,32,32"], "did you mean '1x3x32x32'?"),
        (
            ["zoo:tiny-vit", "--json", "/does/not/exist/p.json"],
            "Error: cannot write '/does/not/exist/p.json': No such file or directory",
        ),
        (["zoo:tiny-vit", "--html", "/"], "Error: cannot write '/': Is a directory"),
    ],
)
def test_what_is_wrong_is_said_in_short(words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_layers_that_ran_before_a_failing_one_are_named(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))\n")
    result = run(f"{file}:net", "--input", "1x4")
    assert result.exit_code == 2
    assert "in the call '1' (Linear)\n  layers that ran before: 0" in result.output


def test_strict_fails_on_what_has_no_formula(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return x.cholesky_solve(x)\n"
    )
    assert "no FLOP formula for" in run(f"{file}:Net", "--input", "3x3").output
    strict = run(f"{file}:Net", "--input", "3x3", "--strict")
    assert strict.exit_code == 2
    assert "register one with microtome.register_formula" in strict.output


def test_all_that_can_be_measured_is_in_the_table_and_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    wanted = ["--time", "--memory", "--load", "--energy-model", "flop=1e-12,byte=2e-11", "--repeat", "3"]
    result = run("zoo:tiny-resnet", *wanted, "--depth", "1", "--json", str(file))
    assert result.exit_code == 0
    p = mt.load(file)
    assert isinstance(p, mt.Profile)
    assert p["layer1"].time_s is not None
    assert p["layer1"].measured_peak_bytes is not None
    assert p["layer1"].load is not None
    assert p["layer1"].energy_j is not None
    assert p["layer1.0"].time_s is None
    for header in ("time", "measured peak", "energy", "CPU"):
        assert header in result.output


def test_modules_that_ran_twice_are_one_row() -> None:
    result = run("zoo:tiny-resnet", "--by", "module", "--columns", "runs,flops")
    row = next(line for line in result.output.splitlines() if line.startswith("layer1.0.relu "))
    assert row.split()[2] == "2"


def test_what_was_timed_is_written_for_perfetto_and_speedscope(tmp_path: Path) -> None:
    files = tmp_path / "p.json", tmp_path / "s.json"
    words = ("--time", "--repeat", 3, "--warmup", 1, "--perfetto", files[0], "--speedscope", files[1])
    result = run("zoo:tiny-resnet", *words)
    assert result.exit_code == 0, result.output
    assert json.loads(files[0].read_text())["traceEvents"]
    assert json.loads(files[1].read_text())["profiles"]


def test_perfetto_without_times_is_a_wrong_word() -> None:
    result = run("zoo:tiny-resnet", "--perfetto", "p.json")
    assert result.exit_code == 2
    assert "measure them with --time" in result.output


def test_the_name_of_the_command_line_heads_the_table_and_the_page(tmp_path: Path) -> None:
    result = run("zoo:tiny-decoder", "--html", tmp_path / "page.html", "--json", tmp_path / "p.json")
    assert result.stdout.startswith("zoo:tiny-decoder on input_ids 2x12:int64\n")
    page = (tmp_path / "page.html").read_text()
    assert "<title>zoo:tiny-decoder on input_ids 2x12:int64</title>" in page
    assert "<h1>zoo:tiny-decoder</h1>" in page
    assert mt.load(tmp_path / "p.json").model == "Decoder"


def test_a_profile_without_a_name_is_headed_by_the_class(tmp_path: Path) -> None:
    data = json.loads(mt.profile(*zoo.build("tiny-vit")).to_json())
    del data["name"]  # as an older microtome wrote it
    data["inputs"] = "Inputs(2x3x32x32:float32)"
    (tmp_path / "old.json").write_text(json.dumps(data))
    old, new = mt.load(tmp_path / "old.json"), mt.profile(*zoo.build("tiny-vit"))
    assert old.title == "ViT"
    assert str(old).startswith("ViT on Inputs(2x3x32x32:float32)\n")
    assert not [note for note in old.diff(new).notes if "inputs differ" in note]
    assert [note for note in mt.profile(zoo.build("tiny-vit")[0], "1x3x32x32").diff(new).notes if "differ" in note] == [
        "the inputs differ: x 1x3x32x32 and x 2x3x32x32"
    ]
