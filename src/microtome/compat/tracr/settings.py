"""The settings of a wrapped model, from its arguments or from tracr's configuration."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from microtome.devices.base import available_accelerators
from microtome.errors import BadFile, BadInputs, BadQuery, Unsupported, describe_error
from microtome.files.reading import read_bytes
from microtome.profile.measurement import QUANTITIES
from microtome.zoo.packages import import_package
from microtome.zoo.resolver import resolve

#: The maximum length and nesting of a configuration.
_CONFIG_BYTES, _CONFIG_DEPTH = 1 << 16, 32
#: The maximum number of elements of `input_size`: 1 GiB of float32.
_INPUT_ELEMENTS = 1 << 28


@dataclass
class Settings:
    """The arguments of a `WrappedModel`, which documents them."""

    model: Any
    inputs: Any
    depth: Any = 2
    save_layers: Collection[int] = ()
    warmup_iterations: Any = 2
    collect_metrics: bool | Collection[str] = True
    master_dict: Any = None


def read_settings(config: Any, positional: tuple[Any, ...], **arguments: Any) -> Settings:
    """Return the settings: the arguments, else those of a configuration, else the defaults.

    Args:
        config: The model, or the configuration.
        positional: The positional argument after it, if any: tracr's `master_dict` after a configuration, and the
            inputs after a model.
        arguments: Keyword arguments; None is the default.
    """
    values = {"model": config} if isinstance(config, nn.Module) else _from_config(config)
    values |= {name: value for name, value in arguments.items() if value is not None}
    if len(positional) > 1:
        raise TypeError(f"WrappedModel takes 1 or 2 positional arguments, got {1 + len(positional)}")
    for value in positional:
        # A dict of named inputs is a mapping too, so the first argument decides; a tensor is no master_dict.
        is_master = not isinstance(config, nn.Module) and hasattr(value, "update")
        name = "master_dict" if is_master else "inputs"
        if arguments.get(name) is not None:
            raise TypeError(f"WrappedModel got two values for {name!r}: the second positional argument is one")
        if value is not None:
            values[name] = value
    if "inputs" not in values:
        raise BadInputs('expected inputs for the model, got none: WrappedModel(model, x), or inputs="1x3x224x224"')
    return Settings(**values)


def check_integer(name: str, value: Any, minimum: int) -> int:
    """Return the value as an int, and raise if it is none or below the minimum."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum:
        raise BadQuery(f"expected {name} to be an integer of at least {minimum}, got {value!r}")
    return number


def parse_mode(mode: str) -> bool:
    """Return whether a mode of tracr's is that of training."""
    if mode not in ("eval", "train"):
        raise BadQuery(f"expected the mode 'eval' or 'train', got {mode!r}")
    return mode == "train"


def parse_metrics(collect: bool | Collection[str]) -> tuple[str, ...]:
    """Return the names of the quantities to measure; True for time, energy and load."""
    if isinstance(collect, bool):
        return ("time", "energy", "load") if collect else ()
    names = (collect,) if isinstance(collect, str) else tuple(collect)
    for name in names:
        if name not in QUANTITIES:
            raise BadQuery(f"expected collect_metrics from {', '.join(map(repr, QUANTITIES))}, got {name!r}")
    return names


def _from_config(config: Any) -> dict[str, Any]:
    """Return the fields of `Settings` that a configuration has."""
    if isinstance(config, str | Path):
        config = _read_yaml(Path(config))
    if not isinstance(config, Mapping):
        raise BadQuery(f"expected an nn.Module or a configuration, got a {type(config).__name__}")
    default, section = (config.get(name) or {} for name in ("default", "model"))
    for name, part in (("default", default), ("model", section)):
        if not isinstance(part, Mapping):
            raise BadQuery(f"expected names and values in the section `{name}`, got a {type(part).__name__}")
    for key in ("model_name", "input_size"):
        if key not in section:
            raise BadQuery(f"expected {key!r} in the section `model` of the configuration")
    _check_section(section)
    keys = ("depth", "save_layers", "warmup_iterations", "collect_metrics")
    values = {key: section[key] for key in keys if section.get(key) is not None}
    if default.get("collect_metrics") is not None:
        values["collect_metrics"] = default["collect_metrics"]
    return values | _build(section, str(default.get("device", "cpu")))


def _check_section(section: Mapping[str, Any]) -> None:
    name, sizes = section["model_name"], section["input_size"]
    if not isinstance(name, str):
        raise BadQuery(f"expected the name of a model as `model_name`, got {name!r:.80}")
    if not isinstance(sizes, list | tuple) or not all(type(size) is int and size > 0 for size in sizes):
        raise BadQuery(f"expected positive integers as `input_size`, got {sizes!r:.80}")
    if math.prod(sizes) > _INPUT_ELEMENTS:
        raise BadQuery(f"expected at most {_INPUT_ELEMENTS} elements of `input_size`, got {sizes!r:.80}")
    for key, expected in (("weight_path", str | Path), ("mode", str), ("num_classes", int)):
        if section.get(key) is not None and not isinstance(section[key], expected):
            raise BadQuery(f"expected a {expected} as `{key}`, got {section[key]!r:.80}")


def _build(section: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Build the model and its example inputs."""
    name, weights, classes = section["model_name"], section.get("weight_path"), section.get("num_classes")
    if section.get("pretrained") and weights is None:
        raise BadQuery(
            f"`pretrained: true` would download the weights of {name}, and microtome downloads nothing: set a "
            "`weight_path`, a .safetensors or .pt file of its state_dict, or pass the model: "
            f"WrappedModel(torchvision.models.get_model({name!r}, weights='IMAGENET1K_V1'), inputs)"
        )
    _check_device(device)
    training = parse_mode(section.get("mode", "eval"))
    found = resolve(
        name if ":" in name else f"torchvision:{name}",
        inputs="x".join(map(str, (1, *section["input_size"]))),
        args=None if classes is None else {"num_classes": classes},
        weights=weights,
    )
    return {"model": found.model.to(device).train(training), "inputs": found.inputs.to(device)}


def _check_device(device: str) -> None:
    try:
        device_type = torch.device(device).type
    except RuntimeError as error:
        raise BadQuery(f"expected a device such as 'cpu' or 'cuda:0', got `device: {device}`") from error
    if device_type not in {"cpu", *(accelerator.type for accelerator in available_accelerators())}:
        raise Unsupported(f"the configuration has `device: {device}`, and torch finds no such device: use `cpu`")


def _read_yaml(file: Path) -> Any:
    yaml = import_package("yaml")
    try:
        text = read_bytes(file, _CONFIG_BYTES).decode()
        _check_events(yaml, text)
        return yaml.safe_load(text)
    except (BadFile, UnicodeDecodeError, RecursionError, ValueError, yaml.YAMLError) as error:
        raise BadFile(f"{file} cannot be read as a configuration: {describe_error(error)}") from error


def _check_events(yaml: Any, text: str) -> None:
    """Raise for aliases, a few of which can expand to any amount of text, and for deep nesting, which takes long."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise BadFile(f"expected a value, got the alias {event.anchor!r:.80}: write it out")
        if depth > _CONFIG_DEPTH:
            raise BadFile(f"expected at most {_CONFIG_DEPTH} levels")
