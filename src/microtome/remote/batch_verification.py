"""Verify that the outputs of a batch are those of its requests alone.

For each number of rows, three checks run on variants of the example: (1) no operator of the tail combines values of
different requests, and no value is read into Python: `engine/dependence.py` follows each element; (2) an output is the
same, bit for bit, whatever else is in the batch, also large numbers, inf and NaN; (3) it equals that of the request
alone, to the precision of the kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, cycle, islice
from math import comb
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from microtome.engine.dependence import Dependence
from microtome.errors import MicrotomeError
from microtome.split.analysis.structure_spec import flatten
from microtome.split.boundary.boundary import Boundary
from microtome.split.comparison import Difference, differences
from microtome.split.execution.placeholder import unwrap

if TYPE_CHECKING:
    from microtome.remote.batching import Batcher

Tail = Callable[[Boundary], Any]

#: The tolerance of an output, relative to each element and to the largest one of its column.
_RELATIVE_TOLERANCE = 1e-4
#: The same in roundings of the largest element of its row or column, at most: kernels sum up in different orders.
_MAX_ROUNDINGS = 64
#: Scale and offset of the values of a variant.
_VARIANTS = ((1.0, 0.0), (-37.0, 5.0), (1e4, 0.0), (1e-4, -1e3), (1.0, torch.inf), (1.0, -torch.inf), (1.0, torch.nan))


class CannotBatch(MicrotomeError, ValueError):
    """Requests that cannot be computed together."""


def verify_batch(batcher: Batcher, tail: Tail, count: int) -> None:
    """Raise if an output depends on another request in a batch of `count` example requests."""
    examples = list(islice(cycle(batcher.examples), count))
    requests = [boundary for boundary, _ in examples]
    _check_dependence(batcher, tail, requests)

    def run(boundaries: Sequence[Boundary]) -> list[Any]:
        return batcher.split(tail(batcher.concatenate(boundaries)), [batcher.unit] * count)

    outputs = run(requests)
    tolerances = cycle(_tolerances([alone for _, alone in batcher.examples]))
    if not all(
        _is_close(output, alone, next(tolerances)) for output, (_, alone) in zip(outputs, examples, strict=True)
    ):
        raise CannotBatch("the outputs of the batch differ from those of each request alone")
    fixed = (0, count - 1) if count > 2 else (0,)
    for variant in variants(batcher, requests[0]):
        changed = run([request if index in fixed else variant for index, request in enumerate(requests)])
        if any(next(_differences(changed[index], outputs[index]), None) is not None for index in fixed):
            raise CannotBatch("an output depends on another request of the batch")


def _check_dependence(batcher: Batcher, tail: Tail, requests: Sequence[Boundary]) -> None:
    """Raise if an element of an output depends on another request, or the control flow on any."""
    for labels in _labels(len(requests)):
        batch = batcher.concatenate(requests)
        with Dependence(unwrap) as dependence:
            for name in batcher.example_rows:
                for label, part in zip(labels, batch.tensors[name].chunk(len(requests)), strict=True):
                    dependence.mark(part, label)
            output = tail(batch)
        for index, tensor in enumerate(flatten(contents(output))[1]):
            found = dependence.labels(tensor)
            if index not in batcher.batched_outputs:
                if found.any():
                    raise CannotBatch(f"output {index} does not grow with the batch, and depends on it")
                continue
            for label, part in zip(labels, found.chunk(len(requests)), strict=True):
                if not (part == label).any() or (part & ~label & 255).any():
                    raise CannotBatch(f"output {index} of a request does not depend on that request alone")


def contents(output: Any) -> Any:
    """Return the tensors and facts of a boundary, which a stage before the last returns; other outputs as they are."""
    return {"tensors": output.tensors, "facts": output.facts} if isinstance(output, Boundary) else output


def _differences(output: Any, expected: Any) -> Iterator[Difference]:
    """Find the differences between two outputs, or two boundaries."""
    if isinstance(output, Boundary):
        if json.dumps(output.facts) != json.dumps(expected.facts):
            yield Difference("facts", "other facts")
        output, expected = output.tensors, expected.tensors
    yield from differences(output, expected)


def _labels(count: int) -> Iterator[list[int]]:
    """Yield bit masks for `count` requests; in one of the runs, of any two requests neither mask contains the other.

    All masks of a run have equally many bits. More than 70 requests are numbered in several digits, one run for each.
    """
    bits = next((bits for bits in range(2, 8) if comb(bits, bits // 2) >= count), 8)
    masks = [sum(1 << bit for bit in chosen) for chosen in combinations(range(bits), bits // 2)]
    weight = 1
    while weight < count:
        yield [masks[number // weight % len(masks)] for number in range(count)]
        weight *= len(masks)


def variants(batcher: Batcher, boundary: Boundary) -> Iterator[Boundary]:
    """Yield boundaries of the same shapes with values of other order, scale and sign, and with inf and NaN."""
    for shift, (scale, offset) in enumerate(_VARIANTS, 1):
        tensors = dict(boundary.tensors)
        for name in batcher.example_rows:
            tensor = tensors[name]
            rolled = tensor.reshape(-1).roll(shift).view(tensor.shape)  # integers may be indices: keep their range
            tensors[name] = rolled * scale + offset if tensor.is_floating_point() else rolled
        yield replace(boundary, tensors=tensors)


def perturb(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape with other values: reversed, so that indices stay in range."""
    if not tensor.dim():
        return tensor
    flipped = tensor.flip(-1)
    if tensor.is_floating_point() and tensor.numel() and flipped.equal(tensor):  # such as zeros
        return tensor + torch.linspace(0.5, 1.0, tensor.numel(), device=tensor.device).to(tensor.dtype).view_as(tensor)
    return flipped


