"""Describe a split in JSON, so that another process can make the same stages without the example's values."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine.argument_names import named_arguments
from microtome.engine.pytree import as_state, base_class, is_plain_class, is_state
from microtome.errors import Unsupported
from microtome.files.types import to_plain
from microtome.inputs import Inputs
from microtome.split.boundary.schema import PLACEHOLDER_DTYPES, PlaceholderSpec, parse_changes
from microtome.split.boundary.serialization import DTYPES
from microtome.split.state.contents import Path, apply_changes, describe_state


class SplitDescription(NamedTuple):
    """The cuts of a model and the example that it was split on.

    Attributes:
        at: The addresses of the cuts.
        inputs: The example without values, from `describe_inputs`.
        locations: The values that cross each cut, from `Splitter.export_locations`.
        continues: Whether the same stages also compute the next steps of a sequence.
        is_first: Whether they compute the first step of a sequence.
    """

    at: list[str]
    inputs: dict[str, Any]
    locations: list[list[list[Any]]]
    continues: bool = False
    is_first: bool = True


def describe_inputs(model: nn.Module, example: Inputs, state_classes: tuple[type, ...] = ()) -> dict[str, Any]:
    """Describe the structure, shapes, dtypes and plain values of a model's arguments.

    Raises:
        Unsupported: They hold an object that cannot be described.
    """
    seen: dict[int, int] = {}
    with as_state(state_classes):
        described = {name: _describe(value, name, seen) for name, value in named_arguments(model, example).items()}
    return {
        "args": list(described.values())[: len(example.args)],
        "kwargs": {name: described[name] for name in example.kwargs},
    }


def _describe(value: Any, path: str, seen: dict[int, int]) -> Any:
    """Describe an input; a tensor or state that occurs again by its rank among the distinct ones."""
    if isinstance(value, Tensor) or is_state(value):
        if id(value) in seen:
            return {"repeats": seen[id(value)]}
        seen[id(value)] = len(seen)
        if isinstance(value, Tensor):
            return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        return {"state": name, "parts": to_plain(describe_state(value), compact=True)}
    if isinstance(value, bool | int | float | str | None):
        return {"value": value}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_describe(item, f"{path}[{index}]", seen) for index, item in enumerate(value)]}
    if type(value) is dict:
        return {"dict": [[key, _describe(item, f"{path}[{key!r}]", seen)] for key, item in value.items()]}
    raise Unsupported(
        f"cannot save or send {path} of the example: expected tensors, numbers, strings, lists, tuples, dicts and states, "
        f"got a {type(value).__name__}"
    )


def restore_inputs(described: dict[str, Any], model: nn.Module) -> Inputs:
    """The arguments that `describe_inputs` described, with meta tensors.

    Raises:
        ValueError, KeyError, TypeError: It is no such description.
    """
    seen: list[Any] = []
    args = [_restore(value, seen, model) for value in described["args"]]
    return Inputs(*args, **{name: _restore(value, seen, model) for name, value in described["kwargs"].items()})


def _restore(value: dict[str, Any], seen: list[Any], model: nn.Module) -> Any:
    if "repeats" in value:
        return seen[value["repeats"]]
    if "shape" in value:
        if value["dtype"] not in DTYPES:
            raise ValueError(f"torch {torch.__version__} has no dtype {value['dtype']!r:.80}")
        seen.append(torch.empty(value["shape"], dtype=DTYPES[value["dtype"]], device="meta"))
        return seen[-1]
    if "state" in value:
        seen.append(restore_state(value["state"], value["parts"], model))
        return seen[-1]
    if "value" in value:
        return value["value"]
    if "dict" in value:
        return {key: _restore(item, seen, model) for key, item in value["dict"]}
    ((kind, items),) = value.items()
    return {"list": list, "tuple": tuple}[kind](_restore(item, seen, model) for item in items)


def restore_state(name: str, parts: Any, model: nn.Module) -> Any:
    """A state object of a class of the model's package; its tensors are on meta, but for a few integers."""

    def make_tensor(spec: PlaceholderSpec, _: Path) -> Tensor:
        return torch.empty(spec.shape, dtype=PLACEHOLDER_DTYPES[spec.dtype], device="meta")

    with as_state((base_class(find_state_class(name, model)),)):
        return apply_changes(None, parse_changes(parts), None, make_tensor)


def find_state_class(name: str, model: nn.Module) -> type:
    """The class of a state object by its qualified name, in a package that a class of the model comes from.

    Raises:
        ValueError: There is none.
    """
    module, _, qualified = name.rpartition(".")
    packages = {type(one).__module__.partition(".")[0] for one in model.modules()}
    found = getattr(sys.modules.get(module), qualified, None)
    is_allowed = module.partition(".")[0] in packages - {"torch", "builtins"}
    if not isinstance(found, type) or not is_allowed or not is_plain_class(found):
        raise ValueError(f"expected a class of states from {', '.join(sorted(packages))}, got {name!r:.80}")
    return found
