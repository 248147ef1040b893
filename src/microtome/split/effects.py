"""Replay the side effects of skipped calls from what a boundary recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from microtome.engine.arguments import as_non_leaf
from microtome.engine.torch_internals import storage_id
from microtome.errors import BadBoundary, Unsupported, describe_error
from microtome.split.boundary import Boundary
from microtome.split.call_arguments import CallArguments
from microtome.split.placeholder import Placeholder, awake
from microtome.split.schedule import Schedule, SentValue, SkippedCall
from microtome.split.size_bounds import SizeBudget
from microtome.split.tensor_bytes import span_of


def listed(boundary: Boundary, trail: Schedule | None) -> list[dict[str, Any]]:
    """The entries for the calls before the cut, in the order in which the head ran them."""
    assert trail is not None
    steps = list(trail.steps)
    calls = boundary.facts.get("calls")
    if not isinstance(calls, list) or len(calls) != len(steps):
        got = len(calls) if isinstance(calls, list) else type(calls).__name__
        raise BadBoundary(
            f"the boundary does not fit: the cut at {trail.at!r} has {len(steps)} calls before it on this side, got "
            f"{got}. Split both sides on the same example, with the same PYTHONHASHSEED"
        )
    if not all(is_entry(entry) and isinstance(entry.get("a"), dict) for entry in calls):
        raise BadBoundary("what the boundary says of the calls before the cut makes no sense: have it sent again")
    return calls


def around_of(boundary: Boundary) -> list[Any]:
    """The signatures of the calls that contained the cut in the head."""
    around = boundary.facts.get("around")
    return around if isinstance(around, list) else []


def draws_of(boundary: Boundary) -> list[Any]:
    """The entries for what drew random numbers before the cut, in order."""
    drawn = boundary.facts.get("draws")
    return drawn if isinstance(drawn, list) else []


def uses(entries: Iterable[Any]) -> Counter[str]:
    """Count the uses of each tensor."""
    known = [entry for entry in entries if is_entry(entry)]
    items = [item for entry in known for item in (*entry["t"], *entry.get("a", {}).values())]
    names = [item[0] if isinstance(item, list) and item else item for item in items]
    return Counter(name for name in names if isinstance(name, str))


def sharing(tensors: dict[str, Tensor]) -> list[str]:
    """The names of tensors that may overlap another in memory: a write to one may change the other."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        begin = int(tensor.storage_offset()) * tensor.itemsize
        end = begin + span_of(tensor.shape, tensor.stride()) * tensor.itemsize
        spans.setdefault(storage_id(tensor), []).append((begin, end, name))
    found: set[str] = set()
    for several in spans.values():
        last, holder = -1, ""
        for begin, end, name in sorted(several):
            if begin < last:
                found |= {holder, name}
            if end > last:
                last, holder = end, name
    return [name for name in tensors if name in found]


def shared(boundary: Boundary) -> frozenset[str]:
    """Return what `sharing` recorded in a boundary; all of it, where nothing was recorded."""
    said_ = boundary.facts.get("shared")
    known = isinstance(said_, list) and all(isinstance(name, str) for name in said_)
    return frozenset(said_ if known and isinstance(said_, list) else boundary.tensors)


def with_grad(tensor: Tensor, facts: Any, name: str = "requires_grad") -> Tensor:
    """The tensor as one that requires a gradient, if the facts say that it did in the head.

    No gradient reaches the head. But kernels are chosen by it, and the code of a model may ask for it.
    """
    wanted = isinstance(facts, dict) and facts.get(name) is True and torch.is_grad_enabled()
    is_continuous = tensor.is_floating_point() or tensor.is_complex()
    return as_non_leaf(tensor.detach()) if wanted and is_continuous else tensor


def check_entry(step: SkippedCall, entry: dict[str, Any]) -> None:
    """Raise if an entry cannot be of a call, since it comes from elsewhere."""
    fits = len(entry["t"]) == step.output.num_tensors and len(entry["p"]) == step.output.num_plain
    fits = fits and set(entry["a"]) <= set(map(str, step.arguments))
    fits = fits and (not step.changes or isinstance(entry.get("c"), list))
    if not fits:
        raise BadBoundary(f"the boundary says of {step.address!r} what does not fit what it returns on this side")


def is_entry(entry: Any) -> bool:
    """Whether something says of a call, or of the model's arguments, what there is to say."""
    if not isinstance(entry, dict) or not isinstance(entry.get("t"), list) or not isinstance(entry.get("p"), list):
        return False
    if not all(isinstance(value, bool | int | float | str | None) for value in entry["p"]):
        return False
    repeats = [(at, repeated(item)) for at, item in enumerate(entry["t"])]
    return all(first is None or (type(first) is int and 0 <= first < at) for at, first in repeats)


def repeated(item: Any) -> int | None:
    """The place of the first of several that are one tensor, if this is a later one; None: it is the first."""
    return item.get("repeats") if isinstance(item, dict) else None


def first_places(tensors: list[Tensor]) -> list[int]:
    """Of each, the first place at which that tensor is."""
    places: dict[int, int] = {}
    return [places.setdefault(id(awake(tensor)), at) for at, tensor in enumerate(tensors)]


