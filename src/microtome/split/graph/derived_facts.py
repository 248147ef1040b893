"""Derive the facts of a boundary from the shapes of the model's inputs.

A program in another runtime computes the tensors of a boundary, and knows nothing of the facts beside them. For a stage
that can be captured as a graph, these depend on the shapes of the inputs alone, so the stage after the cut finds them
by running the stages before it on fake tensors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microtome.engine import Probe, Session
from microtome.engine.argument_names import named_arguments
from microtome.engine.meta_run import substitute_tensors
from microtome.engine.meta_tensors import INTEGER_DTYPES
from microtome.engine.pytree import map_tensors, named_tensors
from microtome.engine.symbolic_shapes import SymbolicShapes
from microtome.errors import BadBoundary, MicrotomeError, Unsupported, describe_error
from microtome.flops.composite import COMPOSITE_FORMULAS
from microtome.inputs import Inputs
from microtome.results.trace import TensorMode
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import INPUT_SHAPES, BoundaryRecord
from microtome.split.boundary.tensor_bytes import are_sizes, copy_strided
from microtome.split.stage import Stage

#: The most elements of an input: the code of a model may loop over sizes.
_MAX_ELEMENTS = 1 << 31

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class TensorLayout(NamedTuple):
    """The shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class DerivedFacts(NamedTuple):
    """The record of a boundary for inputs of some shapes, and the layout of each tensor."""

    record: BoundaryRecord
    tensors: dict[str, TensorLayout]

    def complete(self, boundary: Boundary) -> Boundary:
        """Return a boundary with this record, and its tensors with the strides that they have in the model.

        Raises:
            BadBoundary: The tensors are not those of the cut.
        """
        if boundary.tensors.keys() != self.tensors.keys():
            expected, got = ", ".join(self.tensors), ", ".join(boundary.tensors)
            raise BadBoundary(f"expected the tensors {expected} at the cut {boundary.at!r}, got {got:.200}")
        tensors: dict[str, Tensor] = {}
        for name, (shape, strides, dtype) in self.tensors.items():
            tensor = boundary.tensors[name]
            if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise BadBoundary(
                    f"expected tensor {name!r} of {dtype} and shape {shape} for inputs of these shapes, got "
                    f"{tensor.dtype} and {tuple(tensor.shape)}"
                )
            tensors[name] = tensor if tensor.stride() == strides else copy_strided(tensor, list(strides), 0)
        return Boundary(boundary.at, boundary.fingerprint, tensors, self.record)


