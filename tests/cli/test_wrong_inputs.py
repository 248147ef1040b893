"""Inputs that a model does not run on: every command names them in one error, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import click
import numpy as np
import pytest
from click.testing import CliRunner

import microtome as mt
from microtome import zoo
from microtome.cli import main
from microtome.remote.server import Server
from microtome.zoo import packages

#: A model, the inputs that it does not run on, and how these are described.
RESNET = "zoo:tiny-resnet", "2x4x32x32", "x 2x4x32x32"
WRITER = "zoo:tiny-writer", "1x2x3x4:int64", "input_ids 1x2x3x4:int64"

#: Why torchvision's operators are missing, as `zoo.packages` explains it.
MISSING = "the compiled operators do not fit"

#: For each command, the other words of its line: one list for each way in which it runs the model.
LINES = {
    "cuts": [""],
    "generate": ["--ids 1,2 --at layers.0", "--ids 1,2 --server {server}", "--ids 1,2 --server {server} --at layers.0"],
    "graph": ["--svg g.svg", "--svg g.svg --at layer1"],
    "plan": [
        "--edge p.json --cloud p.json --bandwidth 2MB/s",
        "--edge p.json --cloud p.json --bandwidth 2MB/s --measure-codecs c.json",
    ],
    "profile": ["", "--meta", "--device cpu", "--backward", "--time --html p.html"],
    "record": ["layer1 --data wrong.npy --to acts"],
    "run": ["--server {server}", "--server {server} --at layer1", "--server {server} --at layer1 --data x.npy"],
    "serve": ["--listen 127.0.0.1:0"],
    "split": ["--at layer1 --to parts"],
    "sweep": ["--server {server}", "--server {server} --cuts layer1"],
    "top": ["", "--time"],
    "track": [""],
}
CASES = [(name, words) for name, lines in LINES.items() for words in lines]


@pytest.fixture(scope="module", name="server")
def make_server() -> Iterator[Server]:
    with mt.serve(*zoo.build("tiny-resnet"), listen="127.0.0.1:0") as server:
        yield server


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    mt.profile(*zoo.build("tiny-resnet")).to_json(tmp_path / "p.json")
    np.save(tmp_path / "x.npy", np.zeros((4, 3, 32, 32), dtype=np.float32))
    np.save(tmp_path / "wrong.npy", np.zeros((2, 4, 32, 32), dtype=np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_that_takes_inputs_is_tested_here() -> None:
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    takes_inputs = {
        name
        for name, command in commands.items()
        if command is not None and any("--input" in parameter.opts for parameter in command.params)
    }
    assert takes_inputs == set(LINES)


@pytest.mark.integration
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("name", "words"), CASES, ids=[" ".join(case).strip() for case in CASES])
def test_inputs_that_the_model_does_not_run_on_are_named(name: str, words: str, server: Server) -> None:
    model, wrong, described = WRITER if name == "generate" else RESNET
    # A recording has the shapes of its data.
    inputs = [] if name == "record" else ["--input", wrong]
    line = [name, model, *inputs, *words.format(server=server.address).split()]
    result = CliRunner().invoke(main, line)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    expected = f"{model} does not run on {'(2, 4, 32, 32)' if name == 'record' else described}: "
    error = result.stderr[result.stderr.index("Error: ") :]
    assert error.startswith(f"Error: {expected}"), result.stderr
    assert ("Pass others with --input" in error) == (name != "record")
    assert len(error.splitlines()) <= 3, error


def test_a_missing_operator_of_torchvision_is_not_blamed_on_the_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "explain_missing_operators", lambda: MISSING)
    code = """
        from torch import nn
        class Detector(nn.Module):
            def forward(self, x):
                raise RuntimeError({!r})
    """
    for message in ("Couldn't load custom C++ ops.", "Could not run 'torchvision::nms' on the CPU", "wrong shape"):
        (tmp_path / "net.py").write_text(dedent(code.format(message)))
        result = CliRunner().invoke(main, ["cuts", f"{tmp_path / 'net.py'}:Detector", "--input", "1x3"])
        assert result.exit_code == 2
        is_missing = message != "wrong shape"
        assert (f"It calls an operator of torchvision: {MISSING}" in result.output) == is_missing
        assert ("Pass others with --input" in result.output) != is_missing


@pytest.mark.parametrize(
    ("code", "is_advised"),
    [
        ("self.lnear(x)", False),
        ("undefined(x)", False),
        ("__import__('no_such_package')", False),
        ("super().forward(x)", False),
        ("type(self)(x).y", True),  # a TypeError
        ("x.foo", True),
        ("x.tolist().foo", True),
        ("x.reshape(7)", True),
    ],
)
def test_other_inputs_are_advised_only_where_they_may_help(code: str, is_advised: bool, tmp_path: Path) -> None:
    text = f"from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return {code}\n"
    (tmp_path / "net.py").write_text(text)
    result = CliRunner().invoke(main, ["profile", f"{tmp_path / 'net.py'}:Net", "--input", "1x3"])
    assert result.exit_code == 2
    assert "does not run on x 1x3: " in result.stderr
    assert ("Pass others with --input" in result.stderr) == is_advised, result.stderr


@pytest.mark.skipif(not packages.is_installed("torchvision"), reason="there is no torchvision")
def test_the_note_on_missing_operators_is_printed_although_the_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from microtome.zoo.sources import torchvision

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such operator: torchvision::nms")

    monkeypatch.setattr(torchvision, "explain_missing_operators", lambda: MISSING)
    monkeypatch.setattr(import_module("microtome.split.cuts.cuts"), "cuts", fail)
    result = CliRunner().invoke(main, ["cuts", "torchvision:ssdlite320_mobilenet_v3_large"])
    assert result.exit_code == 2
    note = "Note: ssdlite320_mobilenet_v3_large fails if it calls an operator of torchvision"
    assert f"{note}: {MISSING}" in result.stderr
