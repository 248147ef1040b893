"""The command line, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from microtome import __version__, zoo
from microtome.cli import main
from microtome.cli.progress import print_warnings


def microtome(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.mark.parametrize("name", zoo.names())
def test_track_shows_every_call_of_every_built_in_model(name: str) -> None:
    done = microtome("track", f"zoo:{name}")
    assert done.exit_code == 0
    model, _ = zoo.build(name)
    assert "(root)" in done.output
    assert type(model).__name__ in done.output


def test_track_explains_calls_without_a_backward(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    example_inputs = '1x2'\n"
        "    def __init__(self): super().__init__(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))\n"
        "    def forward(self, x): return self[1](self[0](x).detach())\n"
    )
    note = (
        ": it did not, as the call runs no operator that autograd records (nn.Identity), its output needs no gradient"
    )
    assert note in " ".join(microtome("track", f"{tmp_path}/net.py:Net").output.split())
    assert note not in " ".join(microtome("track", "zoo:tiny-lstm").output.split())


def test_track_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert microtome("track", "zoo:tiny-lstm", "--json", str(file)).exit_code == 0
    rows = json.loads(file.read_text())
    assert [(row["address"], row["forward"], row["backward"]) for row in rows] == [
        *(("", 1, 1), ("embedding", 2, 4), ("lstm", 3, 3), ("fc", 4, 2)),
    ]
    assert rows == json.loads(microtome("track", "zoo:tiny-lstm", "--json", "-").output)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["track", "zoo:tiny-resnest"], "Error: the zoo has no model 'tiny-resnest'. Did you mean 'tiny-resnet'?"),
        (["track", "tiny-vit"], "such as 'zoo:tiny-vit'"),
        (["track"], "Missing argument 'MODEL'"),
        (["trak"], "No such command 'trak'"),
        (["track", "zoo:tiny-vit", "--json", "/nowhere/at/all.json"], "No such file or directory"),
    ],
)
def test_a_wrong_word_is_one_clear_message_and_exit_code_2(words: list[str], message: str) -> None:
    done = microtome(*words)
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit)
    assert message in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("words", [["doctor"], ["track", "zoo:tiny-vit"], ["models"], ["top", "zoo:tiny-vit"]])
def test_a_file_that_cannot_be_written_is_an_error_before_the_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("the command ran")

    monkeypatch.setattr("microtome.devices.machine.checkup", fail)
    monkeypatch.setattr("microtome.zoo.listing", fail)
    monkeypatch.setattr("microtome.cli.options.model.ModelOptions.resolve", fail)
    done = microtome(*words, "--json", str(tmp_path / "none" / "x.json"))
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit)
    assert "x.json': No such file or directory" in done.output
    assert "Is a directory" in microtome(*words, "--json", str(tmp_path)).output


def test_the_help_lists_commands_with_whole_sentences() -> None:
    text = CliRunner().invoke(main, ["--help"]).output.partition("Commands:")[2]
    assert "..." not in text
    assert "Measure the latency of each cut, and of no cut, with a server; compare the best" in " ".join(text.split())


def test_version() -> None:
    assert microtome("--version").output.strip() == f"microtome, version {__version__}"


@pytest.mark.integration
def test_a_reader_that_ends_early_is_no_error() -> None:
    command = [sys.executable, "-m", "microtome", "track", "zoo:tiny-vit", "--json", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_a_warning_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with print_warnings():
        for text in ("one", "one", "two", "one"):
            warnings.showwarning(text, UserWarning, __file__, 1)
    assert capsys.readouterr().err == "Warning: one\nWarning: two\n"
