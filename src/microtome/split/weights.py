"""The weights of a stage."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from microtome.engine.fingerprint import named_weights
from microtome.engine.module_state import replace_tensors
from microtome.engine.torch_internals import own_buffers, own_parameters
from microtome.split.analysis import Analysis
from microtome.split.crossing import Crossing


def weights_of(analysis: Analysis, begins: Crossing | None, ends: Crossing | None) -> list[str]:
    """The names of the parameters and buffers that operators of a stage read, those it runs again included."""
    trace = analysis.trace
    first = 0 if begins is None else begins.cut.ends
    last = len(trace.ops) if ends is None else ends.cut.ends
    run = set(range(first, last))
    if begins is not None:
        run |= {at for level in begins.levels for at in level.call.ops if at < first}
    memories = {trace.values[at].memory for index in run for at in trace.ops[index].inputs}
    held = [value for value in trace.values if value.origin in ("parameter", "buffer") and value.memory in memories]
    return [value.name for value in held if value.name is not None]


def tensor_at(model: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer of this name."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    found = own_parameters(module).get(last)
    return own_buffers(module).get(last) if found is None else found


def stripped(model: nn.Module, kept: Iterable[str]) -> nn.Module:
    """A copy of a model that shares these weights with it and has the others on meta."""
    keep = set(kept)
    memo: dict[int, Any] = {
        id(tensor): tensor if name in keep else _empty(tensor) for name, tensor in named_weights(model)
    }
    return copy.deepcopy(model, memo)


def strip(model: nn.Module, kept: Iterable[str]) -> None:
    """Put all but these weights of a model on meta."""
    keep = set(kept)
    empty = {id(tensor): _empty(tensor) for name, tensor in named_weights(model) if name not in keep}
    replace_tensors(model, lambda tensor: empty.get(id(tensor), tensor))


def _empty(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
