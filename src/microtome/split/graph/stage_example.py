"""Arguments and outputs of a stage on an example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microtome.engine.meta_run import copy_inputs
from microtome.engine.pytree import map_tensors, named_tensors, tensors_in
from microtome.errors import Unsupported
from microtome.inputs import Inputs
from microtome.split.boundary.boundary import Boundary
from microtome.split.stage import Stage


def example_of(stage: Stage, inputs: Inputs | None = None) -> Inputs | Boundary | None:
    """The arguments of the stage for inputs of the model; None: the weights before it are not here.

    Args:
        inputs: None: those that the model was split on.
    """
    inputs = stage.example if inputs is None else inputs
    if inputs is None or stage.begins is None:
        return inputs
    try:
        with torch.no_grad():
            copies = copy_inputs(inputs, stage.model)  # the model may write to its inputs
            boundary: Boundary = stage.before()(*copies.args, **copies.kwargs)
    except (Unsupported, RuntimeError):  # weights on meta beside others
        return None
    return None if any(tensor.is_meta for tensor in boundary.tensors.values()) else boundary


def run_example(stage: Stage, example: Inputs | Boundary) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Run a stage on an example; return its outputs by name, as a graph does, and the tensors that the graph takes."""
    every = tensors_in((example.args, example.kwargs)) if isinstance(example, Inputs) else example.tensors.values()
    tensors = list({id(tensor): tensor for tensor in every}.values())
    with torch.no_grad():
        output = stage.run(*copy_example(stage, example))
    if isinstance(output, Boundary):
        return dict(output.tensors), tensors
    return {path or "output": tensor for path, tensor in named_tensors(output)}, tensors


def copy_example(stage: Stage, example: Inputs | Boundary) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a run of a stage on an example, which stays as it is."""
    if isinstance(example, Boundary):
        return (example,), {}
    copies = copy_inputs(example, stage.model)
    return copies.args, copies.kwargs


def fill_inputs(inputs: Inputs, device: torch.device | None) -> Inputs:
    """Replace tensors without values, of a stage that was loaded, by random numbers and zeros."""

    def fill(tensor: Tensor) -> Tensor:
        return fill_tensor(tuple(tensor.shape), tensor.stride(), tensor.dtype).to(device) if tensor.is_meta else tensor

    args, kwargs = map_tensors(fill, (inputs.args, inputs.kwargs))
    return Inputs(*args, **kwargs)


def fill_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make a tensor of the same random numbers each time, or of zeros if it has no floating-point numbers."""
    tensor = torch.empty_strided(shape, strides, dtype=dtype).zero_()
    return tensor.uniform_(generator=torch.Generator().manual_seed(0)) if tensor.is_floating_point() else tensor
