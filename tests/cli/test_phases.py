"""`microtome profile --prefill N --decode`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import microtome as mt
from microtome.cli import main
from microtome.zoo.models import Decoder

#: 1.57 GiB of weights.
LLAMA = ("hf:llama", "--arg", "num_hidden_layers=2", "--arg", "vocab_size=4096")
GPT2 = ("hf:gpt2", *(word for name in ("n_layer=2", "n_embd=16", "n_head=2") for word in ("--arg", name)))
WRITER = "zoo:tiny-writer"


@pytest.fixture(autouse=True)
def _needs_transformers() -> None:
    pytest.importorskip("transformers")


def run(*words: Any) -> Result:
    return CliRunner().invoke(main, ["profile", *map(str, words)])


@pytest.mark.parametrize("meta", [("--meta",), ()])
def test_both_phases_are_counted_without_weights(meta: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*LLAMA, *meta, "--prefill", 300, "--decode", "--json", tmp_path / "phases.json")
    assert result.exit_code == 0, result.output
    assert "hf:llama: 1 prompt of 300 tokens, then one token at a time" in result.stdout
    assert "use_cache" not in result.stderr
    phases = mt.load(tmp_path / "phases.json")
    assert (phases.name, phases.prompt_tokens) == ("hf:llama", 300)
    assert phases.token_cache_bytes == 2 * 2 * 4096 * 4  # keys and values of 2 layers
    assert phases.cache_bytes == 300 * phases.token_cache_bytes


def test_one_phase_and_its_layers(tmp_path: Path) -> None:
    prefill = run(*GPT2, "--prefill", 7, "--depth", 1, "--html", tmp_path / "page.html")
    assert "hf:gpt2: 1 prompt of 7 tokens\n" in prefill.stdout
    assert "hf:gpt2, prefill on" in prefill.stdout
    assert "GPT2Block" in prefill.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    decode = run(*GPT2, "--input", "input_ids=3x9:int64", "--decode", "--csv", "-").stdout.splitlines()
    assert [line.split(",")[:3] for line in decode] == [["phase", "batch", "tokens"], ["decode", "3", "1"]]


def test_an_error_of_the_model_names_the_prompt() -> None:
    sizes = ("hidden_size=64", "intermediate_size=64", "num_attention_heads=4", "num_key_value_heads=3")
    words = [word for one in sizes for word in ("--arg", one)]
    result = run(*LLAMA, *words, "--prefill", 16)
    assert result.exit_code == 2
    assert "hf:llama does not run on input_ids 1x16:int64, use_cache True: RuntimeError" in result.output
    assert "The model ran on" not in result.output
    assert "--input" not in result.output


def test_cuts_price_the_prompt_and_each_token() -> None:
    result = CliRunner().invoke(main, ["cuts", *LLAMA, "--prefill", "300", "--depth", "1"])
    assert result.exit_code == 0, result.output
    assert "hf:llama on input_ids 1x300:int64" in result.stdout
    assert "bytes: for the prompt of 300 tokens; per token: for each one after it" in " ".join(result.stdout.split())
    assert "use_cache" not in result.stderr


@pytest.mark.parametrize("words", ["cuts", "profile", "plan --edge F --cloud F --bandwidth 1Mbps"])
def test_a_prompt_of_a_model_without_a_cache_is_refused(words: str) -> None:
    command, *options = words.split()
    prompt = ["--tokens", "20,3"] if command == "plan" else ["--prefill", "20"]
    result = CliRunner().invoke(main, [command, "zoo:tiny-decoder", *options, *prompt])
    assert (result.exit_code, result.stdout) == (2, "")
    message = (
        "Decoder returns no cache for the next token: .* got an output of logits, hidden_states. Leave out "
        + {"cuts": "--prefill\n", "profile": "--prefill and --decode\n", "plan": "--tokens\n"}[command]
    )
    assert re.search(message, result.stderr)


def test_a_cache_that_calls_do_not_extend_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Any, hidden_states: Any = None, use_cache: bool = False) -> dict[str, Any]:
        return {"logits": self.lm_head(self.tokens(input_ids)), "hidden_states": self.tokens(input_ids)}

    monkeypatch.setattr(Decoder, "forward", forward)
    result = CliRunner().invoke(main, ["cuts", "zoo:tiny-decoder", "--prefill", "20"])
    assert result.exit_code == 0, result.output
    assert "per token: not known: the state that the model returns is not an object that its" in result.stdout


def test_the_built_in_writer_has_phases(tmp_path: Path) -> None:
    file = tmp_path / "phases.json"
    assert run(WRITER, "--prefill", 9, "--decode", "--time", "--repeat", 3, "--json", file).exit_code == 0
    assert mt.load(file).cache_bytes == 2 * 9 * 4 * 2 * 48 * 4  # rows, tokens, layers, keys and values, width, bytes
    cuts = CliRunner().invoke(main, ["cuts", WRITER, "--prefill", "9", "--depth", "1"])
    assert "per token: for each one after it; cache: after the prompt" in " ".join(cuts.stdout.split())
    words = ["plan", WRITER, "--edge", str(file), "--cloud", str(file), "--bandwidth", "20Mbps", "--tokens", "9,4"]
    plan = CliRunner().invoke(main, words)
    assert plan.exit_code == 0, plan.output
    assert f"{WRITER}, an answer of 4 tokens to a prompt of 9: " in " ".join(plan.stdout.split())


def test_times_are_measured() -> None:
    result = run(*GPT2, "--prefill", 7, "--decode", "--time", "--repeat", 3, "--json", "-")
    data = json.loads(result.stdout)
    assert data["kind"] == "phases"
    assert all(data[phase]["timing"]["bare"]["median"] > 0 for phase in ("prefill", "decode"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prefill", "7", "--input", "1x7:int64"), "choose one of --prefill, the length of the prompt, and --input"),
        (("--decode", "--backward"), "phases of generation, which has no backward"),
        (("--decode", "--time", "--perfetto", "F"), "--perfetto is of one run: profile it without --prefill"),
    ],
)
def test_options_that_do_not_go_with_phases(words: tuple[str, ...], message: str) -> None:
    result = run(*GPT2, *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_plan_is_for_a_whole_answer(tmp_path: Path) -> None:
    file = tmp_path / "phases.json"
    assert run(*GPT2, "--prefill", 7, "--decode", "--time", "--repeat", 3, "--json", file).exit_code == 0
    words = ["plan", *GPT2, "--edge", str(file), "--cloud", str(file), "--bandwidth", "20Mbps", "--rtt", "3ms"]
    result = CliRunner().invoke(main, [*words, "--tokens", "7,20"])
    assert result.exit_code == 0, result.output
    assert "hf:gpt2, an answer of 20 tokens to a prompt of 7: " in " ".join(result.stdout.split())
    for tokens in ("7", "7,x", "0,5"):
        refused = CliRunner().invoke(main, [*words, "--tokens", tokens])
        assert "expected the tokens of the prompt and of the answer, such as 512,64" in refused.stderr
    both = CliRunner().invoke(main, [*words, "--tokens", "7,20", "--input", "1x7:int64"])
    assert "choose one of --tokens, the length of the prompt, and --input, the prompt" in both.stderr


BASE = ["hf:llama"] + [
    word
    for arg in ("num_hidden_layers=2", "hidden_size=8", "intermediate_size=8", "num_attention_heads=1", "vocab_size=10")
    for word in ("--arg", arg)
]


@pytest.mark.parametrize("command", [["profile", "--prefill", "4", "--decode"], ["cuts", "--prefill", "4"]])
def test_a_base_model_is_noted_once_to_lack_the_head(command: list[str]) -> None:
    pytest.importorskip("transformers")
    args = [command[0], *BASE, "--arg", "num_key_value_heads=1", *command[1:]]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("without the head that gives logits") == 1
    assert "--arg \"architectures=['LlamaForCausalLM']\"" in result.stderr
    whole = CliRunner().invoke(main, [*args, "--arg", "architectures=['LlamaForCausalLM']"])
    assert whole.exit_code == 0, whole.output
    assert "without the head" not in whole.stderr
