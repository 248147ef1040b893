"""`compute_memory`: the elements that one call of a module reads and writes."""
# ruff: noqa: N816  torchstat's names

from __future__ import annotations

from typing import Any

from torch import nn

from microtome.compat.torchstat.counting import count, for_types
from microtome.flops.conventions import torchstat


def compute_memory(module: nn.Module, inp: Any, out: Any) -> tuple[int, int]:
    """Count the elements that the whole batch reads and writes; (0, 0) and a warning if there is no formula.

    >>> from torch import nn, ones
    >>> compute_memory(nn.Linear(6, 5), ones(1, 6), ones(1, 5))
    (41, 5)
    """
    return count("Memory", torchstat.memory, (0, 0), module, inp, out)


def num_params(module: nn.Module) -> int:
    """Count the trainable parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


compute_ReLU_memory = for_types(compute_memory, nn.ReLU, nn.ReLU6, nn.ELU, nn.LeakyReLU)
compute_PReLU_memory = for_types(compute_memory, nn.PReLU)
compute_Conv2d_memory = for_types(compute_memory, nn.Conv2d)
compute_BatchNorm2d_memory = for_types(compute_memory, nn.BatchNorm2d)
compute_Linear_memory = for_types(compute_memory, nn.Linear)
compute_Pool2d_memory = for_types(compute_memory, nn.MaxPool2d, nn.AvgPool2d)
