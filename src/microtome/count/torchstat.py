"""What torchstat counts: per module, of the kinds it knows, for one image where it leaves the batch out."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor, nn

_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.PReLU, nn.ELU, nn.LeakyReLU)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d)


def flops(module: nn.Module, x: Tensor, out: Tensor) -> int | None:
    """Multiply-accumulates, a bias as one each; None for a kind of module that torchstat does not know."""
    match module:
        case nn.Conv2d():
            return out.numel() * (prod(module.weight.shape[1:]) + (module.bias is not None))
        case nn.BatchNorm2d():
            return x.numel() * (2 if module.affine else 1)
        case nn.Linear():
            return out.numel() * x.shape[-1]
        case nn.Upsample():
            return out.numel()
    return x.numel() if isinstance(module, (*_ACTIVATIONS, *_POOLS)) else None


def madds(module: nn.Module, x: Any, out: Tensor) -> int | None:
    """Multiplications and additions, counted apart, of one image; None for a kind that torchstat does not know."""
    each = out.numel() // out.shape[0] if out.dim() and out.shape[0] else out.numel()
    match module:
        case nn.Conv2d():
            return each * (2 * prod(module.weight.shape[1:]) - 1 + (module.bias is not None))
        case nn.ConvTranspose2d():
            kernel = prod(module.kernel_size) * (module.in_channels // module.groups)
            return prod(x.shape[2:]) * module.out_channels * (2 * kernel - 1 + (module.bias is not None))
        case nn.BatchNorm2d():
            return 4 * each
        case nn.MaxPool2d():
            return each * (_kernel(module.kernel_size) - 1)
        case nn.AvgPool2d():
            return each * _kernel(module.kernel_size)
        case nn.ReLU() | nn.ReLU6():
            return each
        case nn.Softmax():
            return 3 * each - 1
        case nn.Linear():
            return each * (2 * module.in_features - 1)
        case nn.Bilinear():
            return each * (2 * module.in2_features * (module.in1_features + 1) - 1)
    return None


def memory(module: nn.Module, x: Tensor, out: Tensor) -> tuple[int, int] | None:
    """Elements read and written; None for a kind that torchstat does not know. Parameters are read for every image."""
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    batch = x.shape[0] if x.dim() else 1
    match module:
        case nn.Conv2d() | nn.Linear() | nn.PReLU():
            return x.numel() + batch * trainable, out.numel()
        case nn.BatchNorm2d():
            return x.numel() + batch * 2 * module.num_features, out.numel()
    return (x.numel(), out.numel()) if isinstance(module, (*_ACTIVATIONS, *_POOLS)) else None


def _kernel(size: Any) -> int:
    return int(prod(size)) if isinstance(size, tuple | list) else int(size) ** 2
