"""Formulas of operators with multiply-accumulates: matrix products, convolutions, fused attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from microtome.flops.registry import OpCost, formula, register_formulas


def _contract(out: Tensor, length: int, bias: Any = None) -> OpCost:
    """Count a sum of `length` products for each element of the output, and the addition of a bias unless None."""
    sums = out.numel()
    return OpCost(sums * length, sums, 0 if bias is None else sums)


def _packed(a: Tensor) -> int:
    """Return the number of values packed in an element."""
    return 2 if a.dtype is torch.float4_e2m1fn_x2 else 1


# -- matrix products ---------------------------------------------------------------------------------------------------

register_formulas({
    """mm bmm mv dot vdot _int_mm _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu
    _weight_int4pack_mm_with_scales_and_zeros _dyn_quant_matmul_4bit""":
        lambda a, b, *_, out, **__: _contract(out, a.shape[-1]),
    "addmm baddbmm addmv":
        lambda bias, a, b, *, out, beta=1, **_: _contract(out, a.shape[-1], bias if beta else None),
    "_addmm_activation":
        lambda bias, a, b, *, out, beta=1, **_:
            _contract(out, a.shape[-1], bias if beta else None).plus(OpCost(other=out.numel())),
    "addbmm":  # summed over the batch too
        lambda bias, a, b, *, out, beta=1, **_: _contract(out, a.shape[-1] * a.shape[0], bias if beta else None),
    "addr":
        lambda bias, a, b, *, out, beta=1, **_: out.numel() * (2 if beta else 1),
    "linear mkldnn_linear":
        lambda x, weight, bias=None, *, out, **_: _contract(out, weight.shape[-1], bias),
    # The scales of quantized products are not counted: kernels apply them to blocks of different sizes.
    "_scaled_mm":
        lambda a, b, scale_a, scale_b, bias=None, *_, out, **__: _contract(out, a.shape[-1] * _packed(a), bias),
    "_scaled_mm_v2":  # args: scale, recipe and swizzle of each operand, then the bias
        lambda a, b, *args, bias=None, out, **_:
            _contract(out, a.shape[-1] * _packed(a), args[6] if len(args) > 6 else bias),
    "_scaled_grouped_mm":
        lambda a, b, scale_a, scale_b, offs=None, bias=None, *_, out, **__: _grouped_product(a, b, offs, bias, out=out),
    "_scaled_grouped_mm_v2":  # args: scale, recipe and swizzle of each operand, the offsets, then the bias
        lambda a, b, *args, bias=None, out, **_:
            _grouped_product(a, b, None, args[7] if len(args) > 7 else bias, out=out),
    "_euclidean_dist":  # a product of the points, each longer by its norm and by a one; then clamp and square root
        lambda a, b, *, out:
            OpCost(out.numel() * (a.shape[-1] + 2), out.numel(), 2 * out.numel() + 2 * (a.numel() + b.numel())),
    "_cdist_forward":
        lambda a, b, *_, out, **__: 3 * out.numel() * a.shape[-1],
    "quantized::linear quantized::linear_relu quantized::linear_dynamic quantized::linear_relu_dynamic":
        lambda x, packed, *_, out, **__: _contract(out, x.shape[-1], packed.unpack()[1]),
})  # fmt: skip


@formula("_foreach_mm")
def _products(a: Sequence[Tensor], b: Sequence[Tensor], *, out: Sequence[Tensor]) -> OpCost:
    macs = sum(product.numel() * left.shape[-1] for left, product in zip(a, out, strict=True))
    return OpCost(macs, sum(product.numel() for product in out))


@formula("_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped_product(
    a: Tensor, b: Tensor, offs: Any = None, bias: Tensor | None = None, *_: Any, out: Tensor, **__: Any
) -> OpCost:
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


@formula("_trilinear")
def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand1: Any, expand2: Any, expand3: Any, *_: Any, out: Tensor, **__: Any
) -> OpCost:
    """Count two products for each element of the broadcast operands, which `expand` gives dimensions of size 1."""

    def unsqueeze(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
        sizes = list(shape)
        for dim in sorted(dims):
            sizes.insert(dim, 1)
        return sizes

    shapes = (unsqueeze(a.shape, expand1), unsqueeze(b.shape, expand2), unsqueeze(c.shape, expand3))
    elements = prod(map(max, zip(*shapes, strict=True)))
    return OpCost(elements, out.numel(), elements)


# -- convolutions ------------------------------------------------------------------------------------------------------


def _convolve(centers: Tensor, weight: Tensor, bias: Any, out: Tensor) -> OpCost:
    """Count a kernel at each element: of the output, or of the input if the convolution is transposed."""
    return OpCost(centers.numel() * prod(weight.shape[1:]), out.numel(), 0 if bias is None else out.numel())


register_formulas({
    "convolution _convolution convolution_overrideable":
        lambda x, weight, bias, stride, padding, dilation, transposed, *_, out, **__:
            _convolve(x if transposed else out, weight, bias, out),
    """cudnn_convolution mkldnn_convolution _slow_conv2d_forward _conv_depthwise2d conv_depthwise3d slow_conv3d_forward
    slow_conv_dilated2d slow_conv_dilated3d""":
        lambda x, weight, *_, out, **__: _convolve(out, weight, None, out),
    "slow_conv_transpose2d slow_conv_transpose3d":
        lambda x, weight, size, bias=None, *_, out, **__: _convolve(x, weight, bias, out),
    "conv_tbc":
        lambda x, weight, bias, pad=0, *, out: _contract(out, prod(weight.shape[:2]), bias),
})  # fmt: skip


@formula(*(f"quantized::conv{rank}d{suffix}" for rank in (1, 2, 3) for suffix in ("", "_relu", "_dynamic")))
def _quantized_convolution(x: Tensor, packed: Any, *_: Any, out: Tensor, **__: Any) -> OpCost:
    weight, bias = packed.unpack()
    return _convolve(out, weight, bias, out)


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
def _deformed_convolution(x: Tensor, weight: Tensor, *_: Any, out: Tensor, **__: Any) -> OpCost:
    # Each input of each window is interpolated from four neighbours (7) and weighted by the mask (1).
    samples = out.shape[0] * prod(out.shape[2:]) * x.shape[1] * prod(weight.shape[2:])
    sums = out.numel()
    return OpCost(sums * prod(weight.shape[1:]), sums, sums + 8 * samples)


# -- attention: a row of scores for each query, from products with all keys; a softmax; products with all values -------


def attention(q: Any, k: Any, v: Any, *, scores: int = 6) -> OpCost:
    """Count attention of shapes (..., length, width), with `scores` operations for each score: scale and softmax."""
    batch, rows, keys = prod(q[:-2]), q[-2], k[-2]
    return OpCost(batch * rows * keys * (q[-1] + v[-1]), batch * rows * (keys + v[-1]), scores * batch * rows * keys)


def attention_backward(q: Any, k: Any, v: Any, needed: tuple[bool, bool, bool], *, scores: int = 6) -> OpCost:
    """Count the four products that the gradients need; a fifth, if a kernel recomputes the scores, is not counted."""
    batch, rows, keys = prod(q[:-2]), q[-2], k[-2]
    each = batch * rows * keys
    to_scores = needed[0] or needed[1]
    macs = each * (q[-1] * (needed[0] + needed[1]) + v[-1] * (to_scores + needed[2]))
    sums = rows * q[-1] * needed[0] + keys * k[-1] * needed[1] + rows * keys * to_scores + keys * v[-1] * needed[2]
    return OpCost(macs, batch * sums, scores * each if to_scores else 0)


for _kernel in (
    "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
    "fused_attention_overrideable",
):  # fmt: skip
    register_formulas({
        f"_scaled_dot_product_{_kernel}":
            lambda q, k, v, *_, out, **__: attention(q.shape, k.shape, v.shape),
        f"_scaled_dot_product_{_kernel}_backward":
            lambda grad, q, k, v, *_, out, **__: attention_backward(q.shape, k.shape, v.shape, (True, True, True)),
    })  # fmt: skip


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
