"""The arguments of a model, from any form in which `inputs` may be passed."""

from __future__ import annotations

import copy
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn

from microtome.errors import BadInputs, MicrotomeError
from microtome.units import shape, some

#: The beginning of a note of an error of the model, before its inputs.
RAN_ON = "The model ran on "
_PART = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")


#: In an error of torch about the dtype of indices.
_EXPECTS_INTEGERS = re.compile(r"\b(Long|Int|int64|integers?|indices)\b")


#: Of a `forward` with one parameter that was passed others by name.
_STRUCTURE = (
    ". If it takes a dict as its one argument: pass mt.Inputs({…}); on the command line, define example_inputs as that "
    "in the model's class or file"
)

_NO_INPUTS = "No inputs were passed to the {}: pass a tensor, a tuple, a dict, or a shape such as '1x3x224x224'."


def no_inputs_error(model: nn.Module) -> BadInputs:
    """The error for a model without example inputs."""
    return BadInputs(_NO_INPUTS.format(type(model).__name__) + " mt.Inputs(None) passes None.")


class Inputs:
    """The positional and keyword arguments of a model, which `Inputs(...)` passes on as they are.

    `Inputs.of` also accepts:

    - a tensor, or a tuple of positional arguments;
    - a dict, or another mapping such as a `BatchEncoding` of transformers, of keyword arguments;
    - a numpy array, alone or in one of these: it becomes a tensor;
    - a shape, such as `(1, 3, 224, 224)` or `"1x3x224x224"`, or a list, tuple or dict of shapes. `":int64"` at the end
      of a string sets the dtype.

    Anything else becomes the only positional argument. Tensors that are created from shapes and arrays have the device
    of the model and, if they are floating-point, its dtype.

    >>> Inputs.of({"x": None}).kwargs
    {'x': None}
    >>> Inputs.of("1x3x8x8, 1x77:int64")
    Inputs(1x3x8x8:float32, 1x77:int64)
    >>> Inputs.of([(1, 3, 8, 8), "1x77:int64"])
    Inputs(1x3x8x8:float32, 1x77:int64)
    >>> Inputs.of({"x": (4, 2)}, model=nn.Linear(2, 2).bfloat16())
    Inputs(x=4x2:bfloat16)

    Attributes:
        created_from: The shapes from which the tensors were created; None if they were passed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs
        self.created_from: Any = None

    @classmethod
    def of(cls, inputs: Any, model: nn.Module | None = None, *, device: str | None = None) -> Inputs:
        """Convert `inputs` to arguments.

        Args:
            model: The model, whose dtype and device created tensors have.
            device: The device of created tensors, if not that of the model.

        Raises:
            BadInputs: They are invalid; or None, and the model takes an argument that has no default.
        """
        if isinstance(inputs, Inputs):
            return inputs
        if isinstance(inputs, Tensor):  # by far the most frequent
            return cls(inputs)
        if inputs is None and model is not None and any(map(_is_required, _parameters(model).values())):
            raise no_inputs_error(model)
        create = _InputFactory(device or ("cpu" if model is None else device_of(model)), _dtype_of(model))
        if isinstance(inputs, str):
            return create.parse(inputs)
        if isinstance(inputs, Mapping):
            if not all(isinstance(name, str) for name in inputs):
                raise BadInputs(f"expected the names of arguments as keys of a dict of inputs, got {list(inputs)!r}")
            return create.arguments((), dict(inputs))
        if _is_shape(inputs):
            return create.arguments((inputs,), {})
        if isinstance(inputs, list) and inputs and all(map(_is_shape_or_text, inputs)):
            return create.arguments(tuple(inputs), {})
        # A named tuple is a structure of the model, and so a single argument.
        return create.arguments(inputs if type(inputs) is tuple else (inputs,), {})

    def run(self, model: nn.Module) -> Any:
        """Call the model with these arguments; notes of an error name those that may not be what was meant, or all."""
        try:
            return model(*self.args, **self.kwargs)
        except Exception as error:
            notes = list(self._notes(model, error))
            if not notes and not isinstance(error, MicrotomeError):
                notes = [f"{RAN_ON}{self!r:.400}."]
            for note in notes:
                error.add_note(note)
            raise

    def _notes(self, model: nn.Module, error: Exception) -> Iterator[str]:
        if self.created_from is not None and not _is_text(self.created_from):
            yield (
                f"The inputs {self.created_from!r} were taken for shapes: the model ran on {self!r}. mt.Inputs(...) "
                "passes any values as they are."
            )
        if _parameters(model) and all(value is None for value in (*self.args, *self.kwargs.values())):
            yield _NO_INPUTS.format(type(model).__name__)
        if self._is_list_of_tensors and re.search(r"\blist\b", str(error)):
            yield "The list of tensors is one argument: a tuple passes each as an argument of its own."
        else:
            yield from self._name_non_tensors(model, str(error))
        created = (*self.args, *self.kwargs.values()) if self.created_from is not None else ()
        is_float = any(isinstance(value, Tensor) and value.is_floating_point() for value in created)
        if is_float and _EXPECTS_INTEGERS.search(str(error)):
            yield "Inputs of a shape without a dtype have that of the model's weights: '1x128:int64' is for token ids."
        parameters = _parameters(model)
        structure = _STRUCTURE if len(parameters) == 1 else ""
        for name in self._unknown_names(parameters, str(error)):
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {some(list(parameters), 8)}"
            yield f"forward of {type(model).__name__} has no parameter {name!r}: {hint}{'' if near else structure}"
            structure = structure if near else ""  # once

    def _unknown_names(self, parameters: Iterable[str], message: str) -> Iterator[str]:
        """The names that `forward` lacks and that the error may be about: it names them, or the first one is missing.

        A `forward` with `**kwargs` may take further names, such as the flags that `generate` passes.
        """
        parameters = list(parameters)
        lacks_first = bool(parameters) and not self.args and parameters[0] not in self.kwargs
        for name, value in self.kwargs.items():
            is_flag = isinstance(value, bool | int | float | str | None)
            is_named = re.search(rf"\b{re.escape(name)}\b", message) is not None
            if parameters and name not in parameters and (is_named or (lacks_first and not is_flag)):
                yield name

    @property
    def _is_list_of_tensors(self) -> bool:
        value = self.args[0] if len(self.args) == 1 and not self.kwargs else None
        return isinstance(value, list) and bool(value) and all(isinstance(item, Tensor) for item in value)

    def _name_non_tensors(self, model: nn.Module, message: str) -> Iterator[str]:
        """Name the arguments of a type that the message of an error mentions, where a tensor was needed."""
        positional = zip(chain(_parameters(model), count()), self.args, strict=False)
        for name, value in (*positional, *self.kwargs.items()):
            kind = type(value).__name__
            if isinstance(value, list | tuple | int | float) and re.search(rf"\bnot {kind}\b|'{kind}' object", message):
                where = repr(name) if isinstance(name, str) else f"argument {name}"
                yield f"The input {where} is of type {kind}: if the model expects a tensor, pass torch.tensor(...)."

    def to(self, device: str | torch.device) -> Inputs:
        """Return the same arguments with their tensors on a device, also inside named tuples and dataclasses."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device)

        return self.with_arguments(_map_tensors(move, self.args), _map_tensors(move, self.kwargs))

    def cast_to(self, model: nn.Module) -> Inputs:
        """Return the same arguments on the device of the model, with floating-point tensors in its dtype."""
        dtype = _dtype_of(model)

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(device_of(model), dtype if tensor.is_floating_point() else None)

        return self.with_arguments(_map_tensors(cast, self.args), _map_tensors(cast, self.kwargs))

    def with_arguments(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Inputs:
        """Return other arguments of the same origin, such as copies."""
        copied = Inputs(*args, **kwargs)
        copied.created_from = self.created_from
        return copied

    def __repr__(self) -> str:
        parts = [_describe(value) for value in self.args]
        parts += [f"{name}={_describe(value)}" for name, value in self.kwargs.items()]
        return f"Inputs({', '.join(parts)})"


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of `forward` by name, without variadic ones."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in variadic}


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


class _InputFactory:
    """Creates deterministic tensors from shapes, and converts numpy arrays."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(0)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Create the arguments: from shapes if all of them are shapes."""
        values = (*args, *kwargs.values())
        are_shapes = bool(values) and all(map(_is_shape_or_text, values))
        convert = self._from_shape if are_shapes else self._from_array
        inputs = Inputs(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})
        if are_shapes:
            inputs.created_from = kwargs or (args if len(args) > 1 else args[0])
        return inputs

    def parse(self, text: str) -> Inputs:
        """Parse a string such as `1x3x224x224:bfloat16, mask=1x77:bool`."""
        args: list[Tensor] = []
        kwargs: dict[str, Tensor] = {}
        if "," in text and all(part.strip().isdecimal() for part in text.split(",")):
            suggestion = "x".join(part.strip() for part in text.split(","))
            raise BadInputs(f"commas separate inputs, and 'x' separates sizes: did you mean {suggestion!r}?")
        for part in text.split(","):
            match = _PART.fullmatch(part.strip())
            if match is None:
                raise BadInputs(
                    f"cannot read {part.strip()!r} in the inputs {text!r}: write a shape and, if not the model's, a "
                    "dtype, such as '1x3x224x224', '1x77:int64' or 'input_ids=1x128:int64', separated by commas"
                )
            tensor = self._create([int(size) for size in match["shape"].split("x")], match["dtype"])
            if match["name"] in kwargs:
                raise BadInputs(f"the input {match['name']!r} appears twice in {text!r}")
            if match["name"]:
                kwargs[match["name"]] = tensor
            elif kwargs:
                raise BadInputs(f"expected positional inputs before named ones, got {part.strip()!r} last in {text!r}")
            else:
                args.append(tensor)
        inputs = Inputs(*args, **kwargs)
        inputs.created_from = text
        return inputs

    def _from_shape(self, value: Any) -> Tensor:
        if not isinstance(value, str):
            return self._create(list(value), None)
        inputs = self.parse(value)
        if len(inputs.args) != 1 or inputs.kwargs:
            raise BadInputs(f"expected one shape in each string of a list or dict of inputs, got {value!r}")
        tensor: Tensor = inputs.args[0]
        return tensor

    def _from_array(self, value: Any) -> Any:
        if not _is_array(value):
            return value
        if value.dtype.kind not in "fiubc":
            raise BadInputs(f"expected an array of numbers, got {value.dtype}: mt.Inputs(...) passes it as it is")
        # A copy: the array may be read-only, reversed, or of another byte order.
        tensor = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else None)

    def _create(self, shape: list[int], dtype_name: str | None) -> Tensor:
        dtype = self._dtype if dtype_name is None else getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise BadInputs(f"expected a dtype of torch, such as float32, bfloat16, int64 or bool, got {dtype_name!r}")
        if min(shape, default=0) < 0:
            raise BadInputs(f"expected sizes of 0 or more in the shape of an input, got {tuple(shape)}")
        if self._device == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        try:
            if dtype.is_floating_point or dtype.is_complex:
                return torch.randn(shape, generator=self._generator, device="cpu").to(self._device, dtype)
            return torch.zeros(shape, dtype=dtype, device=self._device)  # a valid index of every embedding
        except RuntimeError as error:
            hint = "pass torch.empty(..., device='meta')"
            raise BadInputs(f"not enough memory for an input of {'x'.join(map(str, shape))}: {hint}") from error


