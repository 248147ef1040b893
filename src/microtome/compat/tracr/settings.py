"""Settings of a wrapped model: its arguments, or tracr's configuration."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
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

#: The longest and the deepest configuration that is read.
_CONFIG_BYTES, _CONFIG_DEPTH = 1 << 16, 32
#: The largest input that a configuration may ask for: 1 GiB of float32.
_INPUT_ELEMENTS = 1 << 28

_DEFAULTS: dict[str, Any] = {"depth": 2, "save_layers": (), "warmup_iterations": 2, "collect_metrics": True}


def settle(config: Any, second: tuple[Any, ...], **given: Any) -> dict[str, Any]:
    """The model, its inputs and the settings: those that are given, else those of a configuration, else the defaults.

    Args:
        config: The model, or the configuration.
        second: The positional argument after it, if there is one: tracr's `master_dict` after a configuration, and the
            inputs after a model.
        given: Of these, None is not given.
    """
    known = _DEFAULTS | ({"model": config} if isinstance(config, nn.Module) else _configured(config))
    known |= {name: value for name, value in given.items() if value is not None}
    if len(second) > 1:
        raise TypeError(f"WrappedModel takes 1 or 2 positional arguments, got {1 + len(second)}")
    for value in second:
        # A dict of named inputs is a mapping too, so that the first argument decides; a tensor is no master_dict.
        is_master = not isinstance(config, nn.Module) and hasattr(value, "update")
        name = "master_dict" if is_master else "inputs"
        if given.get(name) is not None:
            raise TypeError(f"WrappedModel got two values for {name!r}: the second positional argument is one")
        if value is not None:
            known[name] = value
    if "inputs" not in known:
        raise BadInputs('say what the model is given: WrappedModel(model, x), or inputs="1x3x224x224"')
    return known


def whole_number(name: str, value: Any, least: int) -> int:
    """The value, if it is a whole number that is not below the least."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise BadQuery(f"{name} is a whole number from {least} on, got {value!r}")
    return number


def training_of(mode: str) -> bool:
    """Whether a mode of tracr's is that of training."""
    if mode not in ("eval", "train"):
        raise BadQuery(f"the mode of a model is 'eval' or 'train', got {mode!r}")
    return mode == "train"


def quantities(collect: bool | Collection[str]) -> tuple[str, ...]:
    """The quantities to measure, by name; True for time, energy and load."""
    if isinstance(collect, bool):
        return ("time", "energy", "load") if collect else ()
    names = (collect,) if isinstance(collect, str) else tuple(collect)
    for name in names:
        if name not in QUANTITIES:
            raise BadQuery(f"{name!r} cannot be measured: write {', '.join(map(repr, QUANTITIES))}")
    return names


def _configured(config: Any) -> dict[str, Any]:
    """The arguments of a `WrappedModel` that a configuration stands for."""
    if isinstance(config, str | Path):
        config = _read(Path(config))
    if not isinstance(config, Mapping):
        raise BadQuery(f"a WrappedModel is made of an nn.Module or a configuration, got a {type(config).__name__}")
    default, section = (config.get(name) or {} for name in ("default", "model"))
    for name, part in (("default", default), ("model", section)):
        if not isinstance(part, Mapping):
            raise BadQuery(f"expected names and values in the section `{name}`, got a {type(part).__name__}")
    for key in ("model_name", "input_size"):
        if key not in section:
            raise BadQuery(f"the section `model` of the configuration lacks {key!r}")
    _check_section(section)
    known = {key: section[key] for key in _DEFAULTS if section.get(key) is not None}
    if default.get("collect_metrics") is not None:
        known["collect_metrics"] = default["collect_metrics"]
    return known | _built(section, str(default.get("device", "cpu")))


def _check_section(section: Mapping[str, Any]) -> None:
    name, sizes = section["model_name"], section["input_size"]
    if not isinstance(name, str):
        raise BadQuery(f"expected the name of a model as `model_name`, got {name!r:.80}")
    if not isinstance(sizes, list | tuple) or not all(type(size) is int and size > 0 for size in sizes):
        raise BadQuery(f"expected whole numbers from 1 on as `input_size`, got {sizes!r:.80}")
    if math.prod(sizes) > _INPUT_ELEMENTS:
        raise BadQuery(f"expected at most {_INPUT_ELEMENTS} elements of `input_size`, got {sizes!r:.80}")
    for key, kind in (("weight_path", str | Path), ("mode", str), ("num_classes", int)):
        if section.get(key) is not None and not isinstance(section[key], kind):
            raise BadQuery(f"expected a {kind} as `{key}`, got {section[key]!r:.80}")


def _built(section: Mapping[str, Any], device: str) -> dict[str, Any]:
    name, weights, classes = section["model_name"], section.get("weight_path"), section.get("num_classes")
    if section.get("pretrained") and weights is None:
        raise BadQuery(
            f"`pretrained: true` would download the weights of {name}, and microtome downloads nothing: give a "
            "`weight_path`, a .safetensors or .pt file of its state_dict, or give the model: "
            f"WrappedModel(torchvision.models.get_model({name!r}, weights='IMAGENET1K_V1'), inputs)"
        )
    _check_device(device)
    training = training_of(section.get("mode", "eval"))
    found = resolve(
        name if ":" in name else f"torchvision:{name}",
        inputs="x".join(map(str, (1, *section["input_size"]))),
        args=None if classes is None else {"num_classes": classes},
        weights=weights,
    )
    return {"model": found.model.to(device).train(training), "inputs": found.inputs.to(device)}


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise BadQuery(f"expected a device such as 'cpu' or 'cuda:0', got `device: {device}`") from error
    if kind != "cpu" and kind not in {one.type for one in available_accelerators()}:
        raise Unsupported(f"the configuration has `device: {device}`, and torch finds no such device: use `cpu`")


def _read(file: Path) -> Any:
    yaml = import_package("yaml")
    try:
        text = read_bytes(file, _CONFIG_BYTES).decode()
        _check_events(yaml, text)
        return yaml.safe_load(text)
    except (BadFile, UnicodeDecodeError, RecursionError, ValueError, yaml.YAMLError) as error:
        raise BadFile(f"{file} cannot be read as a configuration: {describe_error(error)}") from error


def _check_events(yaml: Any, text: str) -> None:
    """Raise for aliases, a few of which can stand for any amount of text, and for deep nesting, which takes long."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise BadFile(f"expected a value, got the alias {event.anchor!r:.80}: write it out")
        if depth > _CONFIG_DEPTH:
            raise BadFile(f"expected at most {_CONFIG_DEPTH} levels")
