"""Build a model and its inputs from a name such as `torchvision:resnet50`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from microtome.engine.argument_names import describe_arguments
from microtome.engine.pytree import map_tensors
from microtome.errors import BadInputs, BuildFailed, MicrotomeError, NeedsValues, NoMatch, NotAModule, describe_error
from microtome.inputs import Inputs
from microtome.user_code import line_of, suggest_argument
from microtome.zoo.catalogue import listing
from microtome.zoo.sources import SOURCES, python
from microtome.zoo.sources.base import ModelSpec, seeded
from microtome.zoo.weights import load_weights

_INPUT_HINT = (
    'Pass them: --input 1x3x224x224 on the command line, inputs="1x3x224x224" in Python; '
    "'1x77:int64' for tokens, 'input_ids=1x77:int64' by name, several separated by commas. Or define "
    "example_inputs in the model's class or file, a value or a function that returns it, such as ({'image': image},) "
    "for a forward that takes a dict"
)

#: A source and a name as in torchvision.resnet18, torchvision/resnet18 and torchvision.models.resnet18.
_OTHER_SEPARATOR = re.compile(r"(\w+)[./](?:models[./])?(.+)")


@dataclass(frozen=True)
class Resolved:
    """A model that is ready to run.

    Attributes:
        name: The name passed to `resolve`.
        model: In eval mode.
        inputs: The inputs passed to `resolve`, or the example inputs of the model's source.
        notes: Notes for the user.
        file: The Python file that defines the model; None for models of packages with a source of their own.
        has_random_weights: Whether the weights are random although trained ones are published.
        one_pass: Keyword arguments of a run that is not continued by another: `use_cache=False` of a language model.
    """

    name: str
    model: nn.Module = field(repr=False)
    inputs: Inputs
    notes: tuple[str, ...] = ()
    file: str | None = None
    has_random_weights: bool = False
    one_pass: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> str:
        """The inputs by the names of the parameters of `forward`, such as `x 1x3x224x224`."""
        return describe_arguments(self.model, self.inputs)

    def for_one_pass(self) -> Resolved:
        """Return the model with inputs for a run that is not continued by another, and with a note if these differ."""
        added = {name: value for name, value in self.one_pass.items() if name not in self.inputs.kwargs}
        if not added:
            return self
        inputs = self.inputs.with_arguments(self.inputs.args, {**self.inputs.kwargs, **added})
        arguments = ", ".join(f"{name}={value}" for name, value in added.items())
        return replace(self, inputs=inputs, notes=(*self.notes, f"{self.name} runs one pass, with {arguments}"))


def resolve(
    text: str,
    *,
    inputs: Any = None,
    args: Mapping[str, Any] | None = None,
    meta: bool = False,
    weights: str | Path | None = None,
) -> Resolved:
    """Build a model and its inputs from its name.

    Weights and example inputs depend only on the name and the arguments. The global random state is restored.

    Args:
        text: `zoo:NAME`, `torchvision:NAME`, `timm:NAME`, `hf:TYPE` or `hf:FOLDER`, `pkg.mod:NAME`, `./file.py:NAME`.
        inputs: Inputs of the model, as `Inputs.of` accepts them (default: the example inputs of the model's source).
        args: Keyword arguments of the class or factory; for `hf`, values of the configuration.
        meta: Build the model and the inputs on the meta device: a model of any size, to trace but not to run.
        weights: A .safetensors file, or a .pt file of a state_dict, with exactly the model's weights.

    >>> resolve("zoo:tiny-vit").inputs
    Inputs(2x3x32x32:float32)
    >>> resolve("torch.nn:Linear", args={"in_features": 8, "out_features": 2}, inputs="4x8").model
    Linear(in_features=8, out_features=2, bias=True)
    """
    passed = None if inputs is None else Inputs.of(inputs, device="meta" if meta and weights is None else "cpu")
    with seeded():  # importing a file may build its model
        spec = _find(text, dict(args or {}), meta=meta)
        with seeded():
            model = _build(text, spec, args or {}, meta=meta)
            arguments = passed or _example(text, spec, model)
    if weights is not None:
        load_weights(model, weights, text, meta=meta)
    elif meta:  # code that creates tensors on the device of its inputs must find the weights there
        positional, keyword = map_tensors(lambda tensor: tensor.to("meta"), (arguments.args, arguments.kwargs))
        arguments = arguments.with_arguments(positional, keyword)
    is_random = spec.has_random_weights and weights is None
    return Resolved(text, model, arguments, spec.notes, spec.file, has_random_weights=is_random, one_pass=spec.one_pass)


def find_class(text: str, args: Mapping[str, Any] | None = None) -> type | None:
    """Return the class of a model by its name, without building it; None if its source does not tell.

    >>> find_class("zoo:tiny-vit") is None
    True
    """
    if text.partition(":")[0] not in SOURCES:  # importing a file may build its model
        return None
    return _find(text, dict(args or {}), meta=True).model_class


def _find(text: str, args: dict[str, Any], *, meta: bool) -> ModelSpec:
    source, _, name = text.partition(":")
    if source in SOURCES:
        if not name:
            raise NoMatch(f"{text!r} lacks the name of a model: microtome models '{source}:*' lists them")
        return SOURCES[source].find(name, args)
    place, _, name = text.rpartition(":")
    if text.removesuffix(":").endswith(".py"):
        raise NoMatch(f"{text!r} names a file: add a name in it, such as {text.removesuffix(':')}:Net")
    if Path(text).is_file():
        raise NoMatch(
            f"{text!r} is a file, expected the name of a model, such as zoo:tiny-vit or ./net.py:Net; microtome report "
            "and microtome diff read results"
        )
    if not place or not name:
        raise _not_a_name(text)
    if place.partition(".")[0] == "transformers":
        raise NoMatch(
            f"{text!r}: models of transformers are named hf:TYPE, such as hf:llama; a class with a task head, "
            "hf:llama --arg \"architectures=['LlamaForCausalLM']\""
        )
    if not python.exists(place):
        raise _not_a_name(text, f" ({place!r} is neither a source nor a module that can be imported)")
    return python.find(place, name, args, meta=meta)


def _not_a_name(text: str, reason: str = "") -> NoMatch:
    """Return the error for a text that names no model, with similar names."""
    word = text.strip(":").rpartition(":")[2]
    names = listing().names
    source = _OTHER_SEPARATOR.fullmatch(text)
    if source is not None and source[1] in SOURCES:
        word, names = source[2], tuple(name for name in names if name.startswith(f"{source[1]}:")) or names
    full_names: dict[str, list[str]] = {}
    for full in names:
        full_names.setdefault(full.partition(":")[2], []).append(full)
    close = [word] if word in full_names else difflib.get_close_matches(word, full_names, n=1, cutoff=0.6)
    near = [full for bare in close for full in full_names[bare]]
    such = " or ".join(map(repr, near or ["zoo:tiny-resnet"]))
    return NoMatch(f"{text!r} is not the name of a model: expected SOURCE:NAME, such as {such}{reason}")


def _build(text: str, spec: ModelSpec, args: Mapping[str, Any], *, meta: bool) -> nn.Module:
    try:
        with torch.device("meta" if meta else "cpu"):
            model = spec.build()
    except MicrotomeError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{describe_error(error)}{line_of(error, spec.file)}{suggest_argument(error, args)}"
        if meta:
            raise NeedsValues(f"{text} cannot be built on the meta device: {reason}. Try it without meta") from error
        raise BuildFailed(f"{text} cannot be built: {reason}") from error
    if not isinstance(model, nn.Module):
        inputs = ": define its inputs as example_inputs in its file" if isinstance(model, tuple | list | dict) else ""
        raise NotAModule(f"expected {text} to return an nn.Module, got {type(model).__name__}{inputs}")
    return model.eval()


def _example(text: str, spec: ModelSpec, model: nn.Module) -> Inputs:
    try:
        with torch.device("cpu"):
            example = spec.example(model)
    except (Exception, SystemExit) as error:
        raise BadInputs(f"cannot guess the inputs of {text}: {describe_error(error)}. {_INPUT_HINT}") from error
    if example is None:
        raise BadInputs(f"{text} has no example inputs. {_INPUT_HINT}")
    return Inputs.of(example)
