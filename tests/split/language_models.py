"""Language models of transformers with small configurations and random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from microtome import zoo

VOCABULARY = 97
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL = TOKENS | SIZES | {"intermediate_size": 64, "max_position_embeddings": 128}
GROUPED = SMALL | {"num_key_value_heads": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = {f"linear_{name}": 2 for name in ("num_value_heads", "num_key_heads")} | {
    f"linear_{name}_head_dim": 8 for name in ("key", "value")
}

#: The configuration of each family of decoders, and the block after which it is cut.
DECODERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", GROUPED, "model.layers.1"),
    "gpt2": ("GPT2Config", TOKENS | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}, "transformer.h.1"),
    "mistral": ("MistralConfig", GROUPED | {"head_dim": 8, "sliding_window": 8}, "model.layers.1"),
    "gemma": ("GemmaConfig", GROUPED | {"head_dim": 8}, "model.layers.1"),
    "gemma2": ("Gemma2Config", GROUPED | {"head_dim": 8, "sliding_window": 8}, "model.layers.1"),
    "gemma3": (
        "Gemma3TextConfig",
        GROUPED | {"head_dim": 8, "sliding_window": 8, "layer_types": LAYERS},
        "model.layers.1",
    ),
    "qwen2": ("Qwen2Config", GROUPED, "model.layers.1"),
    "qwen3": ("Qwen3Config", GROUPED | {"head_dim": 8}, "model.layers.1"),
    "phi": ("PhiConfig", GROUPED, "model.layers.1"),
    "falcon": ("FalconConfig", TOKENS | SIZES, "transformer.h.1"),
    "bloom": ("BloomConfig", TOKENS | {"hidden_size": 32, "n_layer": 3, "n_head": 4}, "transformer.h.1"),
    "opt": (
        "OPTConfig",
        TOKENS | SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 128},
        "model.decoder.layers.1",
    ),
    "olmo": ("OlmoConfig", GROUPED, "model.layers.1"),
    "granite": ("GraniteConfig", GROUPED, "model.layers.1"),
    "mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 4}, "model.layers.1"),
    "deepseek": (
        "DeepseekV3Config",
        SMALL | {"num_key_value_heads": 4, "first_k_dense_replace": 1} | LATENT | EXPERTS,
        "model.layers.1",
    ),
    "mamba": (
        "MambaConfig",
        TOKENS | {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 8},
        "backbone.layers.1",
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        GROUPED
        | LINEAR
        | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        "model.layers.1",
    ),
}


def build(name: str) -> tuple[Any, str]:
    """A decoder, and the block after which it is cut."""
    transformers = import_transformers()
    config, arguments, at = DECODERS[name]
    return _prepared(
        lambda: transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**arguments))
    ), at


def build_t5() -> Any:
    transformers = import_transformers()
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
    return _prepared(lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**TOKENS | sizes)))


def build_whisper() -> Any:
    transformers = import_transformers()
    sizes = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 3, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    tokens = TOKENS | {"decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None}
    return _prepared(lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**tokens | sizes)))


def import_transformers() -> Any:
    zoo.import_torchvision()  # which transformers imports
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def _prepared(make: Callable[[], Any]) -> Any:
    """The model without a token that ends the text, so that every answer has the same length."""
    torch.manual_seed(0)
    model = make().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
