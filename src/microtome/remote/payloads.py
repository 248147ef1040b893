"""Inputs and outputs of a model as boundaries, and the bounds and checks of a server's reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microtome.engine.torch_internals import is_autocast_enabled
from microtome.errors import BadBoundary, Unsupported
from microtome.inputs import Inputs
from microtome.remote.protocol import DEFAULT_REPLY_BYTES, MAX_MESSAGE_BYTES
from microtome.split.analysis.arrays import to_array, to_tensor
from microtome.split.analysis.structure_spec import Example, Plain, StructureSpec, TensorSpec, check_structure, flatten
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.size_bounds import stated_bytes
from microtome.split.boundary.tensor_bytes import moved
from microtome.split.graph.exported_stage import structure_digest

#: The cut before the first layer: the inputs cross, and the whole model runs where they are sent.
INPUTS = ""
#: Bytes that decoding a reply may take for each byte of the output: codecs and layouts need temporary copies.
_DECODING_FACTOR = 12


def check_not_autocast() -> None:
    """Raise if autocast is on: a server computes in the dtypes of its weights."""
    if is_autocast_enabled():
        raise Unsupported(
            "expected no autocast around a request, got one: the server computes in the dtypes of its weights. Convert "
            "the model on both sides, such as with model.bfloat16()"
        )


def pack_inputs(inputs: Inputs, spec: StructureSpec, fingerprint: str) -> Boundary:
    """Pack the inputs of a model, of the structure that the example has."""
    arrays: list[Any] = []
    got, tensors, plain = flatten((inputs.args, inputs.kwargs), arrays=arrays)
    check_structure("the structure of the inputs", spec, got)
    packed = _pack(INPUTS, fingerprint, [*tensors, *map(to_tensor, arrays)], plain)
    packed.facts["structure"] = structure_digest(spec.text)  # for a server that has not the model's code
    return packed


def unpack_inputs(boundary: Boundary, spec: StructureSpec, device: torch.device | None) -> Inputs:
    args, kwargs = _unpack(boundary, spec, device, "inputs")
    return Inputs(*args, **kwargs)


def pack_output(output: Any, spec: StructureSpec, at: str, fingerprint: str, states: Sequence[Any] = ()) -> Boundary:
    """Pack the output of a model.

    Args:
        states: The state objects of a session, of which the other side has its own.

    Raises:
        Unsupported: If it contains an object that cannot be sent.
    """
    got, tensors, plain = flatten(output, list(states))
    if got.unsupported is not None:
        raise Unsupported(
            f"the model returns a {got.unsupported}, which cannot be sent: tensors, numbers and strings can. Pass "
            "use_cache=False to a language model, or run its steps in a session of the client"
        )
    check_structure("the structure of the output", spec, got)
    return _pack(at, fingerprint, tensors, plain)


def unpack_output(
    boundary: Boundary,
    spec: StructureSpec,
    device: torch.device | None,
    expected: ExpectedReply | None = None,
    states: Sequence[Any] = (),
) -> Any:
    """Unpack the output of a model.

    Args:
        expected: Checks whether the model can have returned it; None: the other side is trusted.
        states: The state objects of a session, which take the place of those of the other side.

    Raises:
        BadBoundary: If the model cannot have returned it.
    """
    return _unpack(boundary, spec, device, "output", None if expected is None else expected.check, states)


def _pack(at: str, fingerprint: str, tensors: list[Tensor], plain: list[Plain]) -> Boundary:
    names: dict[int, str] = {}
    order = [names.setdefault(id(tensor), str(index)) for index, tensor in enumerate(tensors)]
    unique = {name: tensors[int(name)].detach() for name in names.values()}
    return Boundary(at, fingerprint, unique, {"plain": plain, "tensors": order})


def _unpack(
    boundary: Boundary,
    spec: StructureSpec,
    device: torch.device | None,
    name: str,
    check: Callable[[Boundary, list[str]], None] | None = None,
    states: Sequence[Any] = (),
) -> Any:
    plain, order = boundary.facts.get("plain"), boundary.facts.get("tensors")
    count = spec.num_tensors + spec.num_arrays
    fits = isinstance(order, list) and len(order) == count and set(boundary.tensors) == {*map(str, order)}
    fits = fits and isinstance(plain, list) and len(plain) == spec.num_plain
    fits = fits and all(isinstance(value, bool | int | float | str | None) for value in plain or ())
    if not fits:
        got = len(order) if isinstance(order, list) else len(boundary.tensors)
        raise BadBoundary(
            f"expected {count} tensors and {spec.num_plain} other values in the {name}, got {got} tensors: use the "
            "same model on both sides"
        )
    assert isinstance(plain, list)
    assert isinstance(order, list)
    if check is not None:
        check(boundary, list(map(str, order)))
    on_device = {key: tensor if device is None else moved(tensor, device) for key, tensor in boundary.tensors.items()}
    arrays = [to_array(boundary.tensors[str(key)]) for key in order[spec.num_tensors :]]
    tensors = [on_device[str(key)] for key in order[: spec.num_tensors]]
    return spec.unflatten(tensors, plain, list(states), arrays=arrays)


class ExpectedReply:
    """Bounds and checks of the reply to one request, from the output of the example.

    Attributes:
        reply_bytes: The most bytes of the message.
        decoding_bytes: The most memory that decoding it may take.
    """

    def __init__(self, example: Example, inputs: Inputs, max_bytes: int | None = None) -> None:
        """Compare the inputs with those of the example.

        Args:
            max_bytes: The most bytes of the reply; None: derive them from the example.
        """
        _, tensors, plain = flatten((inputs.args, inputs.kwargs))
        specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
        likeness = _compare(specs, example.inputs)
        self._example = example
        self._has_same_dtypes = likeness.has_same_dtypes and repr(plain) == repr(example.plain)
        self._has_same_shapes = self._has_same_dtypes and specs == example.inputs
        self._has_same_rank = self._has_same_dtypes and likeness.has_same_rank
        self._max_bytes = max_bytes
        self._growth = likeness.growth
        output_bytes = _total_bytes(example.outputs)
        self.reply_bytes = self.bound(output_bytes)
        self.decoding_bytes = self.bound_decoding(output_bytes)

    def bound(self, example_bytes: int) -> int:
        """Return the most bytes of a reply whose tensors have so many on the example."""
        derived = max(DEFAULT_REPLY_BYTES, self._grown(example_bytes))
        return min(derived if self._max_bytes is None else self._max_bytes, MAX_MESSAGE_BYTES)

    def bound_decoding(self, example_bytes: int) -> int:
        """Return the most memory that decoding such a reply may take."""
        reply_bytes = self.bound(example_bytes)
        return max(_DECODING_FACTOR * min(self._grown(example_bytes), reply_bytes), 2 * reply_bytes)

    def _grown(self, example_bytes: int) -> int:
        return 2 * round(example_bytes * self._growth)

    def check(self, output: Boundary, names: Sequence[str]) -> None:
        """Raise if the model cannot have returned this output.

        Args:
            names: The names of its tensors in order, with repetitions.
        """
        for index, (name, spec) in enumerate(zip(names, self._example.outputs, strict=True)):
            tensor = output.tensors[name]
            if self._has_same_dtypes and tensor.dtype != spec.dtype:
                raise _unexpected(index, f"dtype {spec.dtype}", tensor)
            if self._has_same_rank and tensor.dim() != len(spec.shape):
                raise _unexpected(index, f"{len(spec.shape)} dimensions", tensor)
            if self._has_same_shapes and self._example.is_static and tuple(tensor.shape) != spec.shape:
                raise _unexpected(index, f"shape {spec.shape}", tensor)


class _Likeness(NamedTuple):
    """A comparison of inputs with those of the example.

    Attributes:
        has_same_rank: Whether the output has as many dimensions as that of the example.
        growth: A bound of the growth of the output.
    """

    has_same_dtypes: bool
    has_same_rank: bool
    growth: float


@lru_cache(1024)  # of most requests, the inputs are alike
def _compare(specs: tuple[TensorSpec, ...], example: tuple[TensorSpec, ...]) -> _Likeness:
    has_same_dtypes = [spec.dtype for spec in specs] == [spec.dtype for spec in example]
    return _Likeness(has_same_dtypes, not _may_squeeze(specs, example), _growth(specs, example))


def _unexpected(index: int, expected: str, tensor: Tensor) -> BadBoundary:
    return BadBoundary(
        f"the reply is not an output of this model: expected {expected} for tensor {index}, as on the example, got "
        f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    )


@lru_cache(1024)
def _total_bytes(specs: tuple[TensorSpec, ...]) -> int:
    return sum(stated_bytes(spec.shape, None, spec.dtype) for spec in specs)


def _growth(specs: tuple[TensorSpec, ...], example: tuple[TensorSpec, ...]) -> float:
    """Bound the growth of the output relative to the example.

    It grows with the bytes of the inputs and, as for attention matrices, once more with the longest dimension.
    """
    example_bytes = _total_bytes(example)
    ratio = max(_total_bytes(specs) / example_bytes, 1.0) if example_bytes else 1.0
    if not _have_same_ranks(specs, example):
        return ratio**2
    lengths = (
        length / max(reference, 1)
        for spec, known in zip(specs, example, strict=True)
        for length, reference in zip(spec.shape[1:], known.shape[1:], strict=True)
    )
    return ratio * max([1.0, *lengths])


def _may_squeeze(specs: Sequence[TensorSpec], example: Sequence[TensorSpec]) -> bool:
    """Whether a dimension is 1 in only one of the two, so that `squeeze` gives another rank."""
    if not _have_same_ranks(specs, example):
        return True
    pairs = (
        pair for one, other in zip(specs, example, strict=True) for pair in zip(one.shape, other.shape, strict=True)
    )
    return any((length == 1) != (reference == 1) for length, reference in pairs)


def _have_same_ranks(specs: Sequence[TensorSpec], example: Sequence[TensorSpec]) -> bool:
    return [len(spec.shape) for spec in specs] == [len(spec.shape) for spec in example]
