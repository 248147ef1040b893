"""`compute_flops`: the multiply-accumulates of one call of a module."""
# ruff: noqa: N816  torchstat's names

from __future__ import annotations

from typing import Any

from torch import nn

from microtome.compat.torchstat.counting import count, for_types
from microtome.flops.conventions import torchstat


def compute_flops(module: nn.Module, inp: Any, out: Any) -> int:
    """Count the multiply-accumulates of the whole batch; 0 and a warning if the type of module has no formula.

    >>> from torch import nn, ones
    >>> compute_flops(nn.Linear(6, 5), ones(3, 6), ones(3, 5))
    90
    """
    return count("Flops", torchstat.flops, 0, module, inp, out)


compute_Conv2d_flops = for_types(compute_flops, nn.Conv2d)
compute_BatchNorm2d_flops = for_types(compute_flops, nn.BatchNorm2d)
compute_Conv3d_flops = for_types(compute_flops, nn.Conv3d)
compute_BatchNorm3d_flops = for_types(compute_flops, nn.BatchNorm3d)
compute_ReLU_flops = for_types(compute_flops, nn.ReLU, nn.ReLU6, nn.PReLU, nn.ELU, nn.LeakyReLU)
compute_Pool2d_flops = for_types(compute_flops, nn.MaxPool2d, nn.AvgPool2d)
compute_Pool3d_flops = for_types(compute_flops, nn.MaxPool3d, nn.AvgPool3d)
compute_Linear_flops = for_types(compute_flops, nn.Linear)
compute_Upsample_flops = for_types(compute_flops, nn.Upsample)