def choose_sent(sent: dict[int, SentValue], firsts: list[int], at: int, of: str) -> SentValue | None:
    """Choose how a tensor crosses that may be at several places, though not on the example; None: it does not."""
    wanted = [sent[other] for other, first in enumerate(firsts) if first == firsts[at] and other in sent]
    if len({(one.copied, one.joined) for one in wanted}) > 1:
        names = " and ".join(dict.fromkeys(repr(one.name) for one in wanted))
        raise Unsupported(
            f"expected {names} to be different tensors, as on the example, got one tensor ({of}), which the model "
            "changes in place. Split it on an example where they are one"
        )
    return wanted[0] if wanted else None


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of this name, which came from elsewhere."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same place in memory, seen in the same way."""
    return (
        storage_id(one) == storage_id(other)
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def view(of: Tensor, item: Any, step: SkippedCall, sizes: SizeBudget) -> Tensor:
    """Return the view that a skipped call made of an argument: the same memory in another shape."""
    of = awake(of)
    try:
        strides, shape, new_strides, offset = item
        sizes.take(step.address, shape, new_strides, of.dtype)
        if isinstance(of, Placeholder):
            meta = torch.empty_strided(shape, new_strides, dtype=of.dtype, device="meta")
            return Placeholder(meta, of.device, of.of, of.source)
        if list(of.stride()) == strides:
            return of.as_strided(shape, new_strides, of.storage_offset() + offset)
    except BadBoundary:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadBoundary(
            f"what the boundary says of {step.address!r} makes no view: {describe_error(error)}"
        ) from error
    raise Unsupported(f"{step.address!r} returns a view of an argument that lies otherwise in memory on this side")


def check_way(step: SkippedCall, given: CallArguments, outputs: list[Tensor]) -> None:
    """Raise where a call did to its arguments, or returned of them, what the tail would do otherwise."""
    other = None
    if step.changes and step.changes[-1] >= len(given.containers):
        other = "is given fewer lists and dicts"
    for at in given.mutated_containers():
        if at not in step.changes:
            other = f"changes a {type(given.containers[at]).__name__} that it is given"
    for item in given.mutated_objects():
        other = f"changes a {type(item).__name__} that it is given"
    if any(at not in step.writes for at in given.mutated_tensors()):
        other = "writes into a tensor that it is given"
    if any(_share(outputs[at], given.tensors[of : of + 1]) is False for at, of in step.views.items()):
        other = "returns no view of a tensor that it is given"
    if any(step.same[at] is not None and not is_argument(step, at, outputs[at], given.tensors) for at in step.outputs):
        other = "returns another tensor than one that it is given"
    if any(_share(outputs[at], given.tensors) for at in step.apart):
        other = "returns a tensor that it is given, or a view of one"
    if other is not None:
        raise Unsupported(
            f"the model takes another way than on the example: {step.address!r} {other}, before the cut. Split it on "
            "an example that takes this way"
        )


def is_argument(step: SkippedCall, at: int, tensor: Tensor, arguments: list[Tensor]) -> bool:
    """Whether what a call returns is the argument that it was on the example."""
    of = step.same[at]
    return of is not None and of < len(arguments) and awake(arguments[of]) is awake(tensor)


def as_other(step: SkippedCall, at: int, tensor: Tensor, arguments: list[Tensor]) -> dict[str, Any]:
    """Describe a tensor that is not sent by the argument that it was on the example."""
    of = step.same[at]
    for other, argument in enumerate(arguments[: len(step.taken)]):
        if of is not None and step.taken[other] == step.taken[of] and awake(argument) is awake(tensor):
            return {"argument": other}
    return as_ghost(tensor)


def argument_of(step: SkippedCall, item: dict[str, Any], arguments: list[Tensor]) -> Tensor:
    """The argument that a call returns."""
    at = item["argument"]
    if type(at) is not int or not 0 <= at < len(arguments):
        raise BadBoundary(f"the boundary says that {step.address!r} returns argument {at!r:.80} of {len(arguments)}")
    return arguments[at]


def _share(tensor: Tensor, others: list[Tensor]) -> bool | None:
    """Whether a tensor lies in the memory of another; None: there are ghosts among them, which lie nowhere."""
    memories = [None if isinstance(one, Placeholder) else storage_id(one) for one in map(awake, (tensor, *others))]
    return None if None in memories else memories[0] in memories[1:]


def as_ghost(tensor: Tensor) -> dict[str, Any]:
    """Describe a tensor that is not sent."""
    strides = None if tensor.is_contiguous() else list(tensor.stride())
    item = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "strides": strides}
    return {**item, "requires_grad": True} if tensor.requires_grad and torch.is_grad_enabled() else item


def contents(step: SkippedCall, holder: Any, tensors: list[Tensor], arguments: list[Tensor]) -> list[Any]:
    """Describe what a call has put into a list or a dict: plain values, its outputs or arguments, placeholders."""
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
    if isinstance(held, Placeholder):
        held.alive = tensor
        return tensor
    if held is not tensor:
        with torch.no_grad():
            held.copy_(tensor)
    return held
