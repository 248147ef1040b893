"""Batch requests at one cut, if no output depends on another request.

The boundary of a doubled example batch is compared with that of the example: tensors whose first dimension doubles are
concatenated, numbers that double are added, and everything else must be equal in requests that are batched. Each total
number of rows is verified before it is first computed; see `batch_verification.py`. Since that takes many runs, batches
are divided until it pays.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from microtome.engine.meta_run import copy_inputs
from microtome.engine.pytree import map_tensors
from microtome.errors import MicrotomeError, describe_error
from microtome.inputs import Inputs
from microtome.remote.batch_verification import CannotBatch, Tail, contents, perturb, variants, verify_batch
from microtome.split.analysis.structure_spec import flatten
from microtome.split.boundary.boundary import Boundary

log = logging.getLogger("microtome.remote")

Head = Callable[..., Boundary]
Path = tuple[Any, ...]
#: How many keys of records are kept.
_MAX_KEYS = 64
#: About how many runs of a batch verify it.
_VERIFICATION_RUNS = 10


@dataclass(frozen=True)
class Batcher:
    """Concatenate the boundaries of requests at one cut, and split what a stage makes of them.

    Attributes:
        example_rows: The tensors that grow with the batch, and the rows of each in the example.
        facts_per_row: The numbers among the facts that grow with the batch, by path, and their increment per row.
        batched_outputs: The indices of the tensors in the stage's output that grow with the batch; `batched_plain`:
            those of the numbers, which also grow with it.
        unit: Requests must have a multiple of this many rows; the rows of a unit may depend on each other.
        verdicts: For each verified number of rows, why so many are not computed together; None: they are.
        examples: Boundaries of `unit` rows, and the output of each alone.
        keys: The keys of the last records with tensors of these shapes, which like requests share.
        extra_runs: For each number of rows that is not verified, the runs that dividing such batches has cost.
    """

    example_rows: dict[str, int]
    facts_per_row: dict[Path, float]
    batched_outputs: frozenset[int]
    batched_plain: frozenset[int]
    unit: int = 1
    verdicts: dict[int, str | None] = field(default_factory=dict)
    examples: list[tuple[Boundary, Any]] = field(default_factory=list)
    keys: dict[tuple[Any, ...], tuple[Any, str | None]] = field(default_factory=dict)
    extra_runs: Counter[int] = field(default_factory=Counter)

    def key(self, boundary: Boundary) -> str | None:
        """Return the same key for requests that can be batched, unless tensors that do not grow differ.

        None: the facts contradict the tensors, so that it could corrupt other requests of a batch.
        """
        if (record := boundary.record) is None:
            return self._make_key(boundary)
        specs = (id(record), *[(name, tensor.dtype, tensor.shape) for name, tensor in boundary.tensors.items()])
        if (kept := self.keys.get(specs)) is None:
            if len(self.keys) >= _MAX_KEYS:
                self.keys.clear()
            key = self._make_key(boundary.with_tensors(boundary.tensors))  # which reads the facts, and drops the record
            kept = self.keys[specs] = record, key  # with the record, so that no other has its id
        return kept[1]

    def _make_key(self, boundary: Boundary) -> str | None:
        try:
            rows = self.batch_size(boundary)
            if not rows or rows % self.unit:
                return None
            # A tensor with fewer rows would be broadcast over the rows of other requests.
            if any(
                len(boundary.tensors[name]) * self.example_batch_size != rows * own
                for name, own in self.example_rows.items()
            ):
                return None
            if any(_get(boundary.facts, path) != per_row * rows for path, per_row in self.facts_per_row.items()):
                return None
        except (KeyError, IndexError, TypeError, StopIteration):  # not a boundary of this cut: the tail reports it
            return None
        facts = _map_leaves(boundary.facts, lambda path, leaf: "+" if path in self.facts_per_row else leaf)
        tensors = [
            (name, str(tensor.dtype), [*tensor.shape[1:]] if name in self.example_rows else [*tensor.shape])
            for name, tensor in boundary.tensors.items()
        ]
        return json.dumps([boundary.at, facts, tensors])

    def divide(self, rows: Sequence[int]) -> list[int]:
        """Return how many requests with these rows are computed together, in order.

        All of them, once so many rows are verified, which takes many runs. Before, powers of two, of which there are
        few to verify, until that has cost as many runs.
        """
        total, count = sum(rows), len(rows)
        powers = [1 << bit for bit in reversed(range(count.bit_length())) if count >> bit & 1]
        if len(powers) == 1 or self.verdicts.get(total, "") is None:
            return [count]
        self.extra_runs[total] += len(powers) - 1
        is_due = total not in self.verdicts and self.extra_runs[total] >= _VERIFICATION_RUNS
        return [count] if is_due else powers

    def batch_size(self, boundary: Boundary) -> int:
        """Return the batch size of a boundary."""
        return len(boundary.tensors[next(iter(self.example_rows))])

    @property
    def example_batch_size(self) -> int:
        """The batch size of the example."""
        return next(iter(self.example_rows.values()))

    def concatenate(self, boundaries: Sequence[Boundary]) -> Boundary:
        first = boundaries[0]
        tensors: dict[str, Tensor] = {}
        for name, tensor in first.tensors.items():
            others = [boundary.tensors[name] for boundary in boundaries]
            if name in self.example_rows:
                tensors[name] = torch.cat(others)
            elif all(tensor.equal(other) for other in others):
                tensors[name] = tensor.clone()  # the model may write into it and fail, and each is computed alone then
            else:
                raise CannotBatch(f"requests differ in {name!r}, which does not grow with the batch")

        rows = sum(map(self.batch_size, boundaries))
        return replace(first, tensors=tensors, facts=self._scale_facts(first, rows))

    def split(self, output: Any, rows: Sequence[int]) -> list[Any]:
        """Split the output of a stage, the model's or a boundary, by the rows of each request."""
        spec, tensors, plain = flatten(contents(output))
        total = sum(rows)
        pieces = [
            tensor.split([_share(len(tensor), own, total) for own in rows])
            if index in self.batched_outputs
            else [tensor] * len(rows)
            for index, tensor in enumerate(tensors)
        ]
        outputs = []
        for number, own in enumerate(rows):
            values = list(plain)
            for index in self.batched_plain:
                values[index] = _share(cast("int", plain[index]), own, total)
            outputs.append(spec.unflatten([piece[number] for piece in pieces], values))
        return [replace(output, **one) for one in outputs] if isinstance(output, Boundary) else outputs

    def resize(self, boundary: Boundary, rows: int) -> Boundary:
        """Return the first rows of a boundary, repeated if it has fewer."""
        tensors = dict(boundary.tensors)
        for name, own in self.example_rows.items():
            if rows * own % self.example_batch_size:
                raise CannotBatch(
                    f"{name!r} has {own} rows in a batch of {self.example_batch_size}, expected a multiple of it"
                )
            count = rows * own // self.example_batch_size
            tensors[name] = torch.cat([tensors[name]] * -(-count // len(tensors[name])))[:count]

        return replace(boundary, tensors=tensors, facts=self._scale_facts(boundary, rows))

    def _scale_facts(self, boundary: Boundary, rows: int) -> Any:
        """Return the facts of a boundary with so many rows."""

        def scale(path: Path, leaf: Any) -> Any:
            return round(self.facts_per_row[path] * rows) if path in self.facts_per_row else leaf

        return _map_leaves(boundary.facts, scale)

    def verify(self, tail: Tail, rows: int) -> None:
        """Raise if an output may depend on another request in a batch of so many rows in all."""
        if rows not in self.verdicts:
            try:
                verify_batch(self, tail, rows // self.unit)
            except (MicrotomeError, RuntimeError, IndexError) as error:
                self.verdicts[rows] = str(error) if isinstance(error, CannotBatch) else describe_error(error)
            else:
                self.verdicts[rows] = None
        if self.verdicts[rows] is not None:
            raise CannotBatch(f"{rows} rows are not computed together: {self.verdicts[rows]}")


class ExampleBoundaries(NamedTuple):
    """Boundaries of the example, of other values in the same shapes, and of both in one batch."""

    one: Boundary
    other: Boundary
    double: Boundary


def make_examples(head: Head, inputs: Inputs) -> ExampleBoundaries:
    """Run what comes before a cut on example inputs, as a batcher of the stages after it needs."""
    inputs = copy_inputs(inputs)  # the model may write into them
    args, kwargs = map_tensors(perturb, (inputs.args, inputs.kwargs))
    both = Inputs(*_concatenate(inputs.args, args), **_concatenate(inputs.kwargs, kwargs))
    one, other, double = (head(*each.args, **each.kwargs) for each in (inputs, Inputs(*args, **kwargs), both))
    return ExampleBoundaries(one, other, double)


def build_batcher(examples: Callable[[], ExampleBoundaries], tail: Tail) -> Batcher | None:
    """Return a verified batcher for the stages of a cut; None if requests cannot be batched, and log the reason."""
    try:
        with torch.no_grad():
            return _build(examples(), tail)
    except (MicrotomeError, RuntimeError, IndexError, StopIteration) as error:  # or the model rejects other shapes
        log.info("requests are computed one by one: %s", describe_error(error))
        return None


def _build(examples: ExampleBoundaries, tail: Tail) -> Batcher:
    one, other, double = examples
    if all(tensor.equal(other.tensors[name]) for name, tensor in one.tensors.items()):
        raise CannotBatch("the example has no values that can be varied")
    rows = {name: len(tensor) for name, tensor in one.tensors.items() if _doubles(tensor, double.tensors[name])}
    is_consistent = all(
        name in rows or tensor.shape == double.tensors[name].shape for name, tensor in one.tensors.items()
    )
    paths = _doubled_facts(one.facts, double.facts)
    if not (is_consistent and rows) or paths is None:
        raise CannotBatch("a doubled batch does not double the boundary")
    _, single, plain = flatten(contents(tail(one)))
    _, doubled, doubled_plain = flatten(contents(tail(double)))
    outputs = frozenset(index for index, tensor in enumerate(single) if _doubles(tensor, doubled[index]))
    numbers = frozenset(index for index, value in enumerate(plain) if _is_double(value, doubled_plain[index]))
    count = next(iter(rows.values()))
    batcher = Batcher(rows, {path: _get(one.facts, path) / count for path in paths}, outputs, numbers)
    try:
        return _with_examples(batcher, tail, one, other)
    except (MicrotomeError, RuntimeError, IndexError):
        if count == 1:
            raise
        return _with_examples(replace(batcher, unit=count, verdicts={}, examples=[]), tail, one, other)


def _with_examples(batcher: Batcher, tail: Tail, one: Boundary, other: Boundary) -> Batcher:
    """Add example requests to a batcher, and verify it on the smallest batches."""
    one, other = (batcher.resize(boundary, batcher.unit) for boundary in (one, other))
    for boundary in (one, other, next(variants(batcher, one))):
        batcher.examples.append((boundary, tail(batcher.concatenate([boundary]))))
    for count in (3, 2):
        batcher.verify(tail, count * batcher.unit)
    return batcher


def _doubles(tensor: Tensor, double: Tensor) -> bool:
    return tensor.dim() > 0 and double.shape == (2 * tensor.shape[0], *tensor.shape[1:])


def _is_double(value: Any, double: Any) -> bool:
    return type(value) is int and type(double) is int and double == 2 * value != value


def _share(count: int, rows: int, total: int) -> int:
    """Return what a request with some of the rows has of a count that grows with them."""
    share, rest = divmod(count * rows, total)
    if rest:
        raise CannotBatch(f"{count} cannot be divided among {total} rows")
    return share


def _concatenate(values: Any, others: Any) -> Any:
    pieces = iter(flatten(others)[1])
    return map_tensors(lambda tensor: torch.cat([tensor, next(pieces)]) if tensor.dim() else tensor, values)


# -- facts: JSON beside the tensors of a boundary ----------------------------------------------------------------------


def _doubled_facts(one: Any, double: Any, path: Path = ()) -> frozenset[Path] | None:
    """Return the paths of the integers that double; None if anything else differs."""
    if isinstance(one, dict | list) and type(one) is type(double) and _keys(one) == _keys(double):
        keys = _keys(one)
        found = [_doubled_facts(one[key], double[key], (*path, key)) for key in keys]
        return None if None in found else frozenset().union(*(paths for paths in found if paths is not None))
    if one == double and type(one) is type(double):
        return frozenset()
    return frozenset({path}) if _is_double(one, double) else None


def _keys(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value)))


def _map_leaves(value: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    if isinstance(value, dict):
        return {key: _map_leaves(item, function, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_leaves(item, function, (*path, index)) for index, item in enumerate(value)]
    return function(path, value)


def _get(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value
