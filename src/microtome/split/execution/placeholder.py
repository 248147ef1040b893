"""Tensors that did not cross a cut: they have a shape, dtype and device, and raise if their values are read."""

from __future__ import annotations

from collections.abc import Sequence
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
from microtome.split.cuts.crossing import ValueLocation
from microtome.trace.op_schema import op_schema

_call_without_torch_function: Any = disabled_torch_function
#: Operators that use only the shape of their first argument.
_SHAPE_ONLY = "new_empty new_zeros new_ones new_full new_empty_strided empty_like zeros_like ones_like full_like"
SHAPE_ONLY = frozenset(f"aten.{name}.default" for name in _SHAPE_ONLY.split())

_INDEX = torch.ops.aten.index.Tensor
_READ_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: The dtypes of masks in an index: the shape of the result depends on their values.
MASKS = (torch.bool, torch.uint8)


def reads_values(func: Any) -> bool:
    """Whether an operator needs the values of its inputs, even for the shapes of its outputs.

    False for `index`, which reads masks only; True for higher-order operators.
    """
    if func is _INDEX:
        return False
    return isinstance(func, HigherOrderOperator) or bool(_READ_TAGS.intersection(getattr(func, "tags", ())))


@cache
def operator_named(name: str) -> Any:
    """The operator of this name in a trace; None: there is none, such as for a composite function."""
    namespace, _, rest = name.partition(".")
    if hasattr(torch.ops.higher_order, rest):
        return getattr(torch.ops.higher_order, rest)
    operator: Any = getattr(torch.ops, namespace, None)
    for part in rest.split("."):
        operator = getattr(operator, part, None)
    return operator


class PlaceholderRead(Unsupported):
    """The values of a placeholder were read.

    Attributes:
        placeholder: The placeholder.
    """

    def __init__(self, message: str, placeholder: Placeholder) -> None:
        super().__init__(message)
        self.placeholder = placeholder


class Placeholder(Tensor):
    """A tensor without values that did not cross the cut; operators on it return placeholders and compute nothing.

    It is materialized when a skipped call writes to it, since its values are known from then on.

    Attributes:
        location: The location of the value in a run of the head.
        materialized: The tensor with its values; None: it has none.
    """

    _owner: str
    location: ValueLocation | None = None
    materialized: Tensor | None = None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dtype: torch.dtype,
        device: torch.device,
        owner: str,
        location: ValueLocation | None = None,
    ) -> Self:
        placeholder: Self = make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
        placeholder._owner = owner
        if location is not None:
            placeholder.location = location
        return placeholder

    @property
    def owner(self) -> str:
        """The call or operator that returned it, for messages."""
        return self._owner

    @classmethod
    def like(cls, tensor: Tensor, device: torch.device, owner: str, location: ValueLocation | None = None) -> Self:
        """A placeholder with the shape, strides and dtype of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, device, owner, location)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<Placeholder for {self.owner}, {tuple(self.shape)}>"

    def _read(self, function: str) -> Tensor:
        """The values, for functions that torch does not dispatch to operators."""
        if self.materialized is None:
            raise PlaceholderRead(f"{function} reads values of {self.owner}, which did not cross the cut", self)
        return self.materialized

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READS and len(args) > READS[func] and isinstance(read := args[READS[func]], Placeholder):
            args = (*args[: READS[func]], read._read(func.__name__), *args[READS[func] + 1 :])
        return _call_without_torch_function(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = map_tensors(unwrap, (args, kwargs or {}))
        placeholders = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, Placeholder)]
        if not placeholders:
            return func(*args, **kwargs)
        first = placeholders[0]
        if func is _INDEX:
            args = (args[0], _masks_to_indices(args[1]))
        if reads_values(func):
            raise PlaceholderRead(f"{func} reads values of {first.owner}, which did not cross the cut", first)
        written = op_schema(func).written(args, kwargs)
        if any(not isinstance(tensor, Placeholder) for tensor in written):
            message = f"{func} would write {first.owner}, which did not cross the cut, to a tensor that did"
            raise PlaceholderRead(message, first)
        if written:  # an in-place operator returns them
            return written[0] if len(schema_of(func).returns) == 1 else tuple(written)
        if str(func) in SHAPE_ONLY:
            return func(*map_tensors(_empty, args), **kwargs)
        device = kwargs.get("device") or first.device
        with disable_current_modes():
            meta_args, meta_kwargs = map_tensors(_meta, (args, kwargs), _meta_device)
            try:
                output = func(*meta_args, **meta_kwargs)
            except (RuntimeError, NotImplementedError) as error:  # such as operators without a meta kernel
                message = f"{func} needs values of {first.owner}, which did not cross the cut: {describe_error(error)}"
                raise PlaceholderRead(message, first) from error
        return map_tensors(
            lambda meta: Placeholder.like(meta, torch.device(device), first.owner, first.location), output
        )


def _masks_to_indices(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Replace masks by indices, so that the shape of the result does not depend on values."""
    converted: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in MASKS:
            converted.append(index)
        else:
            converted += index.nonzero().unbind(-1)  # raises for a placeholder
    return converted


def unwrap(tensor: Tensor) -> Tensor:
    """The tensor that a placeholder was materialized to; any other tensor unchanged."""
    return tensor.materialized if isinstance(tensor, Placeholder) and tensor.materialized is not None else tensor


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _meta_device(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else value
