"""Models that return an object which they fill as they run, such as a cache of keys."""

from __future__ import annotations

from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.engine.pytree import reachable_tensors
from microtome.split.splitter import Splitter


class Keys:
    """A cache that is no plain data: it holds a lock, too."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.kept: list[Tensor] = []

    def put(self, key: Tensor) -> Tensor:
        self.kept.append(key.reshape(-1))
        return self.kept[-1].view(key.shape)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        key = keys.put(self.key(x))
        return self.out(self.query(x) @ key.T @ x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = Attention(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Keys]:
        keys = Keys()
        return self.last(self.attention(x, keys)), keys


def test_what_an_object_among_the_outputs_holds_crosses() -> None:
    model, x = Decoder(), torch.ones(2, 4)
    cuts = mt.cuts(model, x)
    live = {cut.at: [value.name for value in cut.live] for cut in cuts}
    assert list(live) == ["attention.key", "attention.query", "attention.out"]
    assert live["attention.out"] == ["attention.key", "attention.out"]
    assert [cut.at for cut in cuts.refused] == ["attention", "last"]
    assert all("it mutates a Keys among its arguments" in str(cut.refused) for cut in cuts.refused)
    for at in live:
        stages = mt.split(model, x, at=at)
        assert stages.verified == "bit-equal"
        for batch in (x, torch.rand(3, 4)):
            (output, keys), (expected, expected_keys) = stages(batch), model(batch)
            assert output.equal(expected)
            assert [type(one) for one in keys.kept] == [Tensor]
            assert keys.kept[0].equal(expected_keys.kept[0])


def test_tensors_are_found_in_objects_lists_and_dicts() -> None:
    keys, x = Keys(), torch.ones(2)
    keys.put(x)
    held = list(reachable_tensors({"a": [keys, 3, "text"], "b": (x, None, Keys)}))
    assert [tensor.shape for tensor in held] == [(2,), (2,)]
    assert held[0] is x  # the nearest first


def language_models() -> dict[str, Any]:
    zoo.import_torchvision()  # which transformers imports
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 32}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    grouped = {**small, "num_key_value_heads": 1}
    t5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    gpt2 = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(gpt2),
        "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**grouped, sliding_window=4)),
        "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)),
        "bert": lambda: transformers.BertLMHeadModel(transformers.BertConfig(**small, is_decoder=True)),
    }


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "t5", "bert"])
def test_every_cut_of_a_language_model_that_is_listed_can_be_split(name: str, use_cache: bool) -> None:
    torch.manual_seed(0)
    model = language_models()[name]().eval()
    inputs = {"input_ids": torch.arange(6).view(1, 6), "use_cache": use_cache}
    if name == "t5":
        inputs["decoder_input_ids"] = torch.arange(4).view(1, 4)
    with torch.no_grad():  # attention with a mask that has a gradient takes another kernel, and none crosses
        splitter = Splitter(model, inputs)
        cuts = list(splitter.cuts)
        assert len(cuts) >= 6
        for cut in cuts[:: max(1, len(cuts) // 10)] + cuts[-1:]:
            assert splitter.at(cut).verified == "bit-equal"
    assert not splitter.cuts.refused


@pytest.mark.parametrize("grad", [True, False])
def test_a_value_that_does_not_cross_requires_a_gradient_as_in_the_model(grad: bool) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            bias = self.bias(x)
            x = self.a(x)
            return self.b(x * 1 if bias.requires_grad else x * 2)

    model, x = Biased(), torch.ones(2, 4)
    with torch.set_grad_enabled(grad):
        assert [mt.split(model, x, at=at).verified for at in ("bias", "a", "b")] == ["bit-equal"] * 3
