"""Formulas of operators without multiply-accumulates: elementwise, reductions, norms, pooling, interpolation, FFTs.

A function of an element is one operation, whether an addition, an exponential or a comparison. Moving, filling and
selecting elements is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2, prod
from typing import Any

from torch import Tensor

from microtome.flops.registry import NOTHING, OpCost, first, formula, register_formulas

_FREE = """
    alias arange as_strided as_strided_scatter _assert_async _assert_tensor_metadata bernoulli block_diag bucketize
    cat cauchy channel_shuffle clone col2im complex _conj constant_pad_nd contiguous copy _cudnn_init_dropout_state
    _cudnn_rnn_flatten_weight dequantize detach diag_embed diagonal diagonal_backward diagonal_scatter
    _efficientzerotensor embedding empty _empty_affine_quantized empty_like empty_permuted empty_strided equal
    expand_copy exponential eye fill flip full full_like _fused_sdp_choice gather geometric im2col index index_copy
    index_fill index_select int_repr is_same_size isin item lift lift_fresh linspace _local_scalar_dense log_normal
    logspace masked_fill masked_scatter masked_scatter_backward masked_select max_unpool2d max_unpool3d multinomial
    native_channel_shuffle _neg_view new_empty new_empty_strided new_full new_ones new_zeros nonzero nonzero_static
    normal normal_functional ones ones_like _pack_padded_sequence _pad_packed_sequence permute_copy _pin_memory
    pixel_shuffle pixel_unshuffle poisson q_scale q_zero_point rand rand_like randint randint_like randn randn_like
    random randperm reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d _reshape_alias resize resize_as _resize_output resolve_conj resolve_neg roll
    rot90 scalar_tensor scatter searchsorted select_backward select_scatter set slice_backward slice_copy
    slice_scatter split_with_sizes_copy stack _stack sym_size take _to_copy tril tril_indices triu triu_indices
    unfold_backward uniform _unique2 unique_consecutive _unsafe_index _unsafe_masked_index unsafe_split
    unsafe_split_with_sizes _unsafe_view upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d view_as_complex view_as_real
    view_copy where zero zeros zeros_like profiler::_record_function_enter profiler::_record_function_enter_new
    profiler::_record_function_exit
