"""`microtome models`, and how a command is told which model to open."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from microtome import zoo
from microtome.cli import main
from microtome.zoo.sources.base import ModelSpec

NET = """
from torch import nn

class Net(nn.Linear):
    def __init__(self, width=2, name=None):
        super().__init__(3, width)
        assert name in (None, "plain words")
"""

FAILING_BACKWARD = """
import torch

class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no gradient")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return Refuse.apply(x * self.weight)
"""


def microtome(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path}/net.py:Net"


def test_every_source_is_listed() -> None:
    names = microtome("models").stdout.split()
    assert names[: len(zoo.names())] == [f"zoo:{name}" for name in zoo.names()]
    assert {"torchvision:resnet50", "timm:resnet50", "hf:bert"} < set(names)
    assert len(names) == len(set(names))


def test_a_pattern_is_matched_against_the_whole_name() -> None:
    assert microtome("models", "zoo:tiny-[rv]*").stdout.split() == ["zoo:tiny-resnet", "zoo:tiny-vit"]
    assert microtome("models", "*:resnet50").stdout.split() == ["torchvision:resnet50", "timm:resnet50"]


def test_names_as_json(tmp_path: Path) -> None:
    assert json.loads(microtome("models", "zoo:*-vit", "--json", "-").stdout) == ["zoo:tiny-vit"]
    done = microtome("models", "zoo:*-vit", "--json", str(tmp_path / "names.json"))
    assert done.stdout == "zoo:tiny-vit\n"
    assert json.loads((tmp_path / "names.json").read_text()) == ["zoo:tiny-vit"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("tiny-vot", "no model matches 'tiny-vot': a word matches anywhere in the name"),
        ("zoo:tiny-vot*", "Near: zoo:tiny-vit"),
        ("nowhere:*", "there is no source 'nowhere' of models: expected one of zoo, torchvision, timm, hf\n"),
        (
            "torchvison:resnet50",
            "of models: did you mean 'torchvision'? expected one of zoo, ",
        ),
    ],
)
def test_a_pattern_that_fits_nothing(pattern: str, message: str) -> None:
    done = microtome("models", pattern)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_misspelled_name_of_two_sources_is_suggested_in_their_order() -> None:
    assert list(zoo.sources.SOURCES) == ["zoo", "torchvision", "timm", "hf"]
    error = microtome("profile", "resnet50").stderr
    assert error.index("torchvision:resnet50") < error.index("timm:resnet50")


def test_a_failing_backward_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FAILING_BACKWARD)
    done = microtome("track", f"{tmp_path}/net.py:Net", "--input", "2")
    assert done.exit_code == 2
    assert "does not run on x 2: RuntimeError: no gradient" in done.stderr


def test_packages_that_are_not_installed_are_said_beside_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    done = microtome("models", "*vit_b*")
    assert "torchvision:vit_b_16" in done.stdout
    assert "Note: timm: timm is not installed: pip install timm" in done.stderr
    assert "timm" not in done.stdout
    done = microtome("models", "timm:*")
    assert done.exit_code == 2
    assert "timm is not installed" in done.stderr


def test_track_takes_a_file_inputs_and_arguments(net: str) -> None:
    words = ["track", net, "--input", "4x3", "--arg", "width=5", "--arg", "name=plain words", "--json", "-"]
    done = microtome(*words)
    assert [row["type"] for row in json.loads(done.stdout)] == ["Net"]


def test_a_model_whose_outputs_need_no_gradient_has_no_backward(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        return x.argmax()\n"
    )
    words = ["track", f"{tmp_path}/net.py:Net", "--arg", "in_features=1", "--arg", "out_features=1", "--input", "2"]
    done = microtome(*words, "--json", "-")
    assert [(row["forward"], row["backward"]) for row in json.loads(done.stdout)] == [(1, None)]


def test_a_name_is_shown_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[b]net.py").write_text("import torch\n\nclass llama(torch.nn.ReLU):\n    example_inputs = '2'\n")
    assert "[b]net.py:llama: the order of calls" in microtome("track", "[b]net.py:llama").stdout


def test_notes_go_to_stderr(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec(lambda: torch.nn.ReLU(), lambda _: "2", ("look here",))
    monkeypatch.setattr("microtome.zoo.sources.builtin.find", lambda name, args: spec)
    done = microtome("track", "zoo:relu", "--json", "-")
    assert done.stderr == "Note: look here\n"
    assert json.loads(done.stdout)[0]["type"] == "ReLU"


@pytest.mark.parametrize("reason", ["they do not fit", None])
def test_missing_operators_of_torchvision_are_noted_for_models_that_call_them(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microtome.zoo.sources.torchvision.explain_missing_operators", lambda: reason)
    assert zoo.sources.torchvision.find("squeezenet1_1", {}).notes == ()
    notes = zoo.sources.torchvision.find("fasterrcnn_resnet50_fpn", {}).notes
    note = "fasterrcnn_resnet50_fpn fails if it calls an operator of torchvision: they do not fit"
    assert notes == (() if reason is None else (note,))


def test_other_models_of_an_incompatible_torchvision_have_no_note() -> None:
    assert microtome("track", "torchvision:squeezenet1_1", "--input", "1x3x32x32", "--json", "-").stderr == ""
    assert microtome("models", "torchvision:squeezenet*").stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arg", "width"], "expected NAME=VALUE, such as num_classes=10, got 'width'"),
        ([], "has no example inputs"),
        (["--input", "4x"], "cannot read '4x'"),
        (["--input", "4x4"], "does not run on input 4x4: RuntimeError: "),
        (["--input", "4x3", "--arg", "depth=3"], "unexpected keyword argument 'depth'"),
    ],
)
def test_what_a_model_does_not_take_is_one_clear_message(net: str, words: list[str], message: str) -> None:
    done = microtome("track", net, *words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
