"""The one rule for what `inputs` means, wherever a model is to be run."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from microtome.errors import BadInputs
from microtome.units import shape

_PART = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")


class Inputs:
    """The arguments of one run of a model, positional and keyword.

    `Inputs.of` takes what users may give: a tensor, a tuple of positional arguments, a dict of keyword arguments, an
    `Inputs`, or a text of shapes. Anything else is the model's one positional argument.

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
        """Turn what the user gave into arguments. Tensors of a string are on the device, on `meta` without values."""
        if isinstance(inputs, Inputs):
            return inputs
        if isinstance(inputs, str):
            return _parse(inputs, device)
        if isinstance(inputs, dict):
            if not all(isinstance(name, str) for name in inputs):
                raise BadInputs(f"a dict of inputs has the names of arguments as keys, got {list(inputs)!r}")
            return cls(**inputs)
        # A named tuple is somebody's structure, and so one argument.
        return cls(*inputs) if type(inputs) is tuple else cls(inputs)

    def run(self, model: nn.Module) -> Any:
        """Call the model with these arguments."""
        return model(*self.args, **self.kwargs)

    def to(self, device: str | torch.device) -> Inputs:
        """The same arguments, with their tensors on a device."""
        return Inputs(*_to(self.args, device), **_to(self.kwargs, device))

    def __repr__(self) -> str:
        parts = [_describe(value) for value in self.args]
        parts += [f"{name}={_describe(value)}" for name, value in self.kwargs.items()]
        return f"Inputs({', '.join(parts)})"


def _parse(text: str, device: str) -> Inputs:
    """Tensors of the shapes in a text such as `1x3x224x224:bfloat16, mask=1x77:bool`, the same in every run."""
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    if "," in text and all(part.strip().isdecimal() for part in text.split(",")):
        meant = "x".join(part.strip() for part in text.split(","))
        raise BadInputs(f"commas stand between inputs, and 'x' between sizes: did you mean {meant!r}?")
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise BadInputs(
                f"cannot read {part.strip()!r} in the inputs {text!r}: write a shape and, if not float32, a dtype, "
                "such as '1x3x224x224', '1x77:int64' or 'input_ids=1x128:int64', several with commas between"
            )
        tensor = _tensor(
            [int(size) for size in match["shape"].split("x")], match["dtype"] or "float32", generator, device
        )
        if match["name"] in kwargs:
            raise BadInputs(f"the input {match['name']!r} is given twice in {text!r}")
        if match["name"]:
            kwargs[match["name"]] = tensor
        elif kwargs:
            raise BadInputs(f"positional inputs come before named ones: {part.strip()!r} in {text!r}")
        else:
            args.append(tensor)
    return Inputs(*args, **kwargs)


def _tensor(shape: list[int], name: str, generator: torch.Generator, device: str) -> Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInputs(f"{name!r} is not a dtype of torch: write float32, bfloat16, int64, bool or another")
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)
        return torch.zeros(shape, dtype=dtype, device=device)  # an index that every embedding has
    except RuntimeError as error:
        text = "x".join(map(str, shape))
        raise BadInputs(f"there is no room for an input of {text}: give torch.empty(..., device='meta')") from error


def _to(value: Any, device: str | torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _to(item, device) for name, item in value.items()}
    return type(value)(_to(item, device) for item in value) if type(value) in (list, tuple) else value


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
    except Exception:  # noqa: BLE001  somebody else's code
        return f"<{type(value).__name__}>"


def device_of(model: nn.Module) -> str:
    """Return the device of the model's first tensor; the CPU if it has none."""
    return next((str(tensor.device) for tensor in chain(model.parameters(), model.buffers())), "cpu")
