"""Placeholders in a state object: tensors whose values another stage has, and what was done to them since."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.torch_internals import schema_of
from microtome.split.analysis.randomness import is_random
from microtome.split.boundary.schema import PLACEHOLDER_DTYPES, PlaceholderSpec
from microtome.split.execution.placeholder import Placeholder
from microtome.split.state.snapshot import Path, format_path
from microtome.trace.op_schema import op_schema

_CPU = torch.device("cpu")


class StateOp(NamedTuple):
    """An operator that was applied to a placeholder, as the first argument; the others are kept."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StatePlaceholder(Placeholder):
    """A placeholder for a tensor of the state, which records the operators that make another tensor of it.

    A caller may edit the state between two steps, as beam search does: `keys = keys.index_select(0, beams)`. The stage
    that has the values then runs the same operators.

    Attributes:
        path: The part of the state that it stands for.
        root: The placeholder that was there after the last step.
        base: The placeholder that it is a view of; None: it is no view.
        history: The operators since the last step; None: another stage cannot repeat them.
    """

    path: Path
    base: StatePlaceholder | None = None
    history: tuple[StateOp, ...] | None = ()
    _root: StatePlaceholder | None = None  # not itself, which would be a reference cycle

    @classmethod
    def make(cls, spec: PlaceholderSpec, path: Path, device: torch.device | None, writer: str) -> Self:
        dtype = PLACEHOLDER_DTYPES[spec.dtype]
        placeholder = cls(spec.shape, spec.strides, dtype, device or _CPU, writer)
        placeholder.path = path
        return placeholder

    @property
    def root(self) -> StatePlaceholder:
        return self if self._root is None else self._root

    @property
    def owner(self) -> str:
        """The part of the state and who wrote it, for messages; formatted when it is read, since most never are."""
        return f"the state at {format_path(self.path)}, written by {self._owner}"

    def forget_history(self) -> None:
        """Begin anew: all stages know of the operators so far."""
        self._root, self.base, self.history = None, None, ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = super().__torch_dispatch__(func, types, args, kwargs)
        first = args[0] if args else None
        written = [tensor for tensor in op_schema(func).written(args, kwargs) if isinstance(tensor, StatePlaceholder)]
        for tensor in written:
            tensor.history = tensor._extended(func, args, kwargs) if tensor is first else None
            if tensor.base is not None:  # a part of it was written to
                tensor.base.history = None
        if written or not isinstance(first, StatePlaceholder):
            return output
        is_view = any(returned.alias_info is not None for returned in schema_of(func).returns)

        def record(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, Placeholder) or isinstance(tensor, StatePlaceholder):
                return tensor
            result = cls.like(tensor, tensor.device, first._owner)
            result.path, result._root = first.path, first.root
            result.base = None if not is_view else first if first.base is None else first.base
            result.history = first._extended(func, args, kwargs) if isinstance(output, Tensor) else None
            return result

        return map_tensors(record, output)

    def _extended(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[StateOp, ...] | None:
        """The history with one more operator, whose other arguments are copied: the caller may write to them."""
        others = (args[1:], kwargs)
        if self.history is None or is_random(func, args, kwargs) or _has_placeholders(others):
            return None
        return (*self.history, StateOp(func, *map_tensors(lambda tensor: tensor.detach().clone(), others)))


def _has_placeholders(value: Any) -> bool:
    return any(isinstance(tensor, Placeholder) for tensor in tensors_in(value))
