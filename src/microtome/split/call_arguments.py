"""The arguments of a call, and their mutations when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from microtome.engine.pytree import children_of, dict_of, is_record, tensor_occurrences
from microtome.engine.torch_internals import version_of
from microtome.split.arrays import is_array
from microtome.split.structure_spec import strange_in


class CallArguments(NamedTuple):
    """The arguments of a call when it began.

    Attributes:
        tensors: The tensors, each as often as it is given.
        versions: What torch counts of each as it is written into.
        holders: What holds something and can be changed where it is: lists, dicts, sets, dataclasses.
        held: What each of these held.
        objects: What is neither tensor, nor plain, nor a structure of these.
        states: The state of each of these.
    """

    tensors: list[Tensor]
    versions: list[int]
    holders: list[Any]
    held: list[list[Any]]
    objects: list[Any]
    states: list[Any]

    def written(self) -> Iterator[int]:
        """Tensors that were mutated since; none under inference mode, where torch has no version counters."""
        pairs = zip(self.tensors, self.versions, strict=True)
        return (at for at, (tensor, version) in enumerate(pairs) if version_of(tensor) != version)

    def refilled(self) -> Iterator[int]:
        """Containers whose contents changed since."""
        pairs = zip(self.holders, self.held, strict=True)
        return (at for at, (holder, held) in enumerate(pairs) if _differ(held, _held(holder)))

    def altered(self) -> Iterator[Any]:
        """The objects that are not as they were."""
        return (item for item, state in zip(self.objects, self.states, strict=True) if state_of(item) != state)


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """Record the arguments of a call."""
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # by far the most frequent
        return CallArguments([args[0]], [version_of(args[0])], [], [], [], [])
    tensors = list(tensor_occurrences((args, kwargs)))
    holders = holders_in((args, tuple(kwargs.values())))
    objects = strange_in((args, kwargs))
    return CallArguments(
        tensors,
        [version_of(tensor) for tensor in tensors],
        holders,
        [_held(holder) for holder in holders],
        objects,
        [state_of(item) for item in objects],
    )


def holders_in(value: Any) -> list[Any]:
    """The lists, dicts, sets and dataclasses in a value, each once; those that can be changed where they are."""
    found: dict[int, Any] = {}
    pending = [value]
    while pending:
        item = pending.pop()
        is_object = is_dataclass(item) and not isinstance(item, type)
        if isinstance(item, list | set | Mapping) or is_object or is_record(item):
            if id(item) in found:
                continue
            found[id(item)] = item
        pending += children_of(item)[::-1]
    return list(found.values())


def _held(holder: Any) -> list[Any]:
    return [*holder, *holder.values()] if isinstance(holder, Mapping) else children_of(holder)


def _differ(before: list[Any], after: list[Any]) -> bool:
    if len(before) != len(after):
        return True
    plain = bool | int | float | str | None
    return any(
        one is not other  # 1 and True are equal, and not the same
        and not (isinstance(one, plain) and isinstance(other, plain) and repr(one) == repr(other))
        for one, other in zip(before, after, strict=True)
    )


def state_of(value: Any, depth: int = 6) -> Any:
    """Something that is equal as long as an object is as it was."""
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, bool | int | float | str | None):
        return value
    if is_array(value):
        return id(value), xxh3_64_hexdigest(value.tobytes())
    if depth == 0:
        return id(value)
    if isinstance(value, dict):
        return [(str(key), state_of(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [state_of(item, depth - 1) for item in value]
    if type(value).__dictoffset__ and not isinstance(value, nn.Module | type):  # it has a `__dict__`
        return [(name, state_of(item, depth - 1)) for name, item in dict_of(value).items()]
    return id(value)
