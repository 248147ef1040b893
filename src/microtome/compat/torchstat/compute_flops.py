"""`compute_flops`: the multiply-accumulates of one call of a module."""
# ruff: noqa: N816  torchstat's names

from __future__ import annotations

from typing import Any

from torch import nn

from microtome.compat.torchstat.kinds import first, for_kinds, known
from microtome.flops.conventions import torchstat


def compute_flops(module: nn.Module, inp: Any, out: Any) -> int:
    """Multiply-accumulates of the whole batch; 0 and a warning for a kind of module without a formula.

    >>> from torch import nn, ones
    >>> conv = nn.Conv2d(3, 10, 5)
    >>> x = ones(1, 3, 224, 224)
    >>> compute_flops(conv, x, conv(x))
    36784000
    """
    return known("Flops", module, torchstat.flops(module, first(inp), first(out)), 0)


compute_Conv2d_flops = for_kinds(compute_flops, nn.Conv2d)
compute_BatchNorm2d_flops = for_kinds(compute_flops, nn.BatchNorm2d)
compute_Conv3d_flops = for_kinds(compute_flops, nn.Conv3d)
compute_BatchNorm3d_flops = for_kinds(compute_flops, nn.BatchNorm3d)
compute_ReLU_flops = for_kinds(compute_flops, nn.ReLU, nn.ReLU6, nn.PReLU, nn.ELU, nn.LeakyReLU)
compute_Pool2d_flops = for_kinds(compute_flops, nn.MaxPool2d, nn.AvgPool2d)
compute_Pool3d_flops = for_kinds(compute_flops, nn.MaxPool3d, nn.AvgPool3d)
compute_Linear_flops = for_kinds(compute_flops, nn.Linear)
compute_Upsample_flops = for_kinds(compute_flops, nn.Upsample)
