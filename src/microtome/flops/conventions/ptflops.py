"""The counts of ptflops: per module of a known type, and per function of torch that it replaces.

It counts both, so a ReLU module and the function inside it make two.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from microtome.flops.conventions.base import Convention, ConventionCost
from microtome.flops.registry import OpCost, op_name

_FUNCTIONS = {
    F.relu, F.prelu, F.elu, F.relu6, F.gelu, F.silu, F.softmax, F.upsample, F.interpolate,
    F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d,
}  # fmt: skip
_PRODUCTS = {torch.matmul, Tensor.matmul, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.addmm, Tensor.addmm, torch.baddbmm}  # fmt: skip  # noqa: E501
#: Not `Tensor.add`, which ptflops counts too: `x + y`, which it does not count, cannot be told from `x.add(y)`.
_SUMS = {torch.add, torch.mul}

_ELEMENTS = (nn.ReLU, nn.PReLU, nn.ELU, nn.LeakyReLU, nn.ReLU6, nn.GELU)
_POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm, nn.LayerNorm,
)  # fmt: skip
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_STATE = {nn.RNN: 1, nn.RNNCell: 1, nn.GRU: 7, nn.GRUCell: 7, nn.LSTM: 10, nn.LSTMCell: 10}


_PRODUCT_NAMES = ("mm", "bmm", "addmm", "baddbmm")
_COUNTED = {
    "relu", "_prelu_kernel", "elu", "hardtanh", "relu6", "gelu", "silu", "_softmax", "mean",
    "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
}  # fmt: skip


def _count_op(function: Any, func: Any, args: tuple[Any, ...], out: Any, _: OpCost) -> int:
    """Count an operator, by the function that the model's code called."""
    name = op_name(func)
    if function in _PRODUCTS and name in _PRODUCT_NAMES:
        bias, a = (args[0].numel(), args[1]) if name in ("addmm", "baddbmm") else (0, args[0])
        return int(out.numel() * a.shape[-1]) + bias
    if function in _SUMS and name in ("add", "mul"):
        return int(out.numel())
    if function in _FUNCTIONS and name.rstrip("_") in _COUNTED:
        return int((out if name.startswith("upsample") else args[0]).numel())
    return 0


def _count_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> int:
    """Count a module itself, if its type is exactly one that ptflops knows."""
    kind, x = type(module), args[0] if args else None
    out = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else None
    if not isinstance(x, Tensor) or not isinstance(out, Tensor):
        return 0
    if kind in _ELEMENTS or kind is nn.Upsample:
        return out.numel()
    if kind in _POOLS:
        return x.numel()
    if kind in _NORMS:
        return x.numel() * (2 if getattr(module, "affine", False) else 1)
    if kind is nn.Linear:
        return out.numel() * (x.shape[-1] + (module.bias is not None))
    if kind in _CONVOLUTIONS or kind in _TRANSPOSED:
        weight, spread = module.weight, x if kind in _TRANSPOSED else out
        assert isinstance(weight, Tensor)
        bias = out.numel() if module.bias is not None else 0
        return spread.numel() * prod(weight.shape[1:]) + bias
    if kind is nn.MultiheadAttention:
        return _multi_head(module, *args)  # type: ignore[arg-type]
    return _recurrent(module, x) if kind in _STATE else 0


def _multi_head(module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    batch, length = (0, 1) if module.batch_first else (1, 0)
    if q.dim() == 2:  # without a batch
        q, k, v = (tensor.unsqueeze(batch) for tensor in (q, k, v))
    rows, keys, values = q.shape[length], k.shape[length], v.shape[length]
    wide, key_wide, value_wide = q.shape[2], k.shape[2], v.shape[2]
    count = rows * wide + rows * wide * wide + keys * key_wide * key_wide + values * value_wide * value_wide
    if module.in_proj_bias is not None:
        count += (rows + keys + values) * wide
    heads = module.num_heads
    count += heads * rows * keys * (wide // heads + 1 + value_wide // heads)
    return (count + rows * value_wide * (value_wide + 1)) * q.shape[batch]


def _recurrent(module: Any, x: Tensor) -> int:
    cell = not isinstance(module, nn.RNNBase)
    count = 0
    for layer in range(1 if cell else module.num_layers):
        suffix = "" if cell else f"_l{layer}"
        weights = [getattr(module, f"weight_{side}{suffix}") for side in ("ih", "hh")]
        count += sum(w.numel() + (w.shape[0] if module.bias else 0) for w in weights)
        count += _STATE[type(module)] * module.hidden_size
    both = 2 if not cell and module.bidirectional else 1
    return count * int(prod(x.shape[:1] if cell else x.shape[:2])) * both


CONVENTION = Convention(
    "ptflops",
    count_op=_count_op,
    counted_ops=frozenset({*_PRODUCT_NAMES, "add", "mul", *_COUNTED, *(f"{name}_" for name in _COUNTED)}),
    price_module=lambda module, args, output: ConventionCost(flops=_count_module(module, args, output)),
    has_madds=False,
)
