"""The arguments of a model, from any form in which `inputs` may be passed."""

from __future__ import annotations

import copy
import re
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from microtome.errors import BadInputs
from microtome.units import shape

_PART = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")


class Inputs:
    """The positional and keyword arguments of a model.

    `Inputs.of` accepts a tensor, a tuple of positional arguments, a dict of keyword arguments, an `Inputs`, or a string
    of shapes. Anything else becomes the only positional argument.

    >>> Inputs.of({"x": None}).kwargs
    {'x': None}
    >>> [tuple(tensor.shape) for tensor in Inputs.of("1x3x8x8, 1x77:int64").args]
    [(1, 3, 8, 8), (1, 77)]
    >>> Inputs.of("input_ids=2x4:int64").kwargs["input_ids"].dtype
    torch.int64
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    @classmethod
    def of(cls, inputs: Any, *, device: str = "cpu") -> Inputs:
        """Convert `inputs` to arguments; tensors of a string of shapes are created on the device."""
        if isinstance(inputs, Inputs):
            return inputs
        if isinstance(inputs, str):
            return _parse(inputs, device)
        if isinstance(inputs, dict):
            if not all(isinstance(name, str) for name in inputs):
                raise BadInputs(f"expected the names of arguments as keys of a dict of inputs, got {list(inputs)!r}")
            return cls(**inputs)
        # A named tuple is a structure of the model, and so a single argument.
        return cls(*inputs) if type(inputs) is tuple else cls(inputs)

    def run(self, model: nn.Module) -> Any:
        """Call the model with these arguments."""
        return model(*self.args, **self.kwargs)

    def to(self, device: str | torch.device) -> Inputs:
        """Return the same arguments with their tensors on a device, also inside named tuples and dataclasses."""
        return Inputs(*_to(self.args, device), **_to(self.kwargs, device))

    def __repr__(self) -> str:
        parts = [_describe(value) for value in self.args]
        parts += [f"{name}={_describe(value)}" for name, value in self.kwargs.items()]
        return f"Inputs({', '.join(parts)})"


def _parse(text: str, device: str) -> Inputs:
    """Create deterministic tensors from a string such as `1x3x224x224:bfloat16, mask=1x77:bool`."""
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    if "," in text and all(part.strip().isdecimal() for part in text.split(",")):
        suggestion = "x".join(part.strip() for part in text.split(","))
        raise BadInputs(f"commas separate inputs, and 'x' separates sizes: did you mean {suggestion!r}?")
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise BadInputs(
                f"cannot read {part.strip()!r} in the inputs {text!r}: write a shape and, if not float32, a dtype, "
                "such as '1x3x224x224', '1x77:int64' or 'input_ids=1x128:int64', separated by commas"
            )
        tensor = _tensor(
            [int(size) for size in match["shape"].split("x")], match["dtype"] or "float32", generator, device
        )
        if match["name"] in kwargs:
            raise BadInputs(f"the input {match['name']!r} appears twice in {text!r}")
        if match["name"]:
            kwargs[match["name"]] = tensor
        elif kwargs:
            raise BadInputs(f"expected positional inputs before named ones, got {part.strip()!r} last in {text!r}")
        else:
            args.append(tensor)
    return Inputs(*args, **kwargs)


def _tensor(shape: list[int], name: str, generator: torch.Generator, device: str) -> Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInputs(f"expected a dtype of torch, such as float32, bfloat16, int64 or bool, got {name!r}")
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)
        return torch.zeros(shape, dtype=dtype, device=device)  # a valid index of every embedding
    except RuntimeError as error:
        text = "x".join(map(str, shape))
        raise BadInputs(f"not enough memory for an input of {text}: pass torch.empty(..., device='meta')") from error


def _to(value: Any, device: str | torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_to(item, device) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple
        return value._make(_to(item, device) for item in value)
    moved: Any
    if isinstance(value, dict):
        moved = copy.copy(value)
        for name, item in value.items():
            moved[name] = _to(item, device)
        return moved
    if is_dataclass(value) and not isinstance(value, type):
        moved = copy.copy(value)
        for field in fields(value):  # set past the `__setattr__` of a frozen one
            object.__setattr__(moved, field.name, _to(getattr(value, field.name), device))
        return moved
    return value


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{shape(value.shape)}:{str(value.dtype).removeprefix('torch.')}"
    if type(value) in (list, tuple):
        inside = ", ".join(map(_describe, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_describe(item)}" for name, item in value.items()) + "}"
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  a foreign __repr__ may raise anything
        return f"<{type(value).__name__}>"


def device_of(model: nn.Module) -> str:
    """Return the device of the model's first tensor; the CPU if it has none."""
    return next((str(tensor.device) for tensor in chain(model.parameters(), model.buffers())), "cpu")
