"""Cuts of language models: bytes for the prompt and for each token, and the cache on either side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.trace.phases import Prompt

LAYERS, HIDDEN, HEADS, GROUPS, WORDS = 3, 32, 4, 2, 64
WIDTH = HIDDEN // HEADS
BATCH, LENGTH = 2, 5
#: The cache of a layer: keys and values of a token of one sequence.
TOKEN = 2 * GROUPS * WIDTH * 4


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    zoo.import_torchvision()  # which transformers imports
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": WORDS, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=GROUPS)
    model: nn.Module = transformers.LlamaForCausalLM(config).eval()
    return model


@pytest.fixture(scope="module")
def cuts(llama: nn.Module) -> mt.Cuts:
    with torch.no_grad():
        return mt.cuts(llama, {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.int64)})


def test_a_layer_sends_hidden_states_and_rotary_embeddings_of_the_prompt_or_of_one_token(cuts: mt.Cuts) -> None:
    assert (cuts.prompt_tokens, cuts.no_decode) == (LENGTH, None)
    for layer in range(LAYERS - 1):
        at = f"model.layers.{layer}"
        assert cuts[at].nbytes == 4 * LENGTH * (BATCH * HIDDEN + 2 * WIDTH)
        assert cuts.token_bytes(at) == 4 * (BATCH * HIDDEN + 2 * WIDTH)


def test_the_cache_stays_where_it_is_written(cuts: mt.Cuts) -> None:
    decode = cuts.decode
    assert decode is not None
    for layer in range(LAYERS):
        # Keys and values of a layer are written in its attention, after `v_proj` and before `o_proj`.
        for inside, written in (("input_layernorm", 0), ("self_attn.v_proj", 0), ("self_attn.o_proj", 1), ("mlp", 1)):
            at = f"model.layers.{layer}.{inside}"
            head = (layer + written) * BATCH * TOKEN
            tail = LAYERS * BATCH * TOKEN - head
            assert (cuts[at].head_state_bytes, cuts[at].tail_state_bytes) == (LENGTH * head, LENGTH * tail)
            grown = decode[at].head_state_bytes, decode[at].tail_state_bytes
            assert grown == ((LENGTH + 1) * head, (LENGTH + 1) * tail)


def test_the_bytes_of_a_token_are_those_that_a_session_sends(llama: nn.Module, cuts: mt.Cuts) -> None:
    decode = cuts.decode
    assert decode is not None
    at = "model.layers.1.self_attn.q_proj"
    with torch.no_grad():
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        first = llama(input_ids=ids)
        step = {"input_ids": ids[:, -1:], "past_key_values": first.past_key_values}
        stepped = mt.cuts(llama, step)
    assert stepped[at].live == decode[at].live
    assert sum(live.nbytes for live in decode[at].live) == cuts.token_bytes(at)


def test_one_pass_and_other_models_have_no_phases(llama: nn.Module) -> None:
    with torch.no_grad():
        once = mt.cuts(llama, {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "use_cache": False})
    resnet = mt.cuts(*zoo.build("tiny-resnet"))
    for found in (once, resnet):
        assert (found.token, found.decode, found.no_decode, found.prompt_tokens) == (None,) * 4
        assert found[0].head_state_bytes is found[0].tail_state_bytes is found.token_bytes(found[0].at) is None
    assert "per token" not in str(once)


def test_a_recurrent_state_does_not_grow() -> None:
    pytest.importorskip("transformers")
    found = zoo.resolve("hf:mamba", args={"num_hidden_layers": 2, "hidden_size": 16, "state_size": 4}, meta=True)
    with torch.no_grad():
        cuts = mt.cuts(found.model, Prompt.of(found.model, found.inputs).resized(6).inputs)
    decode, at = cuts.decode, "layers.0"
    assert decode is not None
    # Of each layer, 32 channels: 4 inputs of the convolution and 4 states.
    assert cuts[at].head_state_bytes == decode[at].head_state_bytes == 32 * (4 + 4) * 4
    assert cuts[at].tail_state_bytes == decode[at].tail_state_bytes == 32 * (4 + 4) * 4


def test_a_call_that_decoding_does_not_make_has_no_bytes_for_a_token() -> None:
    pytest.importorskip("transformers")
    sizes = {"num_layers": 2, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 2}
    found = zoo.resolve("hf:t5", args=sizes, meta=True)
    with torch.no_grad():
        cuts = mt.cuts(found.model, found.inputs)
    assert cuts.token_bytes("encoder.block.0") is None
    assert cuts.token_bytes("decoder.block.0") is not None


def test_a_model_that_fails_on_the_next_token_has_the_cuts_of_the_prompt(
    llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no second token")

    monkeypatch.setattr(Prompt, "next_token", fail)
    with torch.no_grad():
        cuts = mt.cuts(llama, {"input_ids": torch.zeros(1, 4, dtype=torch.int64)})
    assert len(cuts) > 0
    assert cuts.decode is None
    assert "per token: not known: ValueError: no second token" in str(cuts)


def test_tables_and_files_have_both_phases(cuts: mt.Cuts, tmp_path: Path) -> None:
    assert mt.load(cuts.to_json(tmp_path / "cuts.json")) == cuts
    text = " ".join(str(cuts).split())
    assert (
        f"bytes: for the prompt of {LENGTH} tokens; per token: for each one after it; cache: after the prompt" in text
    )
    header, *rows = (line.split(",") for line in cuts.to_csv().splitlines())
    row = dict(zip(header, next(row for row in rows if row[0] == "model.layers.0"), strict=False))
    assert row["token_bytes"] == str(cuts.token_bytes("model.layers.0"))
    assert row["head_state_bytes"] == str(BATCH * LENGTH * TOKEN)
