"""The weights of a stage."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from microtome.engine.fingerprint import named_weights
from microtome.engine.module_state import replace_tensors, set_attribute
from microtome.engine.selectors import named_modules
from microtome.engine.torch_internals import own_buffers, own_children, own_parameters
from microtome.split.analysis.analysis import Analysis
from microtome.split.cuts.crossing import Crossing


def weights_of(analysis: Analysis, begins: Crossing | None, ends: Crossing | None) -> list[str]:
    """The names of the parameters and buffers that the operators of a stage read, replayed operators included."""
    trace = analysis.trace
    first = 0 if begins is None else begins.cut.ends
    last = len(trace.ops) if ends is None else ends.cut.ends
    ops = set(range(first, last))
    if begins is not None:
        ops |= {op for level in begins.levels for op in level.call.ops if op < first}
    memories = {trace.values[value].memory for op in ops for value in trace.ops[op].inputs}
    weights = (value for value in trace.values if value.origin in ("parameter", "buffer"))
    return [value.name for value in weights if value.memory in memories and value.name is not None]


def tensor_at(model: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer of this name."""
    *path, last = name.split(".")
    module: nn.Module | None = model
    for step in path:
        module = None if module is None else own_children(module).get(step)
    if module is None:  # it is no registered child, or there is none
        module = model.get_submodule(".".join(path))
    parameter = own_parameters(module).get(last)
    return own_buffers(module).get(last) if parameter is None else parameter


def copy_with_weights(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Copy a model; these weights are shared with the copy, the others of the copy are on meta."""
    shared = set(names)
    memo: dict[int, Any] = {
        id(tensor): tensor if name in shared else _to_meta(tensor) for name, tensor in named_weights(model)
    }
    return copy.deepcopy(model, memo)


def attribute_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors that are plain attributes of modules, which `state_dict` lacks."""
    return [
        (f"{path}.{name}" if path else name, value)
        for path, module in named_modules(model)
        for name, value in module.__dict__.items()
        if isinstance(value, Tensor)
    ]


def fill_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set parameters and buffers of a model, tied ones in every module that holds them."""
    filled: dict[int, Tensor] = {}
    for name, tensor in weights.items():
        old = tensor_at(model, name)
        filled[id(old)] = nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor
    replace_tensors(model, lambda tensor: filled.get(id(tensor), tensor))


def move_attributes(model: nn.Module, device: torch.device | str) -> None:
    """Move the tensors that are plain attributes of modules to a device."""
    for name, tensor in attribute_tensors(model):
        path, _, last = name.rpartition(".")
        set_attribute(model.get_submodule(path), last, tensor.to(device))


def strip_weights(model: nn.Module) -> None:
    """Move all weights of a model to meta."""
    stripped = {id(tensor): _to_meta(tensor) for _, tensor in named_weights(model)}
    replace_tensors(model, lambda tensor: stripped.get(id(tensor), tensor))


def _to_meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_like(tensor, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