def _is_shape(value: Any) -> bool:
    """Whether this is a tuple, list or `torch.Size` of integers."""
    is_sequence = type(value) in (tuple, list, torch.Size)
    return is_sequence and bool(value) and all(type(size) is int for size in value)


def _is_shape_or_text(value: Any) -> bool:
    return _is_shape(value) or (isinstance(value, str) and _PART.fullmatch(value.strip()) is not None)


def _is_text(created_from: Any) -> bool:
    """Whether shapes were written as strings, and not as sequences of integers, which may have been meant as values."""
    parts = created_from.values() if isinstance(created_from, dict) else created_from
    return isinstance(created_from, str) or all(isinstance(part, str) for part in parts)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(function, item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple
        return value._make(_map_tensors(function, item) for item in value)
    moved: Any
    if isinstance(value, dict):
        moved = copy.copy(value)
        for name, item in value.items():
            moved[name] = _map_tensors(function, item)
        return moved
    if is_dataclass(value) and not isinstance(value, type):
        moved = copy.copy(value)
        for field in fields(value):  # set past the `__setattr__` of a frozen one
            object.__setattr__(moved, field.name, _map_tensors(function, getattr(value, field.name)))
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
        if getattr(type(value), "__repr__", None) is not object.__repr__:  # that has an address
            return repr(value)
    except Exception:  # noqa: BLE001  a foreign __repr__ may raise anything
        pass
    return f"<{type(value).__name__}>"


def device_of(model: nn.Module) -> str:
    """Return the device of the model's first tensor; the CPU if it has none."""
    return next((str(tensor.device) for tensor in chain(model.parameters(), model.buffers())), "cpu")


def _dtype_of(model: nn.Module | None) -> torch.dtype:
    """Return the dtype of the model's first floating-point tensor; float32 if it has none."""
    tensors = () if model is None else chain(model.parameters(), model.buffers())
    dtypes = (tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.dtype.itemsize > 1)
    return next(dtypes, torch.float32)
