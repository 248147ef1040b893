"""`microtome generate`: text from a language model, whole, in stages, and over a server in another process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from microtome import zoo
from microtome.cli import main
from microtome.cli.token_printer import TokenPrinter
from microtome.cli.tokenizers import Tokenizer
from tests.remote.process import ServerProcess

MODEL, PROMPT = "zoo:tiny-writer", "Each stage "
TINY_GPT2 = [
    *("--arg", "architectures=['GPT2LMHeadModel']", "--arg", "n_layer=2", "--arg", "n_embd=32", "--arg", "n_head=4"),
    *("--arg", "vocab_size=30", "--arg", "eos_token_id=None", "--arg", "bos_token_id=None"),
]


def call(*words: Any) -> Result:
    return CliRunner().invoke(main, ["generate", *map(str, words)])


def good(*words: Any) -> Result:
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result


def expected(count: int) -> str:
    model: Any = zoo.build("tiny-writer")[0]
    return model.decode(model.generate(torch.tensor([model.encode(PROMPT)]), count)[0].tolist())


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(MODEL) as server:
        yield server


# -- in this process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["--at", "layers.1"], ["--at", "layers.2.attn.qkv"]])
def test_the_text_is_that_of_the_model(words: list[str]) -> None:
    result = good(MODEL, "--prompt", PROMPT, "--tokens", 30, *words)
    assert result.stdout == f"{expected(30)}\n"
    cut = f", cut at {words[1]}" if words else ""
    assert result.stderr.startswith(f"30 tokens{cut}: ")


def test_draws_depend_on_the_seed_and_not_on_the_cut(tmp_path: Path) -> None:
    drawn = [MODEL, "--prompt", PROMPT, "--temperature", 0.8, "--top-k", 20]
    first = good(*drawn, "--json", tmp_path / "a.json").stdout
    seed = json.loads((tmp_path / "a.json").read_text())["seed"]
    assert good(*drawn, "--seed", seed, "--at", "layers.1").stdout == first
    assert good(*drawn, "--seed", seed + 1).stdout != first


def test_tokens_without_a_tokenizer() -> None:
    result = good("hf:gpt2", *TINY_GPT2, "--ids", "5,6", "--tokens", 4, "--at", "transformer.h.0")
    tokens = [int(word) for word in result.stdout.split()]
    assert tokens[:2] == [5, 6]
    assert len(tokens) == 6
    assert result.stdout == good("hf:gpt2", *TINY_GPT2, "--ids", "5 6", "--tokens", 4).stdout


def test_a_folder_has_the_tokenizer_of_its_model(tmp_path: Path) -> None:
    zoo.import_torchvision()
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import GPT2Config, PreTrainedTokenizerFast

    words = Words(WordLevel({f"w{index}": index for index in range(30)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 30, "eos_token_id": None, "bos_token_id": None}
    GPT2Config(**sizes, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    result = good(f"hf:{tmp_path}", "--prompt", "w3 w7", "--tokens", 5, "--json", tmp_path / "out.json")
    tokens = json.loads((tmp_path / "out.json").read_text())["tokens"]
    assert result.stdout == f"w3 w7 {' '.join(f'w{token}' for token in tokens)}\n"


def test_json_goes_to_stdout_and_the_text_to_stderr() -> None:
    result = good(MODEL, "--prompt", PROMPT, "--tokens", 10, "--json", "-")
    written = json.loads(result.stdout)
    assert PROMPT + written["text"] == expected(10)
    assert expected(10) in result.stderr
    assert (written["where"], written["at"], written["replays"]) == ("edge", None, 0)
    assert set(written["per_token"]) == {"total_s"}


def test_parts_of_a_character_wait_for_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    with TokenPrinter(Tokenizer(lambda text: [*text.encode()], decode), [*b"caf"], to_stderr=False) as printer:
        printer.put(torch.tensor([[*b"caf"]]))
        printed = []
        for byte in "é\n\x1b!".encode():
            printer.put(torch.tensor([byte]))
            printed.append(capsys.readouterr().out)
    # The escape, which a terminal would obey, is replaced.
    assert printed == ["caf", "é", "\n", "\N{REPLACEMENT CHARACTER}", "!"]
    assert printer.text == "é\n\x1b!"


@pytest.mark.integration
def test_ctrl_c_keeps_what_was_written() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "microtome", "generate", MODEL, "--prompt", PROMPT, "--tokens", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        begun = process.stdout.read(len(expected(5)))
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert begun == expected(5)
    assert rest.endswith("\n")
    summary, last = errors.splitlines()
    assert " tokens: " in summary
    assert last == "Interrupted"


# -- over a server -----------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_server_runs_the_tail(server: ServerProcess, tmp_path: Path) -> None:
    words = ["--server", server.address, "--at", "layers.1", "--codec", "raw", "--json", tmp_path / "out.json"]
    result = good(MODEL, "--prompt", PROMPT, "--tokens", 30, *words)
    assert result.stdout == f"{expected(30)}\n"
    summary, each, _ = result.stderr.splitlines()
    assert summary.startswith("30 tokens, cut at layers.1: ")
    assert re.fullmatch(r"each: \S+ \ws here, \S+ \ws wire, \S+ \ws tail there; \d+ B sent, \d+ B received", each)
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["where"], written["at"], written["replays"], written["reason"]) == ("cloud", "layers.1", 0, None)
    each = written["per_token"]
    parts = ("here_s", "wire_s", "server_decode_s", "queue_s", "tail_s", "server_encode_s")
    assert sum(each[part] for part in parts) == pytest.approx(each["total_s"])
    assert each["sent_bytes"] >= 48 * 4  # a hidden state
    assert written["first_token_s"] > 0


@pytest.mark.integration
def test_the_cut_is_chosen(server: ServerProcess) -> None:
    result = good(MODEL, "--prompt", PROMPT, "--tokens", 10, "--server", server.address)
    assert result.stdout == f"{expected(10)}\n"
    assert re.match(r"10 tokens, (all here|cut at \S+): ", result.stderr)


@pytest.mark.integration
def test_this_machine_continues_if_the_server_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put = TokenPrinter.put

    def kill(printer: TokenPrinter, tokens: torch.Tensor) -> None:
        put(printer, tokens)
        if len(printer.tokens) == 7:
            process.kill()

    with ServerProcess(MODEL) as process:
        monkeypatch.setattr(TokenPrinter, "put", kill)
        words = ["--server", process.address, "--at", "layers.1", "--json", tmp_path / "out.json"]
        result = good(MODEL, "--prompt", PROMPT, "--tokens", 20, *words)
    assert result.stdout == f"{expected(20)}\n"
    assert "Note: this machine continued without the server: " in result.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["where"], written["replays"]) == ("edge", 1)


@pytest.mark.integration
def test_a_server_may_keep_no_sessions() -> None:
    with ServerProcess(MODEL, "--sessions", "0", "--state-memory", "1MB", "--session-timeout", "1min") as server:
        result = call(MODEL, "--prompt", "a", "--server", server.address, "--at", "layers.1")
    assert result.exit_code == 2
    assert "keeps no sessions: start it with --sessions" in result.output


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([MODEL], "expected one of --prompt and --ids"),
        ([MODEL, "--prompt", "a", "--ids", "1"], "expected one of --prompt and --ids"),
        ([MODEL, "--ids", "1,two"], "expected tokens as numbers, such as 1,15,7, got '1,two'"),
        ([MODEL, "--ids", "9" * 20], "expected tokens as numbers, such as 1,15,7, got '9999"),
        ([MODEL, "--prompt", "a", "--codec", "raw"], "--codec applies to a server: add --server"),
        ([MODEL, "--prompt", "a", "--no-fallback"], "--no-fallback applies to a server: add --server"),
        ([MODEL, "--prompt", "a", "--tls"], "options of a connection apply to a server: add --server"),
        ([MODEL, "--prompt", "a", "--timeout", "1"], "--timeout applies to a server: add --server"),
        ([MODEL, "--prompt", "a", "--top-k", "3"], "--top-k applies to draws: add --temperature"),
        ([MODEL, "--prompt", "a", "--seed", "3"], "--seed applies to draws: add --temperature"),
        ([MODEL, "--prompt", ""], "--prompt: expected a text of one token or more"),
        ([MODEL, "--prompt", "naïve"], "expected characters of ASCII, got 'ï'"),
        ([MODEL, "--prompt", "a", "--at", "layers.9"], "layers.9"),
        ([MODEL, "--ids", "1,9999"], "expected tokens of zoo:tiny-writer from 0 to 95, got 9999"),
        (["hf:gpt2", *TINY_GPT2, "--ids", "30"], "expected tokens of hf:gpt2 from 0 to 29, got 30"),
        (["zoo:tiny-vit", "--ids", "1"], "zoo:tiny-vit is a ViT, which has no method `generate`"),
        (["hf:gpt2", *TINY_GPT2[2:], "--ids", "1"], "--arg \"architectures=['GPT2LMHeadModel']\""),
        (
            ["hf:gpt2", *TINY_GPT2, "--prompt", "a"],
            "hf:gpt2 has no tokenizer: pass the tokens of the prompt with --ids",
        ),
    ],
)
def test_mistakes_are_explained(words: list[str], message: str) -> None:
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output


def test_an_error_of_generate_is_told(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n\n"
        "    def generate(self, ids, **options):\n        raise IndexError('no such token')\n"
    )
    result = call(f"{tmp_path}/net.py:Net", "--input", "1x2", "--ids", "9")
    assert result.exit_code == 2
    assert "net.py:Net does not generate from these tokens: IndexError: no such token" in result.output


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 8, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = call(f"hf:{tmp_path}", "--prompt", "a")
    assert result.exit_code == 2
    assert f"cannot read the tokenizer in {tmp_path}" in result.output


def test_a_model_without_generate_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> None:
        raise AssertionError("built")

    zoo.import_torchvision()  # which transformers imports
    import transformers

    monkeypatch.setattr(transformers.LlamaModel, "_from_config", build)
    result = call("hf:llama", "--ids", "1,2")  # 27 GB of weights
    assert result.exit_code == 2, result.output
    assert "hf:llama is a LlamaModel, which has no method `generate`" in result.output
    assert "--arg \"architectures=['LlamaForCausalLM']\"" in result.output
