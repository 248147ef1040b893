"""Inputs for a model of transformers, from its configuration and the names of its forward's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_MOST_TOKENS = 128


def example(model: nn.Module) -> dict[str, Tensor] | None:
    """Keyword arguments for the model; None where it takes something that is not known here.

    No attention mask: its values are read by the model's code, and without one every token is attended to.
    """
    config: Any = model.config
    takes = inspect.signature(model.forward).parameters
    wanted = {name for name, parameter in takes.items() if _is_required(parameter)}
    main: Any = getattr(model, "main_input_name", None)
    wanted.add(main if main in takes else next((name for name in _MAKERS if name in takes), ""))
    if _has_two_towers(config) and "pixel_values" in takes:
        wanted.add("pixel_values")
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        wanted.add("decoder_input_ids")
    made = {name: _MAKERS[name](config) for name in takes if name in wanted and name in _MAKERS}
    given = {name: value for name, value in made.items() if value is not None}
    return given if given.keys() == wanted else None


def _is_required(parameter: inspect.Parameter) -> bool:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in several


def _tokens(config: Any) -> Tensor:
    """Words, and neither the padding nor the marks that the ends of a vocabulary are kept for."""
    text = config.get_text_config()
    words = _first(text, "vocab_size") or 1000
    most = _first(text, "max_position_embeddings", "n_positions", "max_target_positions")
    length = min(_MOST_TOKENS, most) if isinstance(most, int) and most > 0 else _MOST_TOKENS
    return torch.randint(min(5, words - 1), min(words, 1000), (1, length))


def _pixels(config: Any) -> Tensor:
    """An image, or where the configuration counts frames, a clip."""
    size = _first(config, "image_size")
    if size is None and getattr(config, "vision_config", None) is not None:
        return _pixels(config.vision_config)
    height, width = (size[0], size[-1]) if isinstance(size, list | tuple) else (size or 224, size or 224)
    channels = _first(config, "num_channels", "in_channels", "in_chans") or 3
    frames = _first(config, "num_frames")
    return torch.randn(1, *([frames] if frames else []), channels, height, width)


def _features(config: Any) -> Tensor | None:
    """A spectrogram, which models take in two layouts."""
    if (channels := _first(config, "input_feat_per_channel")) is not None:
        return torch.randn(1, 1000, channels)
    mels, positions = _first(config, "num_mel_bins"), _first(config, "max_source_positions")
    return torch.randn(1, mels, 2 * positions) if mels and positions else None


def _wave(config: Any) -> Tensor:
    """One second of sound, or its spectrogram where the configuration counts mels."""
    mels, frames = _first(config, "num_mel_bins"), _first(config, "max_length")
    return torch.randn(1, frames, mels) if mels and frames else torch.randn(1, 16000)


_MAKERS: dict[str, Callable[[Any], Tensor | None]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": _wave,
    "decoder_input_ids": _tokens,
}


def _has_two_towers(config: Any) -> bool:
    """As in CLIP; not a language model that takes images where its text says so."""
    towers = hasattr(config, "vision_config") and hasattr(config, "text_config")
    return towers and not any("image_token" in name for name in config.to_dict())


def _first(config: Any, *names: str) -> Any:
    """The first of these values that the configuration has."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)
