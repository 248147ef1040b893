"""Placeholders in a state object: tensors whose values another stage has, and what was done to them since."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from microtome.engine.pytree import map_tensors, tensors_in
from microtome.split.boundary.schema import PLACEHOLDER_DTYPES, PlaceholderSpec
from microtome.split.execution.placeholder import Placeholder
from microtome.split.state.contents import Path, format_path
from microtome.trace.op_schema import op_schema


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
        history: The operators since the last step; None: it depends on more than this part.
    """

    path: Path
    history: tuple[StateOp, ...] | None

    @classmethod
    def make(cls, spec: PlaceholderSpec, path: Path, device: torch.device | None, owner: str) -> Self:
        shape, dtype = spec.shape, PLACEHOLDER_DTYPES[spec.dtype]
        if spec.strides is None:
            meta = torch.empty(shape, dtype=dtype, device="meta")
        else:
            meta = torch.empty_strided(shape, spec.strides, dtype=dtype, device="meta")
        placeholder = cls(meta, device or torch.device("cpu"), f"the state at {format_path(path)}, written by {owner}")
        placeholder.path, placeholder.history = path, ()
        return placeholder

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = super().__torch_dispatch__(func, types, args, kwargs)
        first = args[0] if args else None
        others = (args[1:], kwargs)
        is_own = isinstance(first, StatePlaceholder) and not _has_placeholders(others)
        written = [tensor for tensor in op_schema(func).written(args, kwargs) if isinstance(tensor, StatePlaceholder)]
        if written:
            for tensor in written:
                tensor.history = _extend(tensor, StateOp(func, *others)) if is_own and tensor is first else None
            return output

        def record(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, Placeholder) or isinstance(tensor, StatePlaceholder) or not is_own:
                return tensor
            assert isinstance(first, StatePlaceholder)
            result = cls(tensor, tensor.device, tensor.owner)
            result.path = first.path
            result.history = _extend(first, StateOp(func, *others)) if isinstance(output, Tensor) else None
            return result

        return map_tensors(record, output)


def _extend(placeholder: StatePlaceholder, op: StateOp) -> tuple[StateOp, ...] | None:
    return None if placeholder.history is None else (*placeholder.history, op)


def _has_placeholders(value: Any) -> bool:
    return any(isinstance(tensor, Placeholder) for tensor in tensors_in(value))
