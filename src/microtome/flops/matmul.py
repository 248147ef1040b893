"""Formulas of operators with multiply-accumulates: matrix products, convolutions, fused attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from microtome.flops.registry import OpCost, formula

# Matrix products. A product of an m x k and a k x n matrix makes m * n sums of k products each.


@formula("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_weight_int4pack_mm_with_scales_and_zeros", "_dyn_quant_matmul_4bit")  # fmt: skip  # noqa: E501
def _product(a: Tensor, b: Tensor, *_: Any, out: Tensor, **__: Any) -> OpCost:
    sums = out.numel()
    return OpCost(sums * a.shape[-1], sums)


@formula("addmm", "baddbmm", "addmv")
def _add_product(bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor, beta: float = 1, **_: Any) -> OpCost:
    sums = out.numel()
    return OpCost(sums * a.shape[-1], sums, sums if beta else 0)


@formula("_foreach_mm")
def _products(a: Sequence[Tensor], b: Sequence[Tensor], *, out: Sequence[Tensor]) -> OpCost:
    macs = sum(product.numel() * left.shape[-1] for left, product in zip(a, out, strict=True))
    return OpCost(macs, sum(product.numel() for product in out))


# The scales of quantized products are not counted: kernels apply them to blocks of different sizes.


@formula("_scaled_mm")
def _scaled_product(a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, bias: Tensor | None = None, *_: Any, out: Tensor, **__: Any) -> OpCost:  # fmt: skip  # noqa: E501
    sums = out.numel()
    return OpCost(sums * a.shape[-1] * _packed(a), sums, 0 if bias is None else sums)


@formula("_scaled_mm_v2")
def _scaled_product_v2(
    a: Tensor, b: Tensor, *args: Any, bias: Tensor | None = None, out: Tensor, **_: Any
) -> OpCost | int:
    # args: scale, recipe and swizzle of the first, those of the second, then the bias.
    return _scaled_product(a, b, None, None, args[6] if len(args) > 6 else bias, out=out)


@formula("_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped_product(a: Tensor, b: Tensor, offs: Any = None, bias: Tensor | None = None, *_: Any, out: Tensor, **__: Any) -> OpCost:  # fmt: skip  # noqa: E501
    """Count products of groups of rows, of columns or of parts of the contracted dimension, each with its own matrix.

    In all layouts the groups partition one dimension:

    - (m, k) by (g, k, n): groups of rows; m * n sums of k products.
    - (g, m, k) by (k, n): groups of columns; m * n sums of k products.
    - (m, k) by (k, n): groups of the k; g * m * n sums that have m * n * k products together.
    - (g, m, k) by (g, k, n): a batch; g * m * n sums of k products.

    Rows beyond the last offset are not computed, but counted: offsets are values, and counts depend on shapes only.
    """
    sums = out.numel()
    products = a.shape[0] * b.shape[-1] if a.dim() == b.dim() == 2 else sums
    return OpCost(products * a.shape[-1] * _packed(a), sums, 0 if bias is None else sums)


@formula("_scaled_grouped_mm")
def _scaled_grouped(a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, offs: Any = None, bias: Tensor | None = None, *_: Any, out: Tensor, **__: Any) -> OpCost | int:  # fmt: skip  # noqa: E501
    return _grouped_product(a, b, offs, bias, out=out)


@formula("_scaled_grouped_mm_v2")
def _scaled_grouped_v2(
    a: Tensor, b: Tensor, *args: Any, bias: Tensor | None = None, out: Tensor, **_: Any
) -> OpCost | int:
    # args: scale, recipe and swizzle of the first, those of the second, the offsets, then the bias.
    return _grouped_product(a, b, None, args[7] if len(args) > 7 else bias, out=out)


def _packed(a: Tensor) -> int:
    """Return the number of values packed in an element."""
    return 2 if a.dtype is torch.float4_e2m1fn_x2 else 1


@formula("_addmm_activation")
def _add_product_activation(bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor, beta: float = 1, **_: Any) -> OpCost:
    sums = out.numel()
    return OpCost(sums * a.shape[-1], sums, sums + (sums if beta else 0))


@formula("addbmm")
def _add_product_sum(bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor, beta: float = 1, **_: Any) -> OpCost:
    sums = out.numel()  # over the batch too
    return OpCost(sums * a.shape[-1] * a.shape[0], sums, sums if beta else 0)


@formula("addr")
def _add_outer(bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor, beta: float = 1, **_: Any) -> int:
    return out.numel() * (2 if beta else 1)


@formula("linear", "mkldnn_linear")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor, **_: Any) -> OpCost:
    sums = out.numel()
    return OpCost(sums * weight.shape[-1], sums, 0 if bias is None else sums)


@formula("_trilinear")
def _trilinear(a: Tensor, b: Tensor, c: Tensor, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, *_: Any, out: Tensor, **__: Any) -> OpCost:  # fmt: skip  # noqa: E501
    # In each of the three, the dims named by its `expand` are broadcast; two products for each element of the whole.
    def insert(shape: Sequence[int], at: Sequence[int]) -> list[int]:
        sizes = list(shape)
        for dim in sorted(at):
            sizes.insert(dim, 1)
        return sizes

    shapes = (insert(a.shape, expand1), insert(b.shape, expand2), insert(c.shape, expand3))
    elements = prod(map(max, zip(*shapes, strict=True)))
    return OpCost(elements, out.numel(), elements)


@formula("_euclidean_dist")
def _euclidean(a: Tensor, b: Tensor, *, out: Tensor) -> OpCost:
    # One product of the points, each longer by its norm and by a one; then clamp and square root.
    return OpCost(out.numel() * (a.shape[-1] + 2), out.numel(), 2 * out.numel() + 2 * (a.numel() + b.numel()))


@formula("_cdist_forward")
def _cdist(a: Tensor, b: Tensor, *_: Any, out: Tensor, **__: Any) -> int:
    return 3 * out.numel() * a.shape[-1]


# Convolutions. Each output is a sum over the kernel and the channels of its group; transposed, each input is scattered.


@formula("convolution", "_convolution", "convolution_overrideable")
def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool, *_: Any, out: Tensor, **__: Any) -> OpCost:  # fmt: skip  # noqa: E501
    sums = out.numel()
    spread = x if transposed else out
    return OpCost(spread.numel() * prod(weight.shape[1:]), sums, 0 if bias is None else sums)


@formula("slow_conv_transpose2d", "slow_conv_transpose3d")
def _slow_transposed(x: Tensor, weight: Tensor, size: Any, bias: Tensor | None = None, *_: Any, out: Tensor, **__: Any) -> OpCost:  # fmt: skip  # noqa: E501
    return OpCost(x.numel() * prod(weight.shape[1:]), out.numel(), 0 if bias is None else out.numel())


@formula("conv_tbc")
def _time_first_convolution(x: Tensor, weight: Tensor, bias: Tensor, pad: int = 0, *, out: Tensor) -> OpCost:
    return OpCost(out.numel() * prod(weight.shape[:2]), out.numel(), out.numel())


@formula("cudnn_convolution", "mkldnn_convolution", "_slow_conv2d_forward", "_conv_depthwise2d", "conv_depthwise3d", "slow_conv3d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d")  # fmt: skip  # noqa: E501
def _direct_convolution(x: Tensor, weight: Tensor, *_: Any, out: Tensor, **__: Any) -> OpCost:
    return OpCost(out.numel() * prod(weight.shape[1:]), out.numel())


@formula("convolution_backward", "convolution_backward_overrideable")
def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any, out: Any, **kwargs: Any) -> OpCost:
    # The gradients of the input and of the weight each cost as much as the forward, with groups too; torch's counter
    # ignores groups in the second. The gradient of the bias is a sum of the incoming one.
    mask = kwargs.get("output_mask", args[-1] if args else (True, True, True))
    transposed = args[4] if len(args) > 4 else kwargs["transposed"]
    forward = (x if transposed else grad).numel() * prod(weight.shape[1:])
    sums = (x.numel() if mask[0] else 0) + (weight.numel() if mask[1] else 0)
    return OpCost(forward * (bool(mask[0]) + bool(mask[1])), sums, grad.numel() if mask[2] else 0)


@formula("torchvision::deform_conv2d", "torchvision::_deform_conv2d")
def _deformed(x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor | None, *_: Any, out: Tensor, **__: Any) -> OpCost:  # fmt: skip  # noqa: E501
    # Each input of each window is interpolated from four neighbours (7) and weighted by the mask (1).
    samples = out.shape[0] * prod(out.shape[2:]) * x.shape[1] * prod(weight.shape[2:])
    sums = out.numel()
    return OpCost(sums * prod(weight.shape[1:]), sums, sums + 8 * samples)


# Attention. A row of scores for each query: products with all keys; a softmax; products with all values.


def attention(q: Any, k: Any, v: Any, *, scores: int = 6) -> OpCost:
    """Count attention of shapes (..., length, width), with `scores` operations for each score: scale and softmax."""
    batch, rows, keys = prod(q[:-2]), q[-2], k[-2]
    return OpCost(batch * rows * keys * (q[-1] + v[-1]), batch * rows * (keys + v[-1]), scores * batch * rows * keys)


@formula(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, out: Any, **__: Any) -> OpCost:
    return attention(q.shape, k.shape, v.shape)


@formula(
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, out: Any, **__: Any) -> OpCost:
    return attention_backward(q.shape, k.shape, v.shape, (True, True, True))


def attention_backward(q: Any, k: Any, v: Any, needed: tuple[bool, bool, bool], *, scores: int = 6) -> OpCost:
    """Count the four products that the gradients need; a fifth, if a kernel recomputes the scores, is not counted."""
    batch, rows, keys = prod(q[:-2]), q[-2], k[-2]
    each = batch * rows * keys
    to_scores = needed[0] or needed[1]
    macs = each * (q[-1] * (needed[0] + needed[1]) + v[-1] * (to_scores + needed[2]))
    sums = batch * (rows * q[-1] * needed[0] + keys * k[-1] * needed[1] + rows * keys * to_scores + keys * v[-1] * needed[2])  # fmt: skip  # noqa: E501
    return OpCost(macs, sums, scores * each if to_scores else 0)


@formula("_native_multi_head_attention")
def _multi_head(q: Tensor, k: Tensor, v: Tensor, width: int, heads: int, *_: Any, out: Any, **__: Any) -> OpCost:
    return _self_attention(q.shape, k.shape, width, heads)


@formula("_transformer_encoder_layer_fwd")
def _encoder_layer(x: Tensor, width: int, heads: int, *args: Any, out: Tensor, **kwargs: Any) -> OpCost:
    # args: 4 weights of the attention, use_gelu, norm_first, eps, 4 of the norms, then the two linear layers'.
    hidden = args[11].shape[0]
    tokens = x.numel() // width
    layers = OpCost(2 * tokens * width * hidden, tokens * (hidden + width), tokens * (2 * hidden + width))
    norms = OpCost(other=2 * (8 + 1) * x.numel())  # two norms and two residual additions
    return _self_attention(x.shape, x.shape, width, heads).plus(layers).plus(norms)


def _self_attention(q: Any, k: Any, width: int, heads: int) -> OpCost:
    """Count the three projections with biases, attention in each head, and the output projection."""
    rows, keys = q[0] * q[1], k[0] * k[1]
    projected = rows * width * 2 + 2 * keys * width
    split = (q[0] * heads, q[1], width // heads), (k[0] * heads, k[1], width // heads)
    return OpCost(projected * width, projected, projected).plus(attention(split[0], split[1], split[1]))


# Quantized layers. Their weights are packed, and can be unpacked.


@formula("quantized::linear", "quantized::linear_relu", "quantized::linear_dynamic", "quantized::linear_relu_dynamic")
def _quantized_linear(x: Tensor, packed: Any, *_: Any, out: Tensor, **__: Any) -> OpCost:
    _, bias = packed.unpack()
    return OpCost(out.numel() * x.shape[-1], out.numel(), 0 if bias is None else out.numel())


@formula(*(f"quantized::conv{rank}d{suffix}" for rank in (1, 2, 3) for suffix in ("", "_relu", "_dynamic")))
def _quantized_convolution(x: Tensor, packed: Any, *_: Any, out: Tensor, **__: Any) -> OpCost:
    weight, bias = packed.unpack()
    return OpCost(out.numel() * prod(weight.shape[1:]), out.numel(), 0 if bias is None else out.numel())