def _tolerances(outputs: Sequence[Any]) -> list[list[Tensor]]:
    """Return, for each output, the absolute tolerance of each element of its tensors.

    Rounding changes a small element by some roundings of the largest one in its row. That alone would let a large
    column hide errors in a small one, so the tolerance is at most `_RELATIVE_TOLERANCE` of the largest element of the
    column. A column is a slice at one index of a dimension, over all outputs; of several dimensions, the one with the
    smallest maximum counts.
    """
    by_tensor = []
    for tensors in zip(*map(_real_tensors, outputs), strict=True):
        if not (tensors[0].is_floating_point() and tensors[0].numel()):
            by_tensor.append([torch.zeros_like(tensor, dtype=torch.float64) for tensor in tensors])
            continue
        sizes = torch.stack([tensor.detach().abs().to(torch.float64) for tensor in tensors])
        sizes = torch.where(sizes.isfinite(), sizes, 0.0)
        row = sizes.amax([*range(2, sizes.dim())], keepdim=True) if sizes.dim() > 2 else sizes
        column = sizes.amax().expand_as(sizes)
        for dim in range(min(2, sizes.dim() - 1), sizes.dim()):
            column = column.minimum(sizes.amax([other for other in range(sizes.dim()) if other != dim], keepdim=True))
        rounding = _MAX_ROUNDINGS * torch.finfo(tensors[0].dtype).eps * row.maximum(column)
        by_tensor.append([*(rounding.minimum(_RELATIVE_TOLERANCE * column) + _RELATIVE_TOLERANCE * sizes)])
    return [list(tolerances) for tolerances in zip(*by_tensor, strict=True)]


def _is_close(output: Any, alone: Any, tolerances: Sequence[Tensor]) -> bool:
    """Whether an output of a batch equals that of the request alone, within the tolerances."""
    if any(difference.largest is None for difference in _differences(output, alone)):
        return False
    triples = zip(_real_tensors(output), _real_tensors(alone), tolerances, strict=True)
    return all(bool(_are_close(one, other, tolerance).all()) for one, other, tolerance in triples)


def _are_close(one: Tensor, other: Tensor, tolerance: Tensor) -> Tensor:
    """Compare two tensors by element: equal, both NaN, or finite and within the tolerance."""
    distance = (one.to(torch.float64) - other.to(torch.float64)).abs()
    is_near = one.isfinite() & other.isfinite() & (distance <= tolerance) & one.is_floating_point()
    return (one == other) | (one.isnan() & other.isnan()) | is_near


def _real_tensors(output: Any) -> list[Tensor]:
    """Return the tensors of an output, complex ones as pairs of real numbers."""
    tensors = flatten(contents(output))[1]
    return [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]
