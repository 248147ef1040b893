"""Add up the gradients of weights that several stages train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from microtome.errors import BadQuery
from microtome.split.weights import tensor_at

if TYPE_CHECKING:
    from microtome.split.pipelining.stage_module import StageModule


def sum_tied_gradients(*modules: StageModule, group: dist.ProcessGroup | None = None) -> None:
    """Add up the gradients of weights that several stages train, over the processes of a pipeline.

    Call it in every process of the group, after the backward of all micro-batches and before the optimizer steps: once
    a step, since it adds up all that `grad` has. Each stage that trains a weight then has the same gradient. A process
    that holds none takes part, since it is a collective.

    Args:
        modules: All modules of this process, made with `tied="sum"`. The optimizer takes the parameters of each.
        group: The processes of the pipeline; None: all.

    Raises:
        BadQuery: There is no module, or they are not of one split; or a weight differs between those of this process.
    """
    if not modules or any(module.tied != modules[0].tied for module in modules):
        raise BadQuery('expected the modules of one split, made with tied="sum"')
    for name in modules[0].tied:
        held = _parameters(modules, name)
        gradients = [_gather(weight.grad) for weight in held if weight.grad is not None]
        total = sum(gradients[1:], gradients[0]) if gradients else _zeros(modules[0], name)
        dist.all_reduce(total, group=group)
        for weight in held:
            own = total if weight is held[0] else total.clone()  # since clipping scales each in place
            weight.grad = _shard_like(own, weight)


def _parameters(modules: Sequence[StageModule], name: str) -> list[nn.Parameter]:
    """The parameters of modules for a tied weight."""
    named = (dict(module.named_parameters()).get(name) for module in modules)
    held = list({id(weight): weight for weight in named if weight is not None}.values())
    values = [_local_part(weight.detach()) for weight in held]
    if any(not torch.allclose(value, values[0], rtol=0, atol=0, equal_nan=True) for value in values[1:]):
        raise BadQuery(
            f"{name!r} differs between the modules of this process: each has a parameter of its own for it, so pass "
            "the parameters of all modules to the optimizer, and load a state dict into all"
        )
    return held


def _zeros(module: StageModule, name: str) -> Tensor:
    """The gradient of a weight that has none here."""
    weight = tensor_at(module.source_model, name)
    assert weight is not None
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    return torch.zeros(weight.shape, dtype=weight.dtype, device=device)


# -- weights that FSDP shards ------------------------------------------------------------------------------------------


def _local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gather(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _shard_like(total: Tensor, weight: Tensor) -> Tensor:
    """Distribute a gradient as its weight, which may be in shards."""
    if isinstance(weight, DTensor):
        return distribute_tensor(total, weight.device_mesh, weight.placements, src_data_rank=None)
    return total
