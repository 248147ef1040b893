"""The counts of fvcore: MACs of products and convolutions, norms, interpolation and the last pooling; called FLOPs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from microtome.flops.conventions.base import Convention
from microtome.flops.registry import OpCost, op_name

_PRODUCTS = ("mm", "addmm", "bmm", "convolution")
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm")
_NORMS = ("native_layer_norm", "native_group_norm")
_POOLS = ("mean", "_adaptive_avg_pool2d")
#: The count for each element of the output.
_PER_OUTPUT = {"upsample_nearest2d": 1, "upsample_bilinear2d": 4, "grid_sampler_2d": 4, "cudnn_grid_sampler": 4}


def _count_op(function: Any, func: Any, args: tuple[Any, ...], out: Any, cost: OpCost) -> int:
    name = op_name(func)
    if name in _PRODUCTS:
        return cost.macs
    if name in _BATCH_NORMS:
        is_affine = args[1] is not None
        return int(args[0].numel()) * ((4 if args[5] else 1) + is_affine)
    if name in _NORMS:
        return int(args[0].numel()) * (4 + any(isinstance(item, Tensor) for item in args[1:4]))
    if name in _PER_OUTPUT:
        return int(out.numel()) * _PER_OUTPUT[name]
    return int(args[0].numel()) if function is F.adaptive_avg_pool2d else 0


CONVENTION = Convention(
    "fvcore",
    count_op=_count_op,
    counted_ops=frozenset({*_PRODUCTS, *_BATCH_NORMS, *_NORMS, *_POOLS, *_PER_OUTPUT}),
    has_madds=False,
)
