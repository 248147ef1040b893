"""Generation over stages, by the loop of transformers: the tokens are those of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import microtome as mt
from microtome import zoo
from microtome.errors import NoMatch, Unsupported
from tests.split.language_models import (
    DECODERS,
    GROUPED,
    VOCABULARY,
    build,
    build_t5,
    build_whisper,
    import_transformers,
)

IDS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_fill(1, torch.tensor([0, 1]), 0)  # padding on the left
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 50},
    "beams": {"do_sample": False, "num_beams": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
}
QUICK = ("llama", "gpt2", "gemma3")
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DECODERS]


def answers(model: Any, stages: mt.Stages, rows: int, **options: Any) -> list[torch.Tensor]:
    """The tokens of the whole model and of the stages."""
    tokens = []
    for one in (model, stages):
        torch.manual_seed(5)
        tokens.append(one.generate(IDS[:rows], attention_mask=MASK[:rows], max_new_tokens=20, **options))
    return tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_every_decoding_mode_equal_those_of_the_model(name: str) -> None:
    model, at = build(name)
    stages = mt.split(model, IDS, at=at)
    assert stages.verified == "bit-equal"
    modes = [mode for mode in MODES if name not in ("mamba", "qwen3_next") or mode in ("greedy", "sampling", "beams")]
    for mode in modes:  # a recurrent state cannot be cropped, nor be static
        whole, split = answers(model, stages, 1 if mode == "prompt lookup" else 2, **MODES[mode])
        assert whole.equal(split), mode


@pytest.mark.parametrize("at", ["model.embed_tokens", "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj"])
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_cut_may_lie_inside_of_a_block(name: str, at: str) -> None:
    model, _ = build(name)
    whole, split = answers(model, mt.split(model, IDS, at=at), 2, do_sample=False)
    assert whole.equal(split)


def test_three_stages_generate_the_same() -> None:
    model, _ = build("llama")
    stages = mt.split(model, IDS, at=["model.layers.0.self_attn.o_proj", "model.layers.1.mlp"])
    whole, split = answers(model, stages, 2, num_beams=2, do_sample=False)
    assert whole.equal(split)


@torch.no_grad()
def test_logits_of_each_step_are_bit_equal_and_one_analysis_serves_all_steps() -> None:
    model, at = build("mistral")  # the window of its attention ends within the steps
    stages = mt.split(model, {"input_ids": IDS}, at=at)
    with stages.session() as session:
        inputs: list[dict[str, Any]] = [{"input_ids": IDS}, {"input_ids": IDS}]
        for _ in range(20):
            whole, split = model(**inputs[0]), session(**inputs[1])
            assert split.logits.equal(whole.logits)
            token = whole.logits[:, -1:].argmax(-1)
            inputs = [{"input_ids": token, "past_key_values": one.past_key_values} for one in (whole, split)]
    assert split.past_key_values.get_seq_length() == whole.past_key_values.get_seq_length() == 9 + 19
    assert len(stages.variants) == 1


def test_a_streamer_and_a_stopping_criterion_work_as_with_the_model() -> None:
    model, at = build("llama")
    stages = mt.split(model, IDS, at=at)

    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    streamers, results = [Streamer(), Streamer()], []
    for one, streamer in zip((model, stages), streamers, strict=True):
        stop = [lambda ids, scores: torch.tensor([ids.shape[1] >= 15])]
        results.append(
            one.generate(IDS[:1], max_new_tokens=20, do_sample=False, streamer=streamer, stopping_criteria=stop)
        )
    assert results[0].equal(results[1])
    assert results[0].shape == (1, 15)
    assert streamers[0].tokens == streamers[1].tokens


def test_a_generation_without_a_step_is_refused() -> None:
    model, x = zoo.build("tiny-writer")
    stages = mt.split(model, x, at="layers.1")
    with pytest.raises(Unsupported, match="the `generate` of a Writer ran no step: expected one new token or more"):
        stages.generate(x, max_new_tokens=0)


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_an_encoder_decoder_generates_the_same(mode: str) -> None:
    model = build_t5()
    example = {"input_ids": IDS, "decoder_input_ids": IDS[:, :1]}
    for at in ("decoder.block.1", "decoder.block.1.layer.0"):
        whole, split = answers(model, mt.split(model, example, at=at), 2, **MODES[mode])
        assert whole.equal(split)


@pytest.mark.slow
def test_speech_is_transcribed_the_same() -> None:
    model, sound = build_whisper(), torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    stages = mt.split(model, {"input_features": sound, "decoder_input_ids": IDS[:, :1]}, at="model.decoder.layers.1")
    tokens = [one.generate(sound, max_new_tokens=10, do_sample=False) for one in (model, stages)]
    assert tokens[0].equal(tokens[1])


def test_a_cut_in_an_encoder_that_generate_runs_by_itself_is_refused() -> None:
    model = build_t5()
    stages = mt.split(model, {"input_ids": IDS, "decoder_input_ids": IDS[:, :1]}, at="encoder.block.1")
    with pytest.raises(Unsupported, match=r"cannot be cut at encoder\.block\.1 when it is called with decoder_input"):
        stages.generate(IDS, max_new_tokens=3)


def test_the_model_can_generate_by_itself_afterwards() -> None:
    model, at = build("llama")
    before = model.generate(IDS, max_new_tokens=5, do_sample=False)
    mt.split(model, IDS, at=at).generate(IDS, max_new_tokens=5, do_sample=False)
    assert "forward" not in vars(model)
    assert model.generate(IDS, max_new_tokens=5, do_sample=False).equal(before)


@pytest.mark.parametrize("options", [{"use_cache": False}, {"use_cache": True}])
def test_flags_of_a_call_are_those_of_the_caller(options: dict[str, Any]) -> None:
    model, at = build("llama")
    whole, split = answers(model, mt.split(model, IDS, at=at), 2, do_sample=False, **options)
    assert whole.equal(split)


def test_hooks_of_the_model_run_once() -> None:
    model, at = build("llama")
    model.register_forward_hook(lambda module, args, output: setattr(output, "logits", 2 * output.logits))
    whole, split = answers(model, mt.split(model, IDS, at=at), 2, do_sample=True)
    assert whole.equal(split)


def test_a_compiled_model_is_split_and_generates() -> None:
    model, at = build("llama")
    compiled: Any = torch.compile(model, backend="eager")
    stages = mt.split(compiled, {"input_ids": IDS}, at=at)
    session = stages.session()
    assert session(input_ids=IDS).logits.equal(model(input_ids=IDS).logits)
    whole, split = answers(model, stages, 2, do_sample=False)
    assert whole.equal(split)


def test_gemma3n_is_refused_with_a_reason() -> None:
    transformers = import_transformers()
    sizes = {"num_hidden_layers": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 2}
    lists = {"activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [64] * 4}
    config = transformers.Gemma3nTextConfig(**GROUPED | sizes | own | lists, laurel_rank=4, altup_num_inputs=2)
    model = transformers.Gemma3nForCausalLM(config).eval()
    with pytest.raises(NoMatch, match=r"'model\.layers\.0' runs in the head, and it mutates a UserDict among its arg"):
        mt.split(model, {"input_ids": IDS}, at="model.layers.1")
