"""Tensors that were not sent: they have a shape, and whoever asks for their values is told so."""

from __future__ import annotations

from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from microtome.engine.function_mode import READS
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.torch_internals import (
    HigherOrderOperator,
    disable_current_modes,
    disabled_torch_function,
    make_wrapper_subclass,
    schema_of,
)
from microtome.errors import Unsupported, describe_error
from microtome.trace.op_schema import op_schema

_as_tensors: Any = disabled_torch_function
#: Operators that take of their first argument its shape alone.
_SHAPE_ONLY = "new_empty new_zeros new_ones new_full new_empty_strided empty_like zeros_like ones_like full_like"
SHAPE_ONLY = frozenset(f"aten.{name}.default" for name in _SHAPE_ONLY.split())


_INDEX = torch.ops.aten.index.Tensor
_READ_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: What chooses places in a tensor: how many there are depends on its values.
MASKS = (torch.bool, torch.uint8)


def reads_values(func: Any) -> bool:
    """Whether an operator needs the values of its inputs, even for the shapes of its outputs.

    Not `index`, of which masks alone are read, and operators on functions always.
    """
    if func is _INDEX:
        return False
    return isinstance(func, HigherOrderOperator) or bool(_READ_TAGS.intersection(getattr(func, "tags", ())))


@cache
def operator_named(name: str) -> Any:
    """The operator that is called so in a trace; None: there is none, such as for a function that is shown whole."""
    space, _, rest = name.partition(".")
    if hasattr(torch.ops.higher_order, rest):
        return getattr(torch.ops.higher_order, rest)
    found: Any = getattr(torch.ops, space, None)
    for part in rest.split("."):
        found = getattr(found, part, None)
    return found


class PlaceholderRead(Unsupported):
    """The values of a ghost were asked for.

    Attributes:
        ghost: The ghost.
    """

    def __init__(self, message: str, ghost: Placeholder) -> None:
        super().__init__(message)
        self.ghost = ghost


class Placeholder(Tensor):
    """A tensor without values, on a device of its own. What is computed from it is a ghost, and costs nothing.

    A ghost may come to life: when a call that is left out would have written into it, its values then are known.

    Attributes:
        of: What it stands for.
        source: Where that is found in a run.
        alive: The tensor that it has become.
    """

    of: str
    source: Any
    alive: Tensor | None

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, of: str, source: Any = None) -> Self:
        made: Self = make_wrapper_subclass(cls, meta, device)
        made.of = of
        made.source = source
        made.alive = None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<Ghost of {self.of}, {tuple(self.shape)}>"

    def _living(self, how: str) -> Tensor:
        """Return the tensor that it has become, for what torch does without an operator."""
        if self.alive is None:
            raise PlaceholderRead(f"{how} reads values of {self.of}, which did not cross the cut", self)
        return self.alive

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READS and len(args) > READS[func] and isinstance(read := args[READS[func]], Placeholder):
            args = (*args[: READS[func]], read._living(func.__name__), *args[READS[func] + 1 :])
        return _as_tensors(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = map_tensors(awake, (args, kwargs or {}))
        ghosts = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, Placeholder)]
        if not ghosts:
            return func(*args, **kwargs)
        first = ghosts[0]
        if func is _INDEX:
            args = (args[0], _without_masks(args[1]))
        if reads_values(func):
            raise PlaceholderRead(f"{func} reads values of {first.of}, which did not cross the cut", first)
        written = op_schema(func).written(args, kwargs)
        real = [tensor for tensor in written if not isinstance(tensor, Placeholder)]
        if real:
            message = f"{func} would write {first.of}, which did not cross the cut, into a tensor that did"
            raise PlaceholderRead(message, first)
        if written:  # what an in-place operator returns
            return written[0] if len(schema_of(func).returns) == 1 else tuple(written)
        if str(func) in SHAPE_ONLY:
            return func(*map_tensors(_empty, args), **kwargs)
        device = kwargs.get("device") or first.device
        with disable_current_modes():
            meta_args, meta_kwargs = map_tensors(_meta, (args, kwargs), _on_meta)
            try:
                output = func(*meta_args, **meta_kwargs)
            except (RuntimeError, NotImplementedError) as error:  # it may want what meta tensors are not
                message = f"{func} cannot do without the values of {first.of}, which did not cross the cut"
                raise PlaceholderRead(f"{message}: {describe_error(error)}", first) from error
        return map_tensors(lambda tensor: Placeholder(tensor, torch.device(device), first.of, first.source), output)


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """The same places by their numbers, so that the shape of the result is known without values."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in MASKS:
            found.append(index)
        else:
            found += index.nonzero().unbind(-1)  # raises if it is a ghost
    return found


def awake(tensor: Tensor) -> Tensor:
    """Return the tensor that a placeholder has become; any other tensor as it is."""
    return tensor.alive if isinstance(tensor, Placeholder) and tensor.alive is not None else tensor


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else value
