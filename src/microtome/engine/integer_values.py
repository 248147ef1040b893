"""The values of integer and boolean tensors in a run on meta tensors, computed beside it.

Code branches on lengths, positions and masks. These are small, and follow from inputs and constants of their kind. So
they are known in a run that computes nothing else, and the run takes the way that it takes on real tensors.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.torch_internals import DisableTorchFunction, OpOverload, disable_current_modes

DTYPES = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
#: What has more bytes is not followed.
_MAX_BYTES = 2**24

#: By the id of a storage on meta: that storage, held weakly, and one with its values.
_memories: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.UntypedStorage]] = {}

#: They make or grow memory that holds nothing yet.
_UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        *("resize_", "resize_as_", "set_"),
    )
)
READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def copy_values(storage: torch.UntypedStorage, values: torch.UntypedStorage) -> None:
    """Know what would lie in a storage on meta: a copy of these values."""
    if values.nbytes() <= _MAX_BYTES:
        _store(storage, values.cpu() if values.device.type != "cpu" else values.clone())


def _store(storage: torch.UntypedStorage, values: torch.UntypedStorage) -> None:
    key = id(storage)
    _memories[key] = weakref.ref(storage, lambda _: _memories.pop(key, None) and None), values


def compute_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of an operator that needs values, if those of all its arguments are known; else NotImplemented."""
    if not _memories or not isinstance(func, OpOverload) or func.namespace != "aten":
        return NotImplemented
    leaves_meta = func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
    if not leaves_meta and READING_TAGS.isdisjoint(func.tags):
        return NotImplemented
    with DisableTorchFunction():
        if not any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            return NotImplemented  # of a real run, while another run's meta tensors are still alive
        output = _compute(func, args, kwargs)
        return output if leaves_meta or output is NotImplemented else map_tensors(_as_meta, output)


def propagate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Compute the values of what an operator made of integers, where all that it was given is known."""
    if not isinstance(func, OpOverload):
        return
    with DisableTorchFunction():
        made = [tensor for tensor in tensors_in(output) if tensor.is_meta]
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
        inside = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        if not writes and any(id(tensor.untyped_storage()) in inside for tensor in made):
            return  # a view has the memory of what it is a view of
        values = _compute(func, args, kwargs)
        if values is not NotImplemented and not writes:
            for tensor, value in zip(made, tensors_in(values), strict=True):
                _set_values(tensor, value)
        elif values is NotImplemented and writes:
            for tensor in made:
                _memories.pop(id(tensor.untyped_storage()), None)


def tensorize_index(index: Any) -> Any:
    """An index with tensors in place of lists: torch makes those unseen, so that their values would not be known."""
    if isinstance(index, tuple):
        return tuple(tensorize_index(item) for item in index)
    if not isinstance(index, list) or not index or not all(type(item) in (int, bool) for item in index):
        return index
    with DisableTorchFunction(), disable_current_modes():
        return _as_meta(torch.tensor(index))


def _compute(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the values of its arguments; NotImplemented where some are not known."""
    if func.namespace != "aten" or func._schema.name in _UNINITIALISED:
        return NotImplemented
    if torch.Tag.nondeterministic_seeded in func.tags:
        return NotImplemented
    try:
        known_args, known_kwargs = map_tensors(_value, (args, kwargs))
    except _UnknownValue:
        return NotImplemented
    if known_kwargs.get("device") == torch.device("meta"):
        known_kwargs = {**known_kwargs, "device": torch.device("cpu")}
    try:
        return func(*known_args, **known_kwargs)
    except (RuntimeError, IndexError, NotImplementedError):  # as the model would, when it comes to compute this
        return NotImplemented


def value_of(tensor: Tensor) -> Tensor | None:
    """The values of a tensor of integers, also on the meta device; None where they are not known."""
    try:
        return _value(tensor)
    except _UnknownValue:
        return None


class _UnknownValue(Exception):
    """The values of a tensor are not known."""


def _value(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and type(tensor) is Tensor and tensor.dtype in DTYPES:
        return tensor
    memory = _memories.get(id(tensor.untyped_storage())) if tensor.is_meta else None
    if memory is None or tensor.dtype not in DTYPES:
        raise _UnknownValue
    return _view_like(memory[1], tensor)


def _view_like(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def _set_values(tensor: Tensor, value: Tensor) -> None:
    storage = tensor.untyped_storage()
    if tensor.dtype not in DTYPES or value.shape != tensor.shape or storage.nbytes() > _MAX_BYTES:
        return
    values = torch.UntypedStorage(storage.nbytes(), device="cpu")
    _view_like(values, tensor).copy_(value)
    _store(storage, values)


def _as_meta(value: Tensor) -> Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    _set_values(made, value)
    return made