def named_inputs(model: torch.nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """The tensors among the model's arguments with their names, each once."""
    named = named_arguments(model, inputs).items()
    first: dict[int, tuple[str, Tensor]] = {}
    for name, value in named:
        for path, tensor in named_tensors(value):
            first.setdefault(id(tensor), (f"{name}{path}", tensor))
    return dict(first.values())


def input_shapes_of(boundary: Boundary, stage: Stage) -> Shapes:
    """Read the shapes of the model's inputs that a boundary has in place of facts.

    Raises:
        BadBoundary: They are not those of this model.
    """
    stated = boundary.facts[INPUT_SHAPES]
    assert stage.example is not None
    example = {name: tuple(tensor.shape) for name, tensor in named_inputs(stage.model, stage.example).items()}
    if not isinstance(stated, Mapping) or not all(map(are_sizes, stated.values())):
        raise BadBoundary(f"{INPUT_SHAPES}: expected a list of sizes for each input, got {stated!r:.200}")
    if stated.keys() != example.keys():
        raise BadBoundary(f"{INPUT_SHAPES}: expected the inputs {', '.join(example)}, got {', '.join(stated):.200}")
    for name, shape in stated.items():
        if len(shape) != len(example[name]) or math.prod(shape) > _MAX_ELEMENTS:
            raise BadBoundary(
                f"{INPUT_SHAPES}: expected {len(example[name])} dimensions of {name!r}, such as {example[name]}, got "
                f"{shape!r:.80}"
            )
    return tuple((name, tuple(stated[name])) for name in example)


def derive_facts(stage: Stage, shapes: Shapes) -> DerivedFacts:
    """Derive what crosses the cut before a stage, for inputs of these shapes.

    Raises:
        Unsupported: It depends on more than the shapes, or the model does not run on them.
    """
    assert stage.example is not None
    assert stage.begins is not None
    if stage.state is not None or stage.spec.states or stage.draws_random_numbers or stage.spec.inputs.num_arrays:
        raise Unsupported(
            "the facts of a boundary cannot be derived from shapes for a model with state, random numbers or numpy "
            "arrays: send the boundary of a stage"
        )
    found = _run_before(stage, shapes)
    layouts = {name: TensorLayout(tuple(one.shape), one.stride(), one.dtype) for name, one in found.tensors.items()}
    assert isinstance(found.record, BoundaryRecord)
    return DerivedFacts(found.record, layouts)


def _describe(shapes: Shapes) -> str:
    inputs = ", ".join(f"{name} of shape {shape}" for name, shape in shapes)
    return f"cannot derive the facts of the boundary for {inputs}"


class _OpObserver(Probe):
    """Does nothing: where operators are observed, the values of integers such as positions are computed on meta."""

    def op(self, *_: Any) -> None:
        pass


def _run_before(stage: Stage, shapes: Shapes) -> Boundary:
    """Run the stages before a stage without computing anything.

    On meta tensors, code takes the branches that it takes on real ones. It may read values of inputs, such as to warn
    of padding: where they do not matter, the facts are the same for zeros and for ones. On fake tensors code may take
    other branches, such as that of transformers, which asks for them; they also stand for tensors on several devices.
    """
    try:
        return _run_on_substitutes(stage, _resize(stage, shapes), "meta")
    except Exception:  # noqa: BLE001  of an operator without a kernel for meta tensors, or where values are needed
        pass
    try:
        zeros, ones = (_run_on_substitutes(stage, _resize(stage, shapes, value), "meta") for value in (0, 1))
        if zeros.record == ones.record:
            return zeros
    except Exception:  # noqa: BLE001  likewise
        pass
    try:
        return _run_on_substitutes(stage, _resize(stage, shapes), "fake")
    except MicrotomeError as error:
        raise Unsupported(f"{_describe(shapes)}: {error}") from error
    except Exception as error:  # from the model's code, which may read values, or refuse the shapes
        raise Unsupported(f"{_describe(shapes)}: {describe_error(error):.300}") from error


def _resize(stage: Stage, shapes: Shapes, value: int | None = None) -> Inputs:
    """The example with meta tensors of these shapes; integers have a value, if there is one."""
    assert stage.example is not None
    sizes = dict(shapes)

    def resize(name: str, tensor: Tensor) -> Tensor:
        if value is None or tensor.dtype not in INTEGER_DTYPES:
            return torch.empty(sizes[name], dtype=tensor.dtype, device="meta")
        return torch.full(sizes[name], value, dtype=tensor.dtype, device=stage.device or "cpu")

    named = named_inputs(stage.model, stage.example)
    resized = {id(tensor): resize(name, tensor) for name, tensor in named.items()}
    args, kwargs = map_tensors(lambda tensor: resized[id(tensor)], (stage.example.args, stage.example.kwargs))
    return Inputs(*args, **kwargs)


def _run_on_substitutes(stage: Stage, inputs: Inputs, mode: TensorMode) -> Boundary:
    symbolic = SymbolicShapes({}, stage.device or torch.device("cpu")) if mode == "fake" else None
    # Without fused paths, whose output is another on fake tensors.
    observed: dict[str, Any] = {"composite": COMPOSITE_FORMULAS} if mode == "meta" else {}
    with (
        warnings.catch_warnings(),
        substitute_tensors(stage.model, inputs, mode, shapes=symbolic) as substitutes,
        torch.no_grad(),
        Session(stage.model, [_OpObserver()] if observed else [], backward=False, **observed),
    ):
        warnings.simplefilter("ignore")
        found: Boundary = stage.before()(*substitutes.args, **substitutes.kwargs)
    return found
