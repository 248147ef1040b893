"""Describe a split in JSON, so that another process can make the same stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
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
from microtome.split.state.contents import apply_changes, describe_state
from microtome.split.state.snapshot import Path

#: The most elements of a tensor that is described by value.
_MAX_VALUES = 1 << 16


class SplitDescription(NamedTuple):
    """The cuts of a model and the example that it was split on.

    Attributes:
        at: The addresses of the cuts.
        inputs: The example, from `describe_inputs`.
        locations: The values that cross each cut, from `Splitter.export_locations`.
        continues: Whether the same stages also compute the next steps of a sequence.
        first_kind: See `Variant.first_kind`.
        state: The names of the arguments that the user says are state.
    """

    at: list[str]
    inputs: dict[str, Any]
    locations: list[list[list[Any]]]
    continues: bool = False
    first_kind: str | None = None
    state: tuple[str, ...] = ()


def describe_inputs(
    model: nn.Module, example: Inputs, state_classes: tuple[type, ...] = (), sent: Iterable[Tensor] = ()
) -> dict[str, Any]:
    """Describe the structure, shapes, dtypes and plain values of a model's arguments.

    Args:
        sent: Inputs that cross a cut, so that the other side knows them: integers among them, such as masks, are
            described by value, since models branch on them.

    Raises:
        Unsupported: They hold an object that cannot be described.
    """
    describer = _Describer(sent)
    with as_state(state_classes):
        arguments = named_arguments(model, example).items()
        described = {name: describer.describe(value, name) for name, value in arguments}
    return {
        "args": list(described.values())[: len(example.args)],
        "kwargs": {name: described[name] for name in example.kwargs},
    }


class _Describer:
    """Describes arguments; a tensor or state that occurs again by its rank among the distinct ones."""

    def __init__(self, sent: Iterable[Tensor]) -> None:
        self._by_value = {id(tensor) for tensor in sent if _is_mask(tensor)}
        self._seen: dict[int, int] = {}

    def describe(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor) or is_state(value):
            if id(value) in self._seen:
                return {"repeats": self._seen[id(value)]}
            self._seen[id(value)] = len(self._seen)
            if isinstance(value, Tensor):
                return self._describe_tensor(value)
            return {"state": class_name(value), "parts": to_plain(describe_state(value), compact=True)}
        if isinstance(value, bool | int | float | str | None):
            return {"value": value}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.describe(item, f"{path}[{index}]") for index, item in enumerate(value)]}
        if type(value) is dict:
            return {"dict": [[key, self.describe(item, f"{path}[{key!r}]")] for key, item in value.items()]}
        if _is_output_class(type(value)):
            items = {name: self.describe(item, f"{path}.{name}") for name, item in value.items()}
            return {"output": class_name(value), "items": items}
        raise Unsupported(
            f"cannot save or send {path} of the example: expected tensors, numbers, strings, lists, tuples, dicts and "
            f"states, got a {type(value).__name__}"
        )

    def _describe_tensor(self, tensor: Tensor) -> dict[str, Any]:
        spec: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        if id(tensor) in self._by_value:
            spec["values"] = tensor.reshape(-1).tolist()
        return spec


def _is_mask(tensor: Tensor) -> bool:
    is_integer = tensor.dtype in (torch.bool, torch.int32, torch.int64)
    return is_integer and tensor.numel() <= _MAX_VALUES and not tensor.is_meta


def restore_inputs(
    described: dict[str, Any], model: nn.Module, device: torch.device | None = None, max_bytes: int | None = None
) -> Inputs:
    """The arguments that `describe_inputs` described, with tensors of ones where values were not.

    Args:
        device: The device of the tensors; None: meta.
        max_bytes: The most bytes of the tensors; None: any number.

    Raises:
        ValueError, KeyError, TypeError: It is no such description.
    """
    restorer = _Restorer(model, device, max_bytes)
    args = [restorer.restore(value) for value in described["args"]]
    return Inputs(*args, **{name: restorer.restore(value) for name, value in described["kwargs"].items()})


class _Restorer:
    """Makes arguments from their description."""

    def __init__(self, model: nn.Module, device: torch.device | None, max_bytes: int | None) -> None:
        self._model = model
        self._device = device
        self._free_bytes = max_bytes
        self._seen: list[Any] = []

    def restore(self, value: dict[str, Any]) -> Any:
        if "repeats" in value:
            return self._seen[value["repeats"]]
        if "shape" in value:
            if value["dtype"] not in DTYPES:
                raise ValueError(f"torch {torch.__version__} has no dtype {value['dtype']!r:.80}")
            tensor = self._make_tensor(value["shape"], DTYPES[value["dtype"]])
            if "values" in value:
                tensor = torch.tensor(value["values"], dtype=tensor.dtype, device=self._device).reshape(tensor.shape)
            self._seen.append(tensor)
            return tensor
        if "state" in value:
            self._seen.append(self._restore_state(value["state"], value["parts"]))
            return self._seen[-1]
        if "output" in value:
            cls = find_model_class(value["output"], self._model, _is_output_class)
            return cls(**{name: self.restore(item) for name, item in value["items"].items()})
        if "value" in value:
            return value["value"]
        if "dict" in value:
            return {key: self.restore(item) for key, item in value["dict"]}
        ((kind, items),) = value.items()
        return {"list": list, "tuple": tuple}[kind](map(self.restore, items))

    def _restore_state(self, name: str, parts: Any) -> Any:
        def make_tensor(spec: PlaceholderSpec, _: Path) -> Tensor:
            return self._make_tensor(spec.shape, PLACEHOLDER_DTYPES[spec.dtype])

        with as_state((base_class(find_model_class(name, self._model, is_plain_class)),)):
            return apply_changes(None, parse_changes(parts), self._device, make_tensor)

    def _make_tensor(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        if self._device is None:
            return tensor
        if self._free_bytes is not None:
            self._free_bytes -= tensor.nbytes
            if self._free_bytes < 0:
                raise ValueError(f"expected an example of fewer bytes, got one with {dtype} of shape {shape}")
        return torch.ones(shape, dtype=dtype, device=self._device)


def class_name(value: Any) -> str:
    """The name by which `find_model_class` finds the class of an object."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_output_class(cls: type) -> bool:
    """Whether a class is a dict with fields, as the outputs of transformers are."""
    return issubclass(cls, dict) and is_dataclass(cls)


def find_model_class(name: str, model: nn.Module, is_allowed: Callable[[type], bool]) -> type:
    """The class of this name, in a package that a class of the model comes from.

    Raises:
        ValueError: There is none.
    """
    module, _, qualified = str(name).rpartition(".")
    packages = {type(one).__module__.partition(".")[0] for one in model.modules()} - {"torch", "builtins"}
    found = getattr(sys.modules.get(module), qualified, None)
    if not isinstance(found, type) or module.partition(".")[0] not in packages or not is_allowed(found):
        raise ValueError(f"expected a class of inputs from {', '.join(sorted(packages))}, got {name!r:.80}")
    return found
