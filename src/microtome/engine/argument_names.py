"""The names of a model's arguments, from the signature of its `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any

from torch import nn

from microtome.engine.attributes import dict_of
from microtome.engine.selectors import unwrap_model
from microtome.engine.torch_internals import own_children
from microtome.inputs import Inputs

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def named_arguments(model: nn.Module | None, inputs: Inputs) -> dict[str, Any]:
    """Return the arguments by name: that of a parameter of `forward`, or `args[0]` if there is none.

    A submodule's name is not given to an argument, since outputs of modules have it.

    >>> list(named_arguments(nn.MultiheadAttention(8, 2), Inputs(1, 2, value=3)))
    ['query', 'key', 'value']
    """
    return _name(model, inputs, () if model is None else own_children(model))


def _name(model: nn.Module | None, inputs: Inputs, reserved: Iterable[str]) -> dict[str, Any]:
    names = [] if model is None else _positional_names(unwrap_model(model), len(inputs.args))
    taken = {*inputs.kwargs, *reserved}
    named: dict[str, Any] = {}
    for index, value in enumerate(inputs.args):
        is_named = index < len(names) and names[index] not in taken
        named[names[index] if is_named else f"args[{index}]"] = value
    return {**named, **inputs.kwargs}


def describe_arguments(model: nn.Module, inputs: Inputs) -> str:
    """Format the arguments by name, each tensor as its shape and, if it is not float32, its dtype.

    >>> import torch
    >>> describe_arguments(nn.Bilinear(2, 2, 1), Inputs(torch.ones(3, 2), input2=torch.ones(3, 2).half()))
    'input1 3x2, input2 3x2:float16'
    """
    named = _name(model, inputs, ())  # here, nothing else has a name
    texts = {name: repr(Inputs(value))[len("Inputs(") : -1] for name, value in named.items()}
    return ", ".join(f"{name} {text.replace(':float32', '')}" for name, text in texts.items()) or "no arguments"


def _positional_names(model: nn.Module, count: int) -> list[str]:
    """Return the names of the first positional arguments; none if `forward` has no signature."""
    # An instance may have a `forward` of its own, which is not a method.
    own = dict_of(model).get("forward")
    try:
        parameters = list(inspect.signature(own or type(model).forward).parameters.values())
    except (TypeError, ValueError):
        return []
    parameters = parameters[0 if own else 1 :]
    names = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    variadic = next((one.name for one in parameters if one.kind is inspect.Parameter.VAR_POSITIONAL), None)
    further = (f"{name}[{index}]" for index, name in enumerate(repeat(variadic))) if variadic else ()
    return [name for name, _ in zip(chain(names, further), range(count), strict=False)]
