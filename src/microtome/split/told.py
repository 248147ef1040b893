"""What a boundary says of the calls before a cut, and how what they did is done again without them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microtome.errors import BadBoundary, Unsupported
from microtome.split.boundary import Boundary
from microtome.split.ghost import Ghost, awake
from microtome.split.trail import Step, Trail


def listed(boundary: Boundary, trail: Trail | None) -> list[dict[str, Any]]:
    """What is said of each step; checked, since it comes from elsewhere."""
    assert trail is not None
    steps = list(trail.steps)
    calls = boundary.facts.get("calls")
    if not isinstance(calls, list) or len(calls) != len(steps):
        raise BadBoundary(f"the boundary does not fit: the cut at {trail.at!r} has {len(steps)} calls before it")
    return [_checked(boundary, step, entry) for step, entry in zip(steps, calls, strict=True)]


def _checked(boundary: Boundary, step: Step, entry: Any) -> dict[str, Any]:
    fits = is_entry(entry) and len(entry["t"]) == step.output.tensors and len(entry["p"]) == step.output.plain
    fits = fits and isinstance(entry.get("a"), dict) and set(entry["a"]) <= set(map(str, step.arguments))
    fits = fits and (not step.changes or isinstance(entry.get("c"), list))
    if not fits:
        raise BadBoundary(f"the boundary says of {step.address!r} what does not fit what it returns on this side")
    return entry


def is_entry(entry: Any) -> bool:
    """Whether something says of a call, or of the model's arguments, what there is to say."""
    if not isinstance(entry, dict) or not isinstance(entry.get("t"), list) or not isinstance(entry.get("p"), list):
        return False
    return all(isinstance(value, bool | int | float | str | None) for value in entry["p"])


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of this name, which came from elsewhere."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same place in memory, seen in the same way."""
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def view(of: Tensor, item: Any, step: Step) -> Tensor:
    """What a call that is left out made of an argument: the same memory in another shape."""
    strides, shape, new_strides, offset = item
    of = awake(of)
    if isinstance(of, Ghost):
        return Ghost(
            torch.empty_strided(shape, new_strides, dtype=of.dtype, device="meta"), of.device, of.of, of.source
        )
    if list(of.stride()) != strides:
        raise Unsupported(f"{step.address!r} returns a view of an argument that lies otherwise in memory on this side")
    return of.as_strided(shape, new_strides, of.storage_offset() + offset)


def as_ghost(tensor: Tensor) -> dict[str, Any]:
    """What is said of a tensor that is not sent."""
    strides = None if tensor.is_contiguous() else list(tensor.stride())
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "strides": strides}


def contents(step: Step, holder: Any, tensors: list[Tensor], arguments: list[Tensor]) -> list[Any]:
    """What a call has put into a list or a dict: texts and numbers, what it returns or was given, ghosts of others."""
    keys = list(holder) if isinstance(holder, dict) else None
    items: list[Any] = []
    for item in holder.values() if isinstance(holder, dict) else holder:
        if not isinstance(item, Tensor):
            if not isinstance(item, bool | int | float | str | None):
                raise Unsupported(f"{step.address!r} puts a {type(item).__name__} into a list, which it did not before")
            items.append({"value": item})
            continue
        output = [at for at, tensor in enumerate(tensors) if tensor is item]
        argument = [at for at, tensor in enumerate(arguments) if tensor is item]
        if output or argument:
            items.append({"output": output[0]} if output else {"argument": argument[0]})
        else:
            items.append(as_ghost(item))
    return [keys, items]


def revive(argument: Tensor, tensor: Tensor) -> Tensor:
    """Have an argument hold what the call that is left out would have written into it."""
    held = awake(argument)
    if isinstance(held, Ghost):
        held.alive = tensor
        return tensor
    if held is not tensor:
        with torch.no_grad():
            held.copy_(tensor)
    return held
