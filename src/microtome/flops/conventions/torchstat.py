"""The counts of torchstat: per module of a known type, for one image where it leaves out the batch.

None means that torchstat has no formula for the type of module. `batch` is the number of images in the tensors, by
default their first size, as in torchstat; a module that receives a batch of windows or frames needs it.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor, nn

from microtome.flops.conventions.base import Convention, ConventionCost

_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.PReLU, nn.ELU, nn.LeakyReLU)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d)
_POOLS_3D = (nn.MaxPool3d, nn.AvgPool3d)


def flops(module: nn.Module, x: Any, out: Any) -> int | None:
    """Count the multiply-accumulates of the whole batch; a bias counts one each."""
    match module:
        case nn.Conv2d() | nn.Conv3d():
            return out.numel() * (prod(module.weight.shape[1:]) + (module.bias is not None))
        case nn.BatchNorm2d() | nn.BatchNorm3d():
            return x.numel() * (2 if module.affine else 1)
        case nn.Linear():
            return out.numel() * x.shape[-1]
        case nn.Upsample():
            return out.numel() // out.shape[1]  # each pixel once, whatever its channels
    return x.numel() if isinstance(module, (*_ACTIVATIONS, *_POOLS, *_POOLS_3D)) else None


def madds(module: nn.Module, x: Any, out: Any, *, batch: int | None = None) -> int | None:
    """Count the multiplications and additions of one image."""
    images = _images(module, out, batch) or 1
    each = out.numel() // images if isinstance(out, Tensor) else 0
    match module:
        case nn.Conv2d() | nn.Conv3d():
            return each * (2 * prod(module.weight.shape[1:]) - 1 + (module.bias is not None))
        case nn.ConvTranspose2d() | nn.ConvTranspose3d():
            kernel = prod(module.kernel_size) * (module.in_channels // module.groups)
            places = x.numel() // module.in_channels // images
            return places * module.out_channels * (2 * kernel - 1 + (module.bias is not None))
        case nn.BatchNorm2d() | nn.BatchNorm3d():
            return 4 * each
        case nn.MaxPool2d() | nn.MaxPool3d():
            return each * (_kernel(module) - 1)
        case nn.AvgPool2d() | nn.AvgPool3d():
            return each * _kernel(module)
        case nn.ReLU() | nn.ReLU6():
            return each
        case nn.Softmax():
            return 3 * each - 1
        case nn.Linear():
            return each * (2 * module.in_features - 1)
        case nn.Bilinear():
            return each * (2 * module.in2_features * (module.in1_features + 1) - 1)
    return None


def memory(module: nn.Module, x: Any, out: Any, *, batch: int | None = None) -> tuple[int, int] | None:
    """Count the elements read and written by the whole batch; parameters are read for every image."""
    match module:
        case nn.Conv2d() | nn.Linear() | nn.PReLU():
            trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
            return x.numel() + _images(module, x, batch) * trainable, out.numel()
        case nn.BatchNorm2d():
            return x.numel() + _images(module, x, batch) * 2 * module.num_features, out.numel()
    return (x.numel(), out.numel()) if isinstance(module, (*_ACTIVATIONS, *_POOLS)) else None


def _images(module: nn.Module, tensor: Any, batch: int | None) -> int:
    """Return the number of images in a tensor; 1 without a batch dimension."""
    if batch is not None or not isinstance(tensor, Tensor):
        return batch or 1
    one = 3 if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, *_POOLS)) else 1
    if isinstance(module, (nn.Conv3d, nn.ConvTranspose3d, *_POOLS_3D)):
        one = 4
    return tensor.shape[0] if tensor.dim() > one else 1


def _kernel(pool: Any) -> int:
    size = pool.kernel_size
    return int(prod(size)) if isinstance(size, tuple | list) else int(size) ** (3 if isinstance(pool, _POOLS_3D) else 2)


def _price_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> ConventionCost:
    x, out = _first_tensor(args), _first_tensor(output)
    if next(module.children(), None) is not None or x is None or out is None:
        return ConventionCost(0, 0, 0, 0, 0)
    read, written = memory(module, x, out) or (0, 0)
    bytes_moved = read * x.element_size(), written * x.element_size()
    return ConventionCost(0, flops(module, x, out) or 0, madds(module, x, out) or 0, *bytes_moved)


def _first_tensor(value: Any) -> Tensor | None:
    items = value if isinstance(value, tuple | list) else (value,)
    return next((item for item in items if isinstance(item, Tensor)), None)


CONVENTION = Convention("torchstat", price_module=_price_module)
