"""Commands that measure nothing build no weights, and language models run one pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from microtome import zoo
from microtome.cli import main
from microtome.cli.options import model as options
from microtome.errors import NeedsValues

#: 1.57 GiB of weights: 2 layers of 4 x 4096 x 4096 and 3 x 4096 x 11008, and the embedding of 4096 words.
LLAMA = ("hf:llama", "--arg", "num_hidden_layers=2", "--arg", "vocab_size=4096")
WITHOUT_WEIGHTS = "hf:llama is built without its 1.57 GiB of weights: nothing is measured"
ONE_PASS = "hf:llama runs one pass, with use_cache=False"


def run(*words: Any) -> Result:
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each model that is built is on the meta device."""
    pytest.importorskip("transformers")
    devices: list[bool] = []
    resolve = zoo.resolve

    def resolve_and_record(text: str, **arguments: Any) -> zoo.Resolved:
        devices.append(arguments["meta"])
        return resolve(text, **arguments)

    monkeypatch.setattr(zoo, "resolve", resolve_and_record)
    return devices


@pytest.mark.parametrize("command", ["profile", "cuts", "top", "graph"])
def test_counting_builds_no_weights_and_says_so(command: str, built: list[bool], tmp_path: Path) -> None:
    more = ("--dot", tmp_path / "graph.dot") if command == "graph" else ()
    result = run(command, *LLAMA, *more)
    assert built == [True]
    assert WITHOUT_WEIGHTS in result.stderr
    assert ONE_PASS in result.stderr


def test_measuring_builds_weights(built: list[bool]) -> None:
    small = [
        word for name in ("hidden_size=8", "intermediate_size=8", "num_attention_heads=2") for word in ("--arg", name)
    ]
    result = run("profile", *LLAMA, *small, "--input", "1x4:int64", "--time", "--repeat", 3, "--depth", 1)
    assert built == [False]
    assert "without its" not in result.stderr
    assert ONE_PASS in result.stderr
    assert "hf:llama on input_ids 1x4:int64, use_cache False" in result.stdout


def test_stages_of_a_language_model_keep_its_cache(built: list[bool], tmp_path: Path) -> None:
    gpt2 = ("hf:gpt2", *(word for name in ("n_layer=2", "n_embd=16", "n_head=2") for word in ("--arg", name)))
    result = run("split", *gpt2, "--at", "h.0", "--to", tmp_path / "stages")
    assert "use_cache" not in result.output
    assert built == [False]


def test_small_models_and_encoders_have_no_notes(built: list[bool]) -> None:
    assert run("profile", "zoo:tiny-vit").stderr == ""
    assert run("profile", "hf:bert", "--arg", "num_hidden_layers=1").stderr == ""
    assert built == [True, True]


BRANCHES = """
import torch

class Net(torch.nn.Linear):
    example_inputs = "2x4"

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x) if self.weight.sum().item() < 100 else x
"""


@pytest.mark.parametrize("command", ["profile", "cuts"])
def test_a_model_whose_code_reads_values_is_built_with_weights(command: str, built: list[bool], tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(BRANCHES)
    result = run(command, f"{tmp_path / 'net.py'}:Net", "--json", "-")
    assert built == [True, False]
    data = json.loads(result.stdout)
    how = data["how"]
    assert how.startswith("real")


def test_a_large_model_whose_code_reads_values_says_that_it_has_weights(
    built: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(BRANCHES)
    monkeypatch.setattr(options, "_NOTED_BYTES", 16)
    result = run("profile", f"{tmp_path / 'net.py'}:Net")
    assert "net.py:Net has weights in memory, which its code needs: NeedsValues: the model cannot be" in result.stderr


def test_a_large_model_is_not_built_again_for_inputs_that_do_not_fit(built: list[bool]) -> None:
    result = CliRunner().invoke(main, ["profile", *LLAMA, "--input", "input_ids=1x2x3x4:int64"])
    assert result.exit_code != 0
    assert "hf:llama does not run on input_ids 1x2x3x4:int64" in result.stderr
    assert built == [True]


def test_meta_on_request_does_not_fall_back(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(BRANCHES)
    result = CliRunner().invoke(main, ["profile", f"{tmp_path / 'net.py'}:Net", "--meta"])
    assert "cannot be traced without computing" in result.stderr


def test_an_instance_has_its_weights(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch\nnet = torch.nn.Linear(2, 2)\n")
    with pytest.raises(NeedsValues, match="is a Linear instance with weights: leave out meta"):
        zoo.resolve(f"{tmp_path / 'net.py'}:net", inputs="1x2", meta=True)
    assert run("profile", f"{tmp_path / 'net.py'}:net", "--input", "1x2").stderr == ""
