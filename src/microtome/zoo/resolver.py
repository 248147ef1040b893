"""From a name such as `torchvision:resnet50` to a model and inputs for it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from microtome.engine.pytree import map_tensors
from microtome.errors import BadInputs, BuildFailed, MicrotomeError, NoMatch, NotAModule, Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.user_code import line_of
from microtome.zoo.catalogue import listing
from microtome.zoo.seed import seeded
from microtome.zoo.sources import SOURCES, python
from microtome.zoo.sources.source import FoundModel
from microtome.zoo.weights import load_weights


@dataclass(frozen=True)
class Resolved:
    """A model by name, ready to run.

    Attributes:
        name: The name as it was given.
        model: In eval mode.
        inputs: Those asked for, or those that the source of the model tells.
        notes: Sentences for the user.
    """

    name: str
    model: nn.Module
    inputs: Inputs
    notes: tuple[str, ...] = ()


def resolve(
    text: str,
    *,
    inputs: Any = None,
    args: Mapping[str, Any] | None = None,
    meta: bool = False,
    weights: str | Path | None = None,
) -> Resolved:
    """The model that a text names, and inputs for it.

    Weights and guessed inputs depend on nothing but the name and the arguments; the random state of the process is
    left as it was.

    Args:
        text: `zoo:NAME`, `torchvision:NAME`, `timm:NAME`, `hf:TYPE` or `hf:FOLDER`, `pkg.mod:NAME`, `./file.py:NAME`.
        inputs: What to run it with, anything that `Inputs.of` takes; None to take what the model's source tells.
        args: Keyword arguments for what builds the model; for `hf`, values of its configuration.
        meta: Build it on the meta device, and the inputs too: a model of any size, to be traced and not run.
        weights: A .safetensors file, or a .pt file of a state_dict, with all the weights, and no others.

    >>> resolve("zoo:tiny-vit").inputs
    Inputs(2x3x32x32:float32)
    >>> resolve("torch.nn:Linear", args={"in_features": 8, "out_features": 2}, inputs="4x8").model
    Linear(in_features=8, out_features=2, bias=True)
    """
    asked = None if inputs is None else Inputs.of(inputs, device="meta" if meta and weights is None else "cpu")
    with seeded():  # a file may build its model when it is imported
        found = _find(text, dict(args or {}), meta=meta)
        with seeded():
            model = _build(text, found, meta=meta)
            given = asked or _guess(text, found, model)
    if weights is not None:
        load_weights(model, weights, text, meta=meta)
    elif meta:
        given = _without_values(given)
    return Resolved(text, model, given, found.notes)


def _find(text: str, args: dict[str, Any], *, meta: bool) -> FoundModel:
    source, _, name = text.partition(":")
    if source in SOURCES:
        if not name:
            raise NoMatch(f"{text!r} lacks the name of a model: microtome models '{source}:*' lists them")
        return SOURCES[source].find(name, args)
    place, _, name = text.rpartition(":")
    if text.removesuffix(":").endswith(".py"):
        raise NoMatch(f"{text!r} names a file: say what to take from it, such as {text.removesuffix(':')}:Net")
    if not place or not name:
        raise _nameless(text)
    if not python.exists(place):
        raise _nameless(text, f" (there is no source, and no module that can be imported from here, {place!r})")
    return python.find(place, name, args, meta=meta)


def _nameless(text: str, why: str = "") -> NoMatch:
    """The error for a text that is no name, with names that it may stand for."""
    word = text.strip(":").rpartition(":")[2]
    known: dict[str, list[str]] = {}
    for full in listing().names:
        known.setdefault(full.partition(":")[2], []).append(full)
    close = [word] if word in known else difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    near = [full for bare in close for full in known[bare]]
    such = " or ".join(map(repr, near or ["zoo:tiny-resnet"]))
    return NoMatch(f"{text!r} does not name a model: write the source and the name, such as {such}{why}")


def _build(text: str, found: FoundModel, *, meta: bool) -> nn.Module:
    try:
        with torch.device("meta" if meta else "cpu"):
            model = found.make()
    except MicrotomeError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{describe_error(error)}{line_of(error, found.file)}"
        if meta:
            raise Unsupported(f"{text} cannot be built on the meta device: {what}. Try it without meta") from error
        raise BuildFailed(f"{text} cannot be built: {what}") from error
    if not isinstance(model, nn.Module):
        raise NotAModule(f"{text} made a {type(model).__name__}, not an nn.Module")
    return model.eval()


def _guess(text: str, found: FoundModel, model: nn.Module) -> Inputs:
    try:
        with torch.device("cpu"):
            example = found.example(model)
    except (Exception, SystemExit) as error:
        raise BadInputs(f"the inputs of {text} cannot be guessed: {describe_error(error)}. {_HOW}") from error
    if example is None:
        raise BadInputs(f"nothing tells what inputs {text} takes. {_HOW}")
    return Inputs.of(example)


def _without_values(inputs: Inputs) -> Inputs:
    """On the device of a model without weights: code that makes tensors where its inputs are finds them together."""
    args, kwargs = map_tensors(lambda tensor: tensor.to("meta"), (inputs.args, inputs.kwargs))
    return Inputs(*args, **kwargs)


_HOW = (
    'Say it: --input 1x3x224x224 on the command line, inputs="1x3x224x224" in Python; '
    "'1x77:int64' for tokens, 'input_ids=1x77:int64' by name, commas between several"
)