"""

register_formulas({_FREE: lambda *_, out, **__: NOTHING})

#: Operations for each element of the first output, if not one, or if torch does not tag the operator as pointwise.
_PER_OUTPUT = {
    1: """binary_cross_entropy_backward elu_backward eq floor_divide gcd ge gelu glu gt hardshrink_backward
        hardsigmoid_backward hardswish hardswish_backward hardtanh_backward heaviside huber_loss_backward lcm le
        leaky_relu_backward log_sigmoid_forward log_sigmoid_backward lt mish mse_loss_backward
        native_dropout_backward ne polar _prelu_kernel rrelu_with_noise rrelu_with_noise_backward rsub
        smooth_l1_loss_backward soft_margin_loss_backward softplus_backward softshrink_backward threshold xlogy
        quantize_per_tensor quantize_per_channel copysign abs nll_loss_backward nll_loss2d_backward
        sigmoid_backward tanh_backward threshold_backward silu_backward gelu_backward mish_backward linalg_cross
        _masked_scale""",
    2: "addcdiv addcmul native_dropout _fused_dropout _prelu_kernel_backward glu_backward _add_relu",
    3: "lerp",
}
for _count, _names in _PER_OUTPUT.items():
    register_formulas({_names: lambda *_, out, count=_count, **__: count * first(out).numel()})

#: Operations for each element of the first argument.
_PER_INPUT = {
    1: """_aminmax cummax cummin cumprod cumsum embedding_dense_backward histc kthvalue median mode nanmedian bincount
        nll_loss_forward nll_loss2d_forward embedding_renorm renorm count_nonzero
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward max_pool2d_with_indices_backward
        max_pool3d_with_indices_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward
        _embedding_bag_backward _embedding_bag_dense_backward""",
    2: "linalg_vector_norm norm mse_loss",
    3: "_weight_norm_interface huber_loss smooth_l1_loss soft_margin_loss logcumsumexp _logcumsumexp",
    4: "std std_mean var var_mean logsumexp _softmax_backward_data _log_softmax_backward_data binary_cross_entropy",
    5: "_softmax _log_softmax _safe_softmax _masked_softmax binary_cross_entropy_with_logits",
    6: "_weight_norm_interface_backward",
}
for _count, _names in _PER_INPUT.items():
    register_formulas({_names: lambda x, *_, out, count=_count, **__: count * x.numel()})

register_formulas({
    "index_add scatter_add scatter_reduce index_reduce":
        lambda x, dim, index, source, *_, out, **__: source.numel(),
    "_index_put_impl index_put _unsafe_index_put":
        lambda x, indices, values, accumulate=False, *_, out: values.numel() if accumulate else 0,
    "_embedding_bag _embedding_bag_forward_only":
        lambda weight, indices, *_, out, **__: indices.numel() * weight.shape[1],
    "topk":
        lambda x, k, *_, out, **__: x.numel() * max(ceil(log2(k)), 1) if k else 0,
})  # fmt: skip


@formula("sort")
def _sort(x: Tensor, dim: int = -1, *_: Any, out: Any, **kwargs: Any) -> int:
    line = x.shape[kwargs.get("dim", dim)] if x.dim() else 1
    return x.numel() * ceil(log2(line)) if line > 1 else 0  # comparisons


# -- norms: the mean takes 1 for each element, the variance 3, the normalization 2, weight and bias 1 each -------------


def _affine(*parameters: Any) -> int:
    return sum(isinstance(parameter, Tensor) for parameter in parameters)


register_formulas({
    "native_layer_norm native_group_norm":
        lambda x, *args, out, **_: x.numel() * (6 + _affine(*args[:3])),
    "native_batch_norm cudnn_batch_norm miopen_batch_norm":
        lambda x, weight, bias, mean, var, training, *_, out:
            x.numel() * ((6 if training else 2) + _affine(weight, bias)),
    "_native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update":
        lambda x, weight, bias, *_, out, **__: x.numel() * (6 + _affine(weight, bias)),
    "_native_batch_norm_legit_no_training _batch_norm_no_update":
        lambda x, weight, bias, *_, out, **__: x.numel() * (2 + _affine(weight, bias)),
    # The normalized input (2), two sums (3), and the gradient of the input from them (4).
    """native_batch_norm_backward native_layer_norm_backward native_group_norm_backward cudnn_batch_norm_backward
    miopen_batch_norm_backward batch_norm_backward""":
        lambda grad, x, *_, out, **__: 9 * x.numel(),
    "_fused_rms_norm":
        lambda x, shape, weight=None, *_, out, **__: rms_norm(x, shape, weight, out=first(out)),
    "_fused_rms_norm_backward":
        lambda grad, x, *_, out, **__: 8 * x.numel(),
})  # fmt: skip


def rms_norm(
    input: Tensor,  # noqa: A002  as torch calls it
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: Any = None,
    *,
    out: Tensor,
) -> int:
    """Count a square, sum, scale and weight for each element; for each row, the addition of epsilon and the root."""
    return input.numel() * (3 + (weight is not None)) + 2 * (input.numel() // max(prod(normalized_shape), 1))


# -- pooling: an average takes an addition for each element of a window but the first, and a division ------------------


def _windows(size: Sequence[int] | int, out: Tensor, rank: int) -> int:
    sizes = [size] * rank if isinstance(size, int) else list(size)
    kernel = prod(sizes) if len(sizes) == rank else sizes[0] ** rank
    return int(kernel) * out.numel()


def _adaptive_windows(x: Tensor, out: Tensor, rank: int) -> int:
    """Count the elements of all windows: window i of n over a length begins at i * length // n."""
    elements = out.numel()
    for length, n in zip(x.shape[-rank:], out.shape[-rank:], strict=True):
        elements = elements // n * sum(-(-(i + 1) * length // n) - i * length // n for i in range(n)) if n else 0
    return elements


