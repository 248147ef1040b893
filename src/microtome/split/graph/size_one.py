"""Find the symbolic sizes for which a graph computes another output than the stage if they are 1.

A symbol stands for 2 or more in torch: `x.shape[0] == 1` in the code of a model is decided without a condition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microtome.engine.pytree import map_tensors
from microtome.engine.symbolic_shapes import ShapeCheck
from microtome.errors import Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import INPUT_SHAPES
from microtome.split.graph.comparison import compare_outputs
from microtome.split.graph.derived_facts import derive_facts, named_inputs
from microtome.split.graph.stage_example import example_of, fill_tensor, run_example
from microtome.split.stage import Stage


class SizeOneTrial(NamedTuple):
    """Arguments and outputs of a stage where some symbols are 1.

    Attributes:
        sizes: The symbols, in the sizes of the tensors that the stage takes.
        dims: The dimensions of the model's inputs that have these sizes, such as `x[0]`.
        tensors: The tensors that a graph of the stage takes.
        expected: The outputs of the stage, by name.
    """

    sizes: tuple[Any, ...]
    dims: tuple[str, ...]
    tensors: list[Tensor]
    expected: dict[str, Tensor]

    def compare(
        self, run: Callable[[Sequence[Tensor]], dict[str, Tensor]], name: str, tolerance: float | None = None
    ) -> None:
        """Raise if a graph or a program cannot run on the tensors, or returns other outputs than the stage.

        Args:
            name: Of what runs, for errors; tolerance: As in `compare_outputs`.

        Raises:
            Unsupported: With the reason.
        """
        where = ", ".join(self.dims)
        try:
            with torch.no_grad():
                got = run(self.tensors)
        except Exception as error:  # of an operator, or of a runtime
            raise Unsupported(f"{name} does not run for {where} of 1: {describe_error(error):.300}") from error
        compare_outputs(got, self.expected, f"{name}, for {where} of 1", tolerance)


def run_with_ones(
    stage: Stage, example: Inputs, shapes: ShapeCheck, symbols: Sequence[Any]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Run a stage on a part of an example in which symbols are 1; return its outputs by name, and what it took.

    Args:
        shapes: Those of the tensors among the model's arguments.

    Raises:
        Unsupported: The stage does not run on that.
    """
    tensors = list(named_inputs(stage.model, example).values())
    ones = shapes.resized(tensors, dict.fromkeys(symbols, 1))
    try:
        smaller = {id(tensor): _crop(tensor, shape) for tensor, shape in zip(tensors, ones, strict=True)}
        args, kwargs = map_tensors(lambda tensor: smaller[id(tensor)], (example.args, example.kwargs))
        return run_example(stage, _input_of(stage, Inputs(*args, **kwargs)))
    except Exception as error:  # of the model's code, which may refuse the size
        dims = ", ".join(dims_of(shapes, symbols))
        raise Unsupported(f"the stage does not run for {dims} of 1: {describe_error(error):.300}") from error


def dims_of(shapes: ShapeCheck, symbols: Iterable[Any]) -> tuple[str, ...]:
    """The dimensions that have one of these symbols as their size, such as `x[0]`."""
    return tuple(dim for symbol in symbols for dim in shapes.dims_of(symbol))


def _crop(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    for dim, size in enumerate(shape):
        tensor = tensor.narrow(dim, 0, size)
    return tensor.clone()


def _input_of(stage: Stage, inputs: Inputs) -> Inputs | Boundary:
    """The arguments of a stage for inputs of the model; random numbers if the weights before it are not here."""
    found = example_of(stage, inputs)
    if found is not None:
        return found
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in named_inputs(stage.model, inputs).items())
    layouts = derive_facts(stage, shapes).tensors
    tensors = {name: fill_tensor(*layout) for name, layout in layouts.items()}
    facts = {INPUT_SHAPES: {name: list(shape) for name, shape in shapes}}
    return Boundary(stage.begins_at or "", stage.fingerprint, tensors, facts)
