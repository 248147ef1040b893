"""Example inputs of models of transformers, timm and torchvision, found from the model itself."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from microtome.inputs import Inputs

_MAX_TOKENS = 128


def example_inputs(model: nn.Module) -> Inputs | None:
    """Return example inputs of the model, in its dtype and on its device; None if it is of none of these packages.

    Random numbers come from a seed, and the global random state is unchanged.
    """
    package = type(model).__module__.partition(".")[0]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        if package == "transformers":
            example: Any = transformers_example(model)
        elif package == "timm":
            example = timm_example(model)
        else:
            example = torchvision_example(model) if package == "torchvision" else None
    return None if example is None else Inputs.of(example).cast_to(model)


# -- timm and torchvision ----------------------------------------------------------------------------------------------


def timm_example(model: nn.Module, **args: Any) -> Tensor:
    """Return an image of the size in the model's pretrained configuration, which arguments may override."""
    timm = sys.modules["timm"]
    return torch.randn(1, *timm.data.resolve_model_data_config(model, args=args)["input_size"])


def torchvision_example(model: nn.Module, size: Any = None) -> Any:
    """Return an image, a clip or a pair of images.

    Args:
        size: The height and width of images; by default the model's own or, if any size will do, 224.
    """
    task = type(model).__module__.removeprefix("torchvision.models.").partition(".")[0]
    if task == "detection":
        # The size to which the model resizes every image.
        transform: Any = model.transform
        height, width = transform.fixed_size or 2 * transform.min_size[-1:]
        return Inputs([torch.rand(3, height, width)])
    if task == "optical_flow":
        # The crop size of FlyingChairs, on which RAFT is trained first.
        return Inputs(torch.rand(1, 3, 368, 496), torch.rand(1, 3, 368, 496))
    size = getattr(model, "image_size", None) or size or (299 if task == "inception" else 224)
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    return torch.rand(1, 3, *([16] if task == "video" else []), height, width)


# -- transformers ------------------------------------------------------------------------------------------------------


def transformers_example(model: nn.Module) -> dict[str, Tensor] | None:
    """Return keyword arguments for the model, or None if it requires one of an unknown kind.

    They follow from the configuration and the signature of `forward`.

    There is no attention mask: models branch on its values, and without one they attend to every token.
    """
    config: Any = model.config
    parameters = inspect.signature(model.forward).parameters
    wanted = {name for name, parameter in parameters.items() if _is_required(parameter)}
    main: Any = getattr(model, "main_input_name", None)
    wanted.add(main if main in parameters else next((name for name in _MAKERS if name in parameters), ""))
    if _has_two_towers(config) and "pixel_values" in parameters:
        wanted.add("pixel_values")
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        wanted.add("decoder_input_ids")
    made = {name: _MAKERS[name](config) for name in parameters if name in wanted and name in _MAKERS}
    arguments = {name: value for name, value in made.items() if value is not None}
    return arguments if arguments.keys() == wanted else None


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


def _tokens(config: Any) -> Tensor:
    """Token ids without padding and special tokens, which vocabularies have at their ends."""
    text = config.get_text_config()
    vocabulary = _first(text, "vocab_size") or 1000
    positions = _first(text, "max_position_embeddings", "n_positions", "max_target_positions")
    length = min(_MAX_TOKENS, positions) if isinstance(positions, int) and positions > 0 else _MAX_TOKENS
    return torch.randint(min(5, vocabulary - 1), min(vocabulary, 1000), (1, length))


def _pixels(config: Any) -> Tensor:
    """An image, or a clip if the configuration has a number of frames."""
    size = _first(config, "image_size")
    if size is None and getattr(config, "vision_config", None) is not None:
        return _pixels(config.vision_config)
    height, width = (size[0], size[-1]) if isinstance(size, list | tuple) else (size or 224, size or 224)
    channels = _first(config, "num_channels", "in_channels", "in_chans") or 3
    frames = _first(config, "num_frames")
    return torch.randn(1, *([frames] if frames else []), channels, height, width)


def _features(config: Any) -> Tensor | None:
    """A spectrogram, in one of two layouts."""
    if (channels := _first(config, "input_feat_per_channel")) is not None:
        return torch.randn(1, 1000, channels)
    mels, positions = _first(config, "num_mel_bins"), _first(config, "max_source_positions")
    return torch.randn(1, mels, 2 * positions) if mels and positions else None


def _wave(config: Any) -> Tensor:
    """One second of sound, or a spectrogram if the configuration has a number of mel bins."""
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
    """Return whether this is a dual encoder such as CLIP, not a language model with image tokens."""
    towers = hasattr(config, "vision_config") and hasattr(config, "text_config")
    return towers and not any("image_token" in name for name in config.to_dict())


def _first(config: Any, *names: str) -> Any:
    """Return the first of these attributes that is set."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)
