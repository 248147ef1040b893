"""`compute_madd`: the multiplications and additions of one call of a module."""
# ruff: noqa: N802, N816  torchstat's names

from __future__ import annotations

from typing import Any

from torch import nn

from microtome.compat.torchstat.counting import count, for_types
from microtome.flops.conventions import torchstat


def compute_madd(module: nn.Module, inp: Any, out: Any) -> int:
    """Count the multiplications and additions of one image; 0 and a warning if the type of module has no formula.

    >>> from torch import nn, ones
    >>> conv = nn.Conv2d(3, 10, 5)
    >>> x = ones(1, 3, 224, 224)
    >>> compute_madd(conv, x, conv(x))
    72600000
    """
    return count("MAdd", torchstat.madds, 0, module, inp, out)


compute_Conv2d_madd = for_types(compute_madd, nn.Conv2d)
compute_Conv3d_madd = for_types(compute_madd, nn.Conv3d)
compute_ConvTranspose2d_madd = for_types(compute_madd, nn.ConvTranspose2d)
compute_ConvTranspose3d_madd = for_types(compute_madd, nn.ConvTranspose3d)
compute_BatchNorm2d_madd = for_types(compute_madd, nn.BatchNorm2d)
compute_BatchNorm3d_madd = for_types(compute_madd, nn.BatchNorm3d)
compute_MaxPool2d_madd = for_types(compute_madd, nn.MaxPool2d)
compute_MaxPool3d_madd = for_types(compute_madd, nn.MaxPool3d)
compute_AvgPool2d_madd = for_types(compute_madd, nn.AvgPool2d)
compute_AvgPool3d_madd = for_types(compute_madd, nn.AvgPool3d)
compute_ReLU_madd = for_types(compute_madd, nn.ReLU, nn.ReLU6)
compute_Softmax_madd = for_types(compute_madd, nn.Softmax)
compute_Linear_madd = for_types(compute_madd, nn.Linear)


def compute_Bilinear_madd(module: nn.Bilinear, inp1: Any, inp2: Any, out: Any) -> int:
    return for_types(compute_madd, nn.Bilinear)(module, (inp1, inp2), out)