for _rank in (2, 3):
    register_formulas({
        f"avg_pool{_rank}d":
            lambda x, kernel, *_, out, rank=_rank, **__: _windows(kernel, out, rank),
        f"avg_pool{_rank}d_backward":
            lambda grad, x, kernel, *_, out, rank=_rank, **__: _windows(kernel, grad, rank),
        f"max_pool{_rank}d_with_indices mkldnn_max_pool{_rank}d quantized_max_pool{_rank}d":
            lambda x, kernel, *_, out, rank=_rank, **__: _windows(kernel, first(out), rank) - first(out).numel(),
        f"_adaptive_avg_pool{_rank}d{' mkldnn_adaptive_avg_pool2d' if _rank == 2 else ''}":
            lambda x, *_, out, rank=_rank: _adaptive_windows(x, out, rank),
        f"_adaptive_avg_pool{_rank}d_backward":
            lambda grad, x, *_, out, rank=_rank: _adaptive_windows(x, grad, rank),
        f"adaptive_max_pool{_rank}d":
            lambda x, *_, out, rank=_rank: _adaptive_windows(x, first(out), rank) - first(out).numel(),
    })  # fmt: skip


# -- interpolation: a weighted sum of neighbours for each output, the weights not counted ------------------------------

for _name, _taps in {
    "upsample_linear1d": 2, "upsample_bilinear2d": 4, "upsample_trilinear3d": 8, "upsample_bicubic2d": 16
}.items():  # fmt: skip
    register_formulas({
        _name: lambda x, *_, out, taps=_taps, **__: out.numel() * (2 * taps - 1),
        f"{_name}_backward": lambda grad, *_, out, taps=_taps, **__: grad.numel() * 2 * taps,
    })  # fmt: skip


def _grid_sample(grid: Tensor, mode: int, out: Tensor, rank: int) -> int:
    """Count by mode: 0 linear, 1 nearest, 2 cubic. Each coordinate is scaled to the size of the input (2)."""
    taps = {0: 2**rank, 1: 0, 2: 4**rank}[mode]
    return out.numel() * max(2 * taps - 1, 0) + 2 * grid.numel()


register_formulas({
    "grid_sampler_2d cudnn_grid_sampler _grid_sampler_2d_cpu_fallback":
        lambda x, grid, mode=0, *_, out: _grid_sample(grid, mode, out, 2),
    "grid_sampler_3d":
        lambda x, grid, mode=0, *_, out: _grid_sample(grid, mode, out, 3),
    "affine_grid_generator cudnn_affine_grid_generator":
        lambda theta, *_, out, **__: OpCost(out.numel() * theta.shape[-1], out.numel()),
})  # fmt: skip


@formula("torchvision::roi_align")
def _align(x: Tensor, rois: Tensor, scale: float, height: int, width: int, sampling: int, *_: Any, out: Tensor) -> int:
    """Count the average of `sampling` x `sampling` points in each bin, each interpolated from four neighbours."""
    return out.numel() * (8 * sampling * sampling if sampling > 0 else 8)


@formula("torchvision::nms")
def _suppress(boxes: Tensor, *_: Any, out: Tensor, **__: Any) -> int:
    """Count 13 operations for the overlap of every two boxes."""
    return 13 * boxes.shape[0] * (boxes.shape[0] - 1) // 2


# -- Fourier transforms: 5 n log2 n operations for a line of n complex numbers, half of that for real ones -------------


def _fourier(x: Tensor, dims: Sequence[int], per_point: float) -> int:
    n = prod(x.shape[dim] for dim in dims)
    return round(per_point * x.numel() * log2(n)) if n > 1 else 0


register_formulas({
    "_fft_c2c": lambda x, dim, *_, out, **__: _fourier(x, dim, 5),
    "_fft_r2c": lambda x, dim, *_, out, **__: _fourier(x, dim, 2.5),
    "_fft_c2r": lambda x, dim, *_, out, **__: _fourier(out, dim, 2.5),
})  # fmt: skip
