"""`microtome profile --prefill N --decode`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import microtome as mt
from microtome.cli import main

#: 1.57 GiB of weights.
LLAMA = ("hf:llama", "--arg", "num_hidden_layers=2", "--arg", "vocab_size=4096")
GPT2 = ("hf:gpt2", *(word for name in ("n_layer=2", "n_embd=16", "n_head=2") for word in ("--arg", name)))


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


def test_cuts_price_the_prompt_and_each_token() -> None:
    result = CliRunner().invoke(main, ["cuts", *LLAMA, "--prefill", "300", "--depth", "1"])
    assert result.exit_code == 0, result.output
    assert "hf:llama on input_ids 1x300:int64" in result.stdout
    assert "bytes: for the prompt of 300 tokens; per token: for each one after it" in " ".join(result.stdout.split())
    assert "use_cache" not in result.stderr


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
