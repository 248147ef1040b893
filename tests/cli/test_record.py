"""`microtome record`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.cli import main


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["record", *words])


@pytest.fixture(name="data")
def make_data(tmp_path: Path) -> Path:
    file = tmp_path / "x.npy"
    np.save(file, np.random.default_rng(0).standard_normal((7, 3, 32, 32)))
    return file


def test_layers_are_written_for_all_samples(data: Path, tmp_path: Path) -> None:
    result = run(
        "zoo:tiny-resnet", "layer1", "layer2", "--data", str(data), "--to", str(tmp_path / "a"), "--batch", "3"
    )
    assert result.exit_code == 0, result.output
    assert "6 records of 2 layers in 3 runs" in result.output
    found = mt.load(tmp_path / "a")
    assert found["layer1"].shapes == [(3, 8, 32, 32), (3, 8, 32, 32), (1, 8, 32, 32)]
    model, _ = zoo.build("tiny-resnet")
    x = torch.from_numpy(np.load(data)).float()
    assert torch.allclose(found["layer1"].cat(), mt.extract(model.eval(), x, "layer1")["layer1"], atol=1e-5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("ended", [0, 2])
def test_a_recording_that_ends_early_has_whole_runs_and_says_how_to_go_on(
    error: type[BaseException], ended: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, runs = nn.AdaptiveAvgPool2d.forward, iter(range(9))  # a module after the recorded ones

    def interrupt(module: nn.AdaptiveAvgPool2d, x: torch.Tensor) -> torch.Tensor:
        if next(runs) == ended:
            raise error
        return forward(module, x)

    monkeypatch.setattr(nn.AdaptiveAvgPool2d, "forward", interrupt)
    line = ["zoo:tiny-resnet", "layer1", "fc", "--data", str(data), "--to", str(tmp_path / "a"), "--batch", "3"]
    result = run(*line)
    assert result.exit_code == (130 if error is KeyboardInterrupt else 2)
    lines = result.stderr.splitlines()
    notes = [one for one in lines if one.startswith("Note: ")]
    assert lines[len(notes)].startswith("Interrupted" if error is KeyboardInterrupt else "Error: zoo:tiny-resnet does")
    if ended:
        kept = f"Note: 2 runs of the model ended: the first 6 of 7 samples are in {tmp_path / 'a'}. To continue, pass"
        assert notes == [f"{kept} the others as --data, with --append"]
        assert run(*line, "--append").exit_code == 0
        recording = mt.load(tmp_path / "a")
        assert recording["layer1"].runs == recording["fc"].runs
        assert len(recording["fc"]) == ended + 3
    else:
        assert notes == ["Note: no run of the model ended: nothing was recorded"] * (error is KeyboardInterrupt)
        assert not (tmp_path / "a").exists()


def test_records_above_the_limit_are_not_reported_as_written(data: Path, tmp_path: Path) -> None:
    to = str(tmp_path / "a")
    # A record of 3 x 8 x 32 x 32 floats has 98,304 bytes, and the last, of one sample, 32,768.
    words = ("zoo:tiny-resnet", "layer1", "--data", str(data), "--to", to, "--batch", "3")
    refused = run(*words, "--limit", "1KB")
    assert refused.exit_code == 2
    assert "a tensor of 'layer1' has 96.0 KiB, above the limit of 1,000 B for all" in refused.stderr
    result = run(*words, "--limit", "100KB")
    assert result.exit_code == 0, result.output
    note = "1 of 3 records were written: the others, above --limit 100KB, are in the statistics"
    assert result.stderr == f"Note: {note}\n"  # and no empty line of the progress bar
    assert len(mt.load(to)["layer1"]) == 1
    assert result.stdout.startswith("1 of 3 records of 1 layer in 3 runs")


def test_records_that_an_earlier_run_dropped_are_not_counted_again(data: Path, tmp_path: Path) -> None:
    line = ["zoo:tiny-resnet", "layer1", "--data", str(data), "--to", str(tmp_path / "a"), "--batch", "3"]
    assert "above --limit 100KB" in run(*line, "--limit", "100KB").stderr
    appended = run(*line, "--append", "--keep", "stats")
    assert (appended.exit_code, appended.stderr) == (0, "")
    assert mt.load(tmp_path / "a").stats("layer1").count == 2 * 7 * 8 * 32 * 32


def test_a_recording_that_reached_its_limit_names_the_option_that_continues_it(data: Path, tmp_path: Path) -> None:
    line = ["zoo:tiny-resnet", "layer1", "--data", str(data), "--to", str(tmp_path / "a"), "--batch", "3"]
    assert run(*line, "--limit", "100KB").exit_code == 0
    refused = run(*line, "--append")
    assert refused.exit_code != 0
    assert "or continue with statistics only: --keep stats" in " ".join(refused.stderr.split())


def test_records_that_do_not_fit_beside_those_of_before_are_not_called_too_large(data: Path, tmp_path: Path) -> None:
    line = ["zoo:tiny-resnet", "layer1", "--data", str(data), "--to", str(tmp_path / "a"), "--batch", "3"]
    assert run(*line).exit_code == 0
    why = "the first, with those of before, exceeds --limit 300KB"
    note = f"Note: none of the records was written, only their statistics: {why}\n"
    assert run(*line, "--append", "--limit", "300KB").stderr == note


def test_a_folder_of_arrays_and_of_images(tmp_path: Path) -> None:
    from PIL import Image

    arrays, images = tmp_path / "arrays", tmp_path / "images"
    arrays.mkdir()
    images.mkdir()
    for at in range(3):
        np.save(arrays / f"{at}.npy", np.full((3, 32, 32), at, dtype=np.float32))
        Image.new("RGB", (40, 50), (255, 0, 0)).save(images / f"{at}.png")
    for folder in (arrays, images):
        result = run("zoo:tiny-resnet", "fc", "--data", str(folder), "--to", str(tmp_path / f"{folder.name}.out"))
        assert result.exit_code == 0, result.output
        assert mt.load(tmp_path / f"{folder.name}.out")["fc"].shapes == [(3, 10)]
        note = "Note: images are resized to 32x32, with values from 0 to 1, not normalized"
        assert (note in result.stderr) == (folder == images)


@pytest.mark.parametrize(("name", "is_random"), [("timm:test_vit", True), ("zoo:tiny-resnet", False)])
def test_random_weights_are_noted_unless_a_file_has_others(name: str, is_random: bool, tmp_path: Path) -> None:
    resolved = zoo.resolve(name)
    np.save(tmp_path / "x.npy", resolved.inputs.args[0].numpy())
    torch.save(resolved.model.state_dict(), tmp_path / "w.pt")
    words = [name, first_linear(resolved.model), "--data", str(tmp_path / "x.npy"), "--to"]
    note = f"Note: the weights of {name} are random: load trained ones with --weights FILE\n"
    assert run(*words, str(tmp_path / "a")).stderr.count(note) == is_random
    assert note not in run(*words, str(tmp_path / "b"), "--weights", str(tmp_path / "w.pt")).stderr


def first_linear(model: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if isinstance(module, nn.Linear))


def test_statistics_alone_and_a_reduction(data: Path, tmp_path: Path) -> None:
    result = run(
        "zoo:tiny-resnet",
        "layer1",
        "--data",
        str(data),
        "--to",
        str(tmp_path / "a"),
        "--keep",
        "stats",
        "--reduce",
        "mean",
    )
    assert result.exit_code == 0, result.output
    assert "outputs, only their statistics kept, in" in result.output
    assert mt.load(tmp_path / "a").stats("layer1").count == 7 * 8


def test_an_image_with_too_many_pixels_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    Image.new("RGB", (40, 50)).save(tmp_path / "a.png")
    monkeypatch.setattr("microtome.cli.samples._MAX_PIXELS", 1999)
    result = run("zoo:tiny-resnet", "fc", "--data", str(tmp_path), "--to", str(tmp_path / "to"))
    assert result.exit_code == 2
    assert f"Error: expected at most 1999 pixels in the image '{tmp_path}/a.png', got 40 x 50\n" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zoo:tiny-resnet", "layer9", "--data", "{data}", "--to", "{to}"], "no module matches the path 'layer9'"),
        (
            ["zoo:tiny-resnet", "fc", "--data", "/no/such.npy", "--to", "{to}"],
            "Error: cannot read '/no/such.npy': No such file",
        ),
        (["zoo:tiny-resnet", "fc", "--data", "{empty}", "--to", "{to}"], "expected .npy files or images"),
        (
            ["zoo:tiny-resnet", "fc", "--data", "{data}", "--to", "{to}", "--reduce", "median"],
            "Invalid value for '--reduce': 'median' is not one of 'mean', 'max', 'cls', 'last'",
        ),
        (["zoo:tiny-resnet", "fc", "--data", "{data}", "--to", "{to}", "--limit", "x"], "got 'x'"),
        (["zoo:tiny-resnet", "fc", "--data", "{words}", "--to", "{to}"], "expected floats, integers or booleans"),
        (["zoo:tiny-resnet", "--data", "{data}", "--to", "{to}"], "Missing argument 'SELECT...'"),
        (["zoo:tiny-resnet", "fc", "--data", "{flat}", "--to", "{to}"], "does not run on (4, 5)"),
        (
            ["zoo:tiny-resnet", "layer1", "--data", "{data}", "--to", "{to}", "--reduce", "cls"],
            "--reduce cls expected an output of shape (batch, tokens, channels), got (7, 8, 32, 32): "
            "take another, or Python",
        ),
        (
            ["zoo:tiny-resnet", "fc", "--data", "{data}", "--to", "{to}", "--device", "meta"],
            "--device meta: expected a device that computes values",
        ),
        (["zoo:tiny-vit", "blocks", "--data", "{data}", "--to", "{to}"], "'blocks' never ran: a ModuleList"),
    ],
)
def test_what_is_wrong_is_said_in_short(words: list[str], message: str, data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "flat.npy", np.zeros((4, 5), dtype=np.float32))
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    places = {
        "words": tmp_path / "words.npy",
        "data": data,
        "to": tmp_path / "a",
        "empty": tmp_path / "empty",
        "flat": tmp_path / "flat.npy",
    }
    result = run(*(word.format(**places) for word in words))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_folder_that_holds_a_recording_needs_append(data: Path, tmp_path: Path) -> None:
    words = ["zoo:tiny-resnet", "fc", "--data", str(data), "--to", str(tmp_path / "a")]
    result = run(*words)
    assert "1 record of 1 layer in 1 run, " in result.output
    again = run(*words)
    assert again.exit_code == 2
    assert "already holds a recording of 1 records; --append continues it" in again.output
    assert run(*words, "--append").exit_code == 0
    assert len(mt.load(tmp_path / "a")["fc"]) == 2
