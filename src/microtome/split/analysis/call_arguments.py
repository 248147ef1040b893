"""The arguments of a call, recorded when it begins to find out which of them it mutates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from microtome.engine.attributes import dict_of
from microtome.engine.pytree import MAPPING, is_state, node_type, state_classes, tensor_occurrences
from microtome.engine.torch_internals import recorded_versions, version_of
from microtome.split.analysis.arrays import is_array
from microtome.split.analysis.structure_spec import opaque_objects_in


class CallArguments(NamedTuple):
    """The arguments of a call when it began.

    Attributes:
        tensors: The tensors, once for each occurrence.
        versions: torch's version counter of each, which in-place operators increment.
        containers: The mutable structures: lists, dicts, sets, dataclasses, records.
        contents: The keys and children of each of these.
        objects: The leaves other than tensors and plain values.
        states: The state of each of these.
        state_objects: The state objects, such as a KV cache, each once.
    """

    tensors: list[Tensor]
    versions: list[int]
    containers: list[Any]
    contents: list[list[Any]]
    objects: list[Any]
    states: list[Any]
    state_objects: list[Any]

    def mutated_tensors(self) -> Iterator[int]:
        """The tensors written to since, as indices; none under inference mode, where torch has no version counters."""
        versions = recorded_versions(self.tensors)
        if versions == self.versions:
            return iter(())
        pairs = zip(versions, self.versions, strict=True)
        return (index for index, (version, before) in enumerate(pairs) if version != before)

    def mutated_containers(self) -> Iterator[int]:
        """The containers whose contents changed since, as indices."""
        pairs = zip(self.containers, self.contents, strict=True)
        return (index for index, (container, before) in enumerate(pairs) if _differ(before, _contents(container)))

    def mutated_objects(self) -> Iterator[Any]:
        """The objects whose state changed since."""
        return (item for item, state in zip(self.objects, self.states, strict=True) if state_of(item) != state)


def record_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """Record the arguments of a call."""
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # by far the most frequent
        return CallArguments([args[0]], [version_of(args[0])], [], [], [], [], [])
    tensors = list(tensor_occurrences((args, kwargs)))
    containers = containers_in((args, tuple(kwargs.values())))
    opaque = list(opaque_objects_in((args, kwargs)))
    objects = [item for item in opaque if not is_state(item)]
    return CallArguments(
        tensors,
        recorded_versions(tensors),
        containers,
        list(map(_contents, containers)),
        objects,
        list(map(state_of, objects)),
        list({id(item): item for item in opaque if is_state(item)}.values()) if len(objects) < len(opaque) else [],
    )


def state_objects_in(value: Any) -> list[Any]:
    """The state objects in a value, each once."""
    if not state_classes():
        return []
    return list({id(item): item for item in opaque_objects_in(value) if is_state(item)}.values())


def containers_in(value: Any) -> list[Any]:
    """The mutable structures in a value, each once: lists, dicts, sets, dataclasses, records."""
    containers: dict[int, Any] = {}
    pending = [value]
    while pending:
        item = pending.pop()
        node = node_type(item)
        if node is None or id(item) in containers:
            continue
        if not isinstance(item, tuple | frozenset):
            containers[id(item)] = item
        pending += [*node.children(item)][::-1]
    return list(containers.values())


def _contents(container: Any) -> list[Any]:
    node = node_type(container)
    if node is None:  # a record that has become something else
        return []
    children = node.children(container)
    return [*container, *children] if node is MAPPING else [*children]


def _differ(before: list[Any], after: list[Any]) -> bool:
    if len(before) != len(after):
        return True
    plain = bool | int | float | str | None
    return any(
        left is not right
        and not (isinstance(left, plain) and isinstance(right, plain) and repr(left) == repr(right))  # not 1 == True
        for left, right in zip(before, after, strict=True)
    )


def state_of(value: Any, depth: int = 6) -> Any:
    """Something that compares equal as long as an object and what it refers to is unchanged."""
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
    if type(value).__dictoffset__ and not isinstance(value, nn.Module | ModuleType | type):  # it has a `__dict__`
        return [(name, state_of(item, depth - 1)) for name, item in dict_of(value).items()]
    return id(value)
