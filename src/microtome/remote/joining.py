"""Several requests at one cut computed together: learned from the example what of a boundary grows with the batch.

A boundary of twice the example is compared with one of the example. Tensors whose first dimension doubles are laid end
to end, numbers that double are added up, and all else must be the same in requests that are joined. The tail must give
the same for two requests joined as for each alone, to the kernels' precision, or that cut is not joined at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from microtome.engine.structure import map_tensors
from microtome.errors import MicrotomeError
from microtome.inputs import Inputs
from microtome.split.boundary import Boundary
from microtome.split.compare import differences
from microtome.split.stages import copied
from microtome.split.templates import take_apart

#: By how much results may differ from those of each alone, relative to the largest number in them.
_PRECISION = 1e-4


Head = Callable[..., Boundary]
Tail = Callable[[Boundary], Any]


class CannotJoin(MicrotomeError, ValueError):
    """Requests that cannot be computed together."""


@dataclass(frozen=True)
class Joiner:
    """How requests at one cut are joined, and their results taken apart.

    Attributes:
        grows: The tensors that grow with the batch, by name, and how many rows of each the example has.
        adds: Where in the facts numbers do, and how much each row of the batch adds.
        outputs: Which tensors of the model's output do.
    """

    grows: dict[str, int]
    adds: dict[tuple[Any, ...], float]
    outputs: frozenset[int]

    def key(self, boundary: Boundary) -> str | None:
        """The same for requests that can be joined, but for the values of tensors that do not grow.

        None: it says of itself what its tensors do not show, and would have others computed wrongly.
        """
        try:
            rows = self.rows(boundary)
            if any(len(boundary.tensors[name]) * self._rows != rows * share for name, share in self.grows.items()):
                return None  # one that is spread over the rows of another would be spread over those of others
            if any(_at(boundary.facts, path) != share * rows for path, share in self.adds.items()):
                return None
        except (KeyError, IndexError, TypeError, StopIteration):  # it is no boundary of this cut, as the tail will say
            return None
        facts = _map_leaves(boundary.facts, lambda path, leaf: "+" if path in self.adds else leaf)
        tensors = [
            (name, str(tensor.dtype), [*tensor.shape[1:]] if name in self.grows else [*tensor.shape])
            for name, tensor in boundary.tensors.items()
        ]
        return json.dumps([boundary.at, facts, tensors])

    def rows(self, boundary: Boundary) -> int:
        """Of its batch."""
        return len(boundary.tensors[next(iter(self.grows))])

    @property
    def _rows(self) -> int:
        """Of the example's batch."""
        return next(iter(self.grows.values()))

    def join(self, several: Sequence[Boundary]) -> Boundary:
        first = several[0]
        tensors: dict[str, Tensor] = {}
        for name, tensor in first.tensors.items():
            others = [boundary.tensors[name] for boundary in several]
            if name in self.grows:
                tensors[name] = torch.cat(others)
            elif all(tensor.equal(other) for other in others):
                tensors[name] = tensor
            else:
                raise CannotJoin(f"requests differ in {name!r}, which does not grow with the batch")

        def added(path: tuple[Any, ...], leaf: Any) -> Any:
            return sum(_at(boundary.facts, path) for boundary in several) if path in self.adds else leaf

        return replace(first, tensors=tensors, facts=_map_leaves(first.facts, added))

    def part(self, output: Any, rows: Sequence[int]) -> list[Any]:
        """What the model returned, for each request."""
        template, tensors, plain = take_apart(output)
        parts: list[list[Tensor]] = [[] for _ in rows]
        for at, tensor in enumerate(tensors):
            pieces = tensor.split(list(rows)) if at in self.outputs else [tensor] * len(rows)
            for held, piece in zip(parts, pieces, strict=True):
                held.append(piece)
        return [template.fill(held, plain) for held in parts]


