"""Add up the gradients of weights that several stages train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from microtome.errors import BadQuery
from microtome.split.weights import tensor_at

if TYPE_CHECKING:
    import torch.distributed as dist

    from microtome.split.pipelining.stage_module import StageModule


def sum_tied_gradients(*modules: StageModule, group: dist.ProcessGroup | None = None) -> None:
    """Add up the gradients of weights that several stages train, over the processes of a pipeline.

    Call it in every process of the group, after the backward of all micro-batches and before the optimizer steps. Each
    process that holds a weight then has the same gradient. One that holds none takes part, since it is a collective.

    Args:
        modules: All modules of this process, made with `tied="sum"`; those share the weights among them.
        group: The processes of the pipeline; None: all.

    Raises:
        BadQuery: There is no module, or they are not of one split.
    """
    import torch.distributed as dist

    if not modules or any(module.tied != modules[0].tied for module in modules):
        raise BadQuery('expected the modules of one split, made with tied="sum"')
    for name in modules[0].tied:
        held = next(
            (weight for module in modules if (weight := dict(module.named_parameters()).get(name)) is not None), None
        )
        total = _gradient_of(modules[0], name) if held is None or held.grad is None else held.grad
        dist.all_reduce(total, group=group)
        if held is not None:
            held.grad = total


def _gradient_of(module: StageModule, name: str) -> Tensor:
    """The gradient of a weight that has none here: zeros."""
    weight = tensor_at(module.source_model, name)
    assert weight is not None
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    return torch.zeros(weight.shape, dtype=weight.dtype, device=device)
