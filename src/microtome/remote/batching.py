"""Batch requests at one cut, if no answer depends on another request.

A boundary of twice the example is compared with one of the example. Tensors whose first dimension doubles are
concatenated, numbers that double are added up, and all else must be the same in requests that are joined.

Before a number of rows is computed together for the first time, three checks run at that number, on the example and
variants of it: (1) no operator of the tail combines values of different requests, and no value of a request is read
into Python: `engine/dependence.py` follows each element; (2) an answer is the same, bit for bit, whatever is beside it,
also numbers far larger, inf or NaN; (3) it is what the request gives alone, to the precision of the kernels.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, cycle, islice
from math import comb
from typing import Any

import torch
from torch import Tensor

from microtome.engine.dependence import Dependence
from microtome.engine.meta_run import copy_inputs
from microtome.engine.pytree import map_tensors
from microtome.errors import MicrotomeError, describe_error
from microtome.inputs import Inputs
from microtome.remote.tolerance import is_near, tolerances
from microtome.split.boundary import Boundary
from microtome.split.comparison import differences
from microtome.split.placeholder import awake
from microtome.split.structure_spec import flatten

log = logging.getLogger("microtome.remote")

Head = Callable[..., Boundary]
Tail = Callable[[Boundary], Any]


class CannotBatch(MicrotomeError, ValueError):
    """Requests that cannot be computed together."""


@dataclass(frozen=True)
class Batcher:
    """Join requests at one cut, and split their results.

    Attributes:
        grows: The tensors that grow with the batch, by name, and how many rows of each the example has.
        adds: Where in the facts numbers do, and how much each row of the batch adds.
        outputs: Which tensors of the model's output do.
        unit: Requests have a multiple of this many rows; fewer may depend on each other.
        sizes: For each number of rows that was checked, why requests of so many rows in all are not joined; None: they
            are.
        rehearsed: Requests of `unit` rows with the example's scale, and the output of each alone.
    """

    grows: dict[str, int]
    adds: dict[tuple[Any, ...], float]
    outputs: frozenset[int]
    unit: int = 1
    sizes: dict[int, str | None] = field(default_factory=dict)
    rehearsed: list[tuple[Boundary, Any]] = field(default_factory=list)

    def key(self, boundary: Boundary) -> str | None:
        """The same for requests that can be joined, but for the values of tensors that do not grow.

        None: it says of itself what its tensors do not show, and would have others computed wrongly.
        """
        try:
            rows = self.rows(boundary)
            if not rows or rows % self.unit:
                return None
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
                tensors[name] = tensor.clone()  # the model may write into it, and fail, and each is then computed alone
            else:
                raise CannotBatch(f"requests differ in {name!r}, which does not grow with the batch")

        def added(path: tuple[Any, ...], leaf: Any) -> Any:
            return sum(_at(boundary.facts, path) for boundary in several) if path in self.adds else leaf

        return replace(first, tensors=tensors, facts=_map_leaves(first.facts, added))

    def part(self, output: Any, rows: Sequence[int]) -> list[Any]:
        """Split the output of the model by request."""
        template, tensors, plain = flatten(output)
        parts: list[list[Tensor]] = [[] for _ in rows]
        for at, tensor in enumerate(tensors):
            pieces = tensor.split(list(rows)) if at in self.outputs else [tensor] * len(rows)
            for held, piece in zip(parts, pieces, strict=True):
                held.append(piece)
        return [template.unflatten(held, plain) for held in parts]

    def resize(self, boundary: Boundary, rows: int) -> Boundary:
        """The first rows of a boundary, repeated where it has fewer."""
        tensors = dict(boundary.tensors)
        for name, share in self.grows.items():
            if rows * share % self._rows:
                raise CannotBatch(
                    f"{name!r} has {share} rows in a batch of {self._rows}: none for each row of the batch"
                )
            count = rows * share // self._rows
            tensor = tensors[name]
            tensors[name] = torch.cat([tensor] * -(-count // len(tensor)))[:count]

        def sized(path: tuple[Any, ...], leaf: Any) -> Any:
            return round(self.adds[path] * rows) if path in self.adds else leaf

        return replace(boundary, tensors=tensors, facts=_map_leaves(boundary.facts, sized))

    def check(self, tail: Tail, rows: int) -> None:
        """Raise if, of requests of that many rows in all, an answer may depend on another request."""
        if rows not in self.sizes:
            try:
                _check_rows(self, tail, rows // self.unit)
            except (MicrotomeError, RuntimeError, IndexError) as error:  # it is not tried again
                self.sizes[rows] = str(error) if isinstance(error, CannotBatch) else describe_error(error)
            else:
                self.sizes[rows] = None
        if self.sizes[rows] is not None:
            raise CannotBatch(f"{rows} rows are not computed together: {self.sizes[rows]}")


def learn(head: Head, tail: Tail, given: Inputs) -> Batcher | None:
    """Return a Joiner for these stages, or None (the reason is logged)."""
    try:
        with torch.no_grad():
            return _learn(head, tail, given)
    except (MicrotomeError, RuntimeError, IndexError, StopIteration) as error:  # or other shapes than the model takes
        log.info("requests are computed one by one: %s", describe_error(error))
        return None


def _learn(head: Head, tail: Tail, given: Inputs) -> Batcher:
    given = copy_inputs(given)  # the model may write into it
    other = _map(given, _perturb)
    both = Inputs(*_cat(given.args, other.args), **_cat(given.kwargs, other.kwargs))
    one, two, twice = (head(*inputs.args, **inputs.kwargs) for inputs in (given, other, both))
    if all(tensor.equal(two.tensors[name]) for name, tensor in one.tensors.items()):
        raise CannotBatch("no other values than those of the example are known")
    grows = {name: len(tensor) for name, tensor in one.tensors.items() if _doubles(tensor, twice.tensors[name])}
    fits = all(name in grows or tensor.shape == twice.tensors[name].shape for name, tensor in one.tensors.items())
    adds = _adding(one.facts, twice.facts)
    if not (fits and grows) or adds is None:
        raise CannotBatch("twice the batch is not twice the boundary")
    of_one, of_twice = (flatten(tail(boundary))[1] for boundary in (one, twice))
    outputs = frozenset(at for at, tensor in enumerate(of_one) if _doubles(tensor, of_twice[at]))
    rows = next(iter(grows.values()))
    joiner = Batcher(grows, {path: _at(one.facts, path) / rows for path in adds}, outputs)
    try:
        return _rehearse(joiner, tail, one, two)
    except (MicrotomeError, RuntimeError, IndexError):
        if rows == 1:
            raise
        return _rehearse(replace(joiner, unit=rows, sizes={}, rehearsed=[]), tail, one, two)


# -- rehearsal ---------------------------------------------------------------------------------------------------------


def _rehearse(joiner: Batcher, tail: Tail, one: Boundary, two: Boundary) -> Batcher:
    """Check the joiner at the smallest numbers of rows, and return it."""
    one, two = (joiner.resize(boundary, joiner.unit) for boundary in (one, two))
    several = [one, two, next(_variants(joiner, one))]
    joiner.rehearsed.extend((boundary, tail(joiner.join([boundary]))) for boundary in several)
    for count in (3, 2):
        joiner.check(tail, count * joiner.unit)
    return joiner


def _check_rows(joiner: Batcher, tail: Tail, count: int) -> None:
    """Raise if an answer depends on another of that many requests, or on their number."""
    rehearsed = list(islice(cycle(joiner.rehearsed), count))
    several = [boundary for boundary, _ in rehearsed]
    _check_dependence(joiner, tail, several)

    def answers(requests: Sequence[Boundary]) -> list[Any]:
        return joiner.part(tail(joiner.join(requests)), [joiner.unit] * count)

    parts = answers(several)
    allowed = tolerances([alone for _, alone in joiner.rehearsed])
    if not all(
        is_near(part, alone, limits) for part, (_, alone), limits in zip(parts, rehearsed, cycle(allowed), strict=False)
    ):
        raise CannotBatch("they do not give what each gives alone")
    kept = (0, count - 1) if count > 2 else (0,)
    for beside in _variants(joiner, several[0]):
        moved = answers([request if at in kept else beside for at, request in enumerate(several)])
        if any(next(differences(moved[at], parts[at]), None) is not None for at in kept):
            raise CannotBatch("an answer depends on the request beside it")


def _check_dependence(joiner: Batcher, tail: Tail, several: Sequence[Boundary]) -> None:
    """Raise if an element of an answer depends on another request, or what the model does on any."""
    for labels in _label(len(several)):
        joined = joiner.join(several)
        with Dependence(awake) as dependence:
            for name in joiner.grows:
                for label, part in zip(labels, joined.tensors[name].chunk(len(several)), strict=True):
                    dependence.mark(part, label)
            output = tail(joined)
        for at, tensor in enumerate(flatten(output)[1]):
            found = dependence.of(tensor)
            if at not in joiner.outputs:
                if found.any():
                    raise CannotBatch(f"output {at} does not grow with the batch, and depends on it")
                continue
            for label, part in zip(labels, found.chunk(len(several)), strict=True):
                if not (part == label).any() or (part & ~label & 255).any():
                    raise CannotBatch(f"output {at} of a request does not depend on that request alone")


def _label(count: int) -> Iterator[list[int]]:
    """Yield labels for so many requests: of any two, one run labels them so that neither label contains the other.

    The labels of a run have equally many of their bits set. More than 70 requests are numbered by several of them, one
    run for each digit.
    """
    bits = next((bits for bits in range(2, 8) if comb(bits, bits // 2) >= count), 8)
    codes = [sum(1 << bit for bit in chosen) for chosen in combinations(range(bits), bits // 2)]
    weight = 1
    while weight < count:
        yield [codes[number // weight % len(codes)] for number in range(count)]
        weight *= len(codes)


def _variants(joiner: Batcher, boundary: Boundary) -> Iterator[Boundary]:
    """Other requests of the same shape: other sizes, signs and orders of the values, inf and NaN."""
    for number, (scale, offset) in enumerate(_VARIANTS, 1):

        def changed(tensor: Tensor, at: int = number, scale: float = scale, offset: float = offset) -> Tensor:
            other = tensor.reshape(-1).roll(at).view(tensor.shape)  # integers may be indices: they keep their range
            return other * scale + offset if tensor.is_floating_point() else other

        tensors = {name: changed(one) if name in joiner.grows else one for name, one in boundary.tensors.items()}
        yield replace(boundary, tensors=tensors)


_VARIANTS = ((1.0, 0.0), (-37.0, 5.0), (1e4, 0.0), (1e-4, -1e3), (1.0, torch.inf), (1.0, -torch.inf), (1.0, torch.nan))


def _perturb(tensor: Tensor) -> Tensor:
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
    pieces = iter(flatten(other)[1])
    return map_tensors(lambda tensor: torch.cat([tensor, next(pieces)]) if tensor.dim() else tensor, one)


def _map(given: Inputs, change: Any) -> Inputs:
    args, kwargs = map_tensors(change, (given.args, given.kwargs))
    return Inputs(*args, **kwargs)


# -- facts -------------------------------------------------------------------------------------------------------------


def _adding(one: Any, twice: Any, path: tuple[Any, ...] = ()) -> frozenset[tuple[Any, ...]] | None:
    """Return the dimensions that double; None: something else differs."""
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