def learn(head: Head, tail: Tail, given: Inputs) -> Joiner | None:
    """How requests between these stages are joined; None: they cannot be."""
    try:
        with torch.no_grad():
            return _learn(head, tail, given)
    except (MicrotomeError, RuntimeError, IndexError, StopIteration):  # other shapes than the model takes
        return None


def _learn(head: Head, tail: Tail, given: Inputs) -> Joiner | None:
    given = copied(given)  # the model may write into it
    other = _map(given, _another)
    both = Inputs(*_cat(given.args, other.args), **_cat(given.kwargs, other.kwargs))
    one, two, twice = (head(*inputs.args, **inputs.kwargs) for inputs in (given, other, both))
    if all(tensor.equal(two.tensors[name]) for name, tensor in one.tensors.items()):
        return None  # two that are the same do not show whether one has an effect on the other
    grows = {name: len(tensor) for name, tensor in one.tensors.items() if _doubles(tensor, twice.tensors[name])}
    fits = all(name in grows or tensor.shape == twice.tensors[name].shape for name, tensor in one.tensors.items())
    adds = _adding(one.facts, twice.facts)
    if not (fits and grows) or adds is None:
        return None
    alone = [tail(boundary) for boundary in (one, two)]
    of_one, of_twice = (take_apart(output)[1] for output in (alone[0], tail(twice)))
    outputs = frozenset(at for at, tensor in enumerate(of_one) if _doubles(tensor, of_twice[at]))
    rows = next(iter(grows.values()))
    joiner = Joiner(grows, {path: _at(one.facts, path) / rows for path in adds}, outputs)
    joined = joiner.part(tail(joiner.join([one, two])), [joiner.rows(one), joiner.rows(two)])
    return joiner if outputs and all(map(_is_near, joined, alone)) else None


def _is_near(joined: Any, alone: Any) -> bool:
    largest = max((float(tensor.abs().max()) for tensor in take_apart(alone)[1] if tensor.numel()), default=0.0)
    return all(
        found.largest is not None and found.largest <= _PRECISION * largest for found in differences(joined, alone)
    )


def _another(tensor: Tensor) -> Tensor:
    """Of the same shape with other values: turned round, so that numbers that name something still do."""
    if not tensor.dim():
        return tensor
    turned = tensor.flip(-1)
    if tensor.is_floating_point() and tensor.numel() and turned.equal(tensor):  # such as zeros
        return tensor + torch.linspace(0.5, 1.0, tensor.numel(), device=tensor.device).to(tensor.dtype).view_as(tensor)
    return turned


def _doubles(one: Tensor, twice: Tensor) -> bool:
    return one.dim() > 0 and twice.shape == (2 * one.shape[0], *one.shape[1:])


def _cat(one: Any, other: Any) -> Any:
    pieces = iter(take_apart(other)[1])
    return map_tensors(lambda tensor: torch.cat([tensor, next(pieces)]) if tensor.dim() else tensor, one)


def _map(given: Inputs, change: Any) -> Inputs:
    args, kwargs = map_tensors(change, (given.args, given.kwargs))
    return Inputs(*args, **kwargs)


# -- facts -------------------------------------------------------------------------------------------------------------


def _adding(one: Any, twice: Any, path: tuple[Any, ...] = ()) -> frozenset[tuple[Any, ...]] | None:
    """Where numbers double; None: something else differs."""
    if isinstance(one, dict | list) and type(one) is type(twice) and len(one) == len(twice):
        keys = list(one) if isinstance(one, dict) else range(len(one))
        found = [_adding(one[key], twice[key], (*path, key)) for key in keys]
        return None if None in found else frozenset().union(*(part for part in found if part is not None))
    if one == twice and type(one) is type(twice):
        return frozenset()
    is_number = type(one) is int and type(twice) is int
    return frozenset({path}) if is_number and twice == 2 * one else None


def _map_leaves(value: Any, change: Any, path: tuple[Any, ...] = ()) -> Any:
    if isinstance(value, dict):
        return {key: _map_leaves(item, change, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_leaves(item, change, (*path, at)) for at, item in enumerate(value)]
    return change(path, value)


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
