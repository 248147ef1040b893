"""`compute_memory`: the elements that one call of a module reads and writes."""
# ruff: noqa: N816  torchstat's names

from __future__ import annotations

from typing import Any

from torch import nn

from microtome.compat.torchstat.kinds import first, for_kinds, known
from microtome.flops.conventions import torchstat


def compute_memory(module: nn.Module, inp: Any, out: Any) -> tuple[int, int]:
    """Elements read and written by the whole batch; (0, 0) and a warning for a kind of module without a formula.

    >>> from torch import nn, ones
    >>> conv = nn.Conv2d(3, 10, 5)
    >>> x = ones(1, 3, 224, 224)
    >>> compute_memory(conv, x, conv(x))
    (151288, 484000)
    """
    return known("Memory", module, torchstat.memory(module, first(inp), first(out)), (0, 0))


def num_params(module: nn.Module) -> int:
    """Count the trainable parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


compute_ReLU_memory = for_kinds(compute_memory, nn.ReLU, nn.ReLU6, nn.ELU, nn.LeakyReLU)
compute_PReLU_memory = for_kinds(compute_memory, nn.PReLU)
compute_Conv2d_memory = for_kinds(compute_memory, nn.Conv2d)
compute_BatchNorm2d_memory = for_kinds(compute_memory, nn.BatchNorm2d)
compute_Linear_memory = for_kinds(compute_memory, nn.Linear)
compute_Pool2d_memory = for_kinds(compute_memory, nn.MaxPool2d, nn.AvgPool2d)
