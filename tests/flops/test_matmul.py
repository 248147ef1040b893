"""Grouped products, mixtures of experts, and a sweep over torch: every product is counted or reported."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.flops.registry import cost_of

STANDS = {"meta": None, "fake": True, "real": False}


class Grouped(nn.Module):
    def forward(self, a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
        return torch._grouped_mm(a, b, offs=offs)


def loop(a: Tensor, b: Tensor, offs: Tensor | None) -> int:
    """The MACs of the same products, one matrix after the other."""
    ends = [] if offs is None else offs.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim() == 3:
        pairs = list(zip(a, b, strict=True))
    elif a.dim() == 3:
        pairs = [(a[at], b[:, span]) for at, span in enumerate(spans)]
    elif b.dim() == 3:
        pairs = [(a[span], b[at]) for at, span in enumerate(spans)]
    else:
        pairs = [(a[:, span], b[span]) for span in spans]
    return sum(left.shape[0] * left.shape[1] * right.shape[1] for left, right in pairs)


#: Shapes of both factors, and whether there are offsets. Rows are a multiple of 16 bytes, as torch demands.
LAYOUTS = {
    "rows": ((32, 16), (4, 16, 8), True),
    "columns": ((4, 24, 16), (16, 32), True),
    "contracted": ((24, 32), (32, 16), True),
    "batch": ((4, 24, 16), (4, 16, 8), False),
}


@pytest.mark.parametrize("stand", STANDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_products_count_the_products_of_their_groups(layout: str, dtype: torch.dtype, stand: str) -> None:
    left, right, grouped = LAYOUTS[layout]
    a, b = torch.rand(left, dtype=dtype), torch.rand(right, dtype=dtype)
    offs = torch.tensor([8, 8, 24, 32], dtype=torch.int32) if grouped else None
    p = mt.profile(Grouped(), (a, b, offs), fake=STANDS[stand], strict=True)
    assert p.how.startswith(stand)
    assert p.total.macs == loop(a, b, offs)
    assert p.total.flops == 2 * p.total.macs


@pytest.mark.parametrize("fake", [None, True])
def test_grouped_products_that_do_not_fit_are_refused_without_computing(fake: bool | None) -> None:
    offs = torch.tensor([8, 16], dtype=torch.int32)
    with pytest.raises((RuntimeError, mt.MicrotomeError), match="contraction|multiplied"):
        mt.profile(Grouped(), (torch.rand(16, 8), torch.rand(2, 16, 8), offs), fake=fake)


def test_the_backward_of_a_grouped_product_takes_the_forward_twice() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, 16, 8))

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.weight, offs=offs)

    x = torch.rand(32, 16, requires_grad=True)
    for fake in STANDS.values():
        p = mt.profile(Experts(), (x, torch.tensor([8, 8, 24, 32], dtype=torch.int32)), backward=True, fake=fake)
        assert p.total.macs == 32 * 16 * 8
        assert p.total.backward_flops == 2 * 2 * p.total.macs
        assert p.coverage.unknown == ()


def test_products_of_quantised_weights_count_as_those_they_stand_for() -> None:
    x, scales = torch.rand(4, 64, dtype=torch.bfloat16), torch.rand(32, dtype=torch.bfloat16)
    weight = torch.randint(-9, 9, (32, 64), dtype=torch.int8)
    ops = torch.ops.aten
    cases: list[tuple[Any, tuple[Any, ...], Any, int]] = [
        (ops._weight_int8pack_mm.default, (x, weight, scales), x.new_empty(4, 32), 4 * 64 * 32),
        (ops._foreach_mm.default, ([x, x], [x.T, x.T]), [x.new_empty(4, 4)] * 2, 2 * 4 * 64 * 4),
        (ops.conv_tbc.default, (torch.rand(7, 2, 3), torch.rand(3, 3, 5), torch.rand(5)), torch.rand(5, 2, 5), 50 * 9),
        (
            ops.slow_conv_transpose2d.default,
            (torch.rand(1, 2, 4, 4), torch.rand(2, 3, 3, 3), [3, 3]),
            torch.rand(1, 3, 6, 6),
            2 * 16 * 3 * 9,
        ),
    ]
    for func, args, out, macs in cases:
        work = cost_of(func, args, {}, out)
        assert work is not None
        assert work.macs == macs, func


# -- mixtures of experts -----------------------------------------------------------------------------------------------


def mixture(kind: str) -> tuple[nn.Module, Any, int]:
    """A small mixture of experts, its inputs, and its MACs by hand."""
    zoo.import_torchvision()  # which transformers imports
    transformers = pytest.importorskip("transformers")
    hidden, inner, layers, heads, groups, width, experts, chosen, words = 32, 64, 2, 4, 2, 8, 4, 2, 48
    sizes = {"vocab_size": words, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": groups, "head_dim": width, "num_experts_per_tok": chosen}
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, intermediate_size=inner, num_local_experts=experts)
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=inner, num_experts=experts)
        model = transformers.Qwen3MoeForCausalLM(config)
    batch, tokens = 2, 8
    rows = batch * tokens
    projected = rows * hidden * width * (heads + 2 * groups) + rows * heads * width * hidden
    attention = 2 * batch * heads * tokens * tokens * width
    # Each row goes to the router and to the experts chosen: two products up, one down.
    routed = rows * hidden * experts + rows * chosen * 3 * hidden * inner
    macs = layers * (projected + attention + routed) + rows * hidden * words
    return model.eval(), {"input_ids": torch.randint(0, words, (batch, tokens))}, macs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_mixtures_of_experts_count_their_experts_in_every_mode(kind: str, dtype: torch.dtype) -> None:
    model, inputs, macs = mixture(kind)
    model.to(dtype)
    with torch.no_grad():
        for stand, fake in STANDS.items():
            p = mt.profile(model, inputs, fake=fake, strict=True)
            assert p.how.startswith(stand)
            assert p.total.macs == macs


def test_one_token_reads_the_matrices_of_its_experts_only() -> None:
    # One row for each of 2 experts: 2 of 4 matrices of 16 x 8, the rows, 4 int32 offsets; then 2 x 8 sums.
    offs = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    for fake in STANDS.values():
        p = mt.profile(Grouped(), (torch.rand(2, 16), torch.rand(4, 16, 8), offs), fake=fake)
        assert p.total.read_bytes == 4 * (2 * 16 * 8 + 2 * 16 + 4)
        assert p.total.write_bytes == 4 * 2 * 8


def test_experts_without_a_formula_lower_the_share_of_the_bytes_not_of_the_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from microtome.flops import registry

    model, inputs, _ = mixture("mixtral")
    names = ("_grouped_mm", "transformers::grouped_mm_fallback")
    monkeypatch.setattr(registry, "_resolved", {})
    for name in names:
        monkeypatch.delitem(registry._built_in, name)
    with torch.no_grad():
        p = mt.profile(model.to("meta"), inputs)
    (experts,) = p.coverage.unknown
    # Of each of 2 layers, two products: 32 rows (2 of 4 experts for each of 16 tokens), 4 matrices, 4 int32 offsets.
    up = 32 * 32 + 4 * 32 * 128 + 32 * 128 + 4
    down = 32 * 64 + 4 * 64 * 32 + 32 * 32 + 4
    assert experts.moved_bytes == 2 * 4 * (up + down)
    moved = p.coverage.moved_fraction
    assert moved == 1 - experts.moved_bytes / (p.total.read_bytes + p.total.write_bytes)
    assert moved < 0.65 < 0.98 < p.coverage.fraction


# -- the sweep ---------------------------------------------------------------------------------------------------------

_LIKE_PRODUCTS = re.compile("mm|matmul|conv|attention|attn|linear|dot|mv$|rnn|lstm|gru|addr|cdist")
#: Products without a formula, which `coverage` lists when they run.
_LISTED = """
    _cslt_sparse_mm _sparse_addmm _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward _sparse_semi_structured_addmm
    _sparse_semi_structured_linear _sparse_semi_structured_mm _sparse_sparse_matmul hspmm sparse_sampled_addmm sspaddmm

    _cudnn_attention_forward _cudnn_attention_backward _flash_attention_forward_no_dropout_inplace
    _triton_multi_head_attention _triton_scaled_dot_attention _mixed_dtypes_linear _cdist_backward

    _cudnn_rnn _cudnn_rnn_backward miopen_rnn miopen_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward _lstm_mps
    lstm_mps_backward _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell
    _thnn_fused_lstm_cell_backward_impl quantized_gru quantized_lstm

    _mps_convolution _mps_convolution_transpose _nnpack_spatial_convolution _scaled_dot_product_attention_math_for_mps
    _slow_conv2d_backward cudnn_convolution_add_relu cudnn_convolution_relu cudnn_convolution_transpose linear_backward
    matmul_backward miopen_convolution miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose
    miopen_depthwise_convolution mkldnn_linear_backward mkldnn_linear_backward_input mkldnn_linear_backward_weights
    mps_convolution_backward mps_convolution_transpose_backward
"""
#: No products, for all their names.
_OTHERS = """
    _compute_linear_combination _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo
    _convert_weight_to_int4pack _convert_weight_to_int4pack_for_cpu _cslt_sparse_mm_search _cummax_helper _cummin_helper
    _foreach_lgamma _nested_get_jagged_dummy _standard_gamma _standard_gamma_grad _upsample_bilinear2d_aa
    _upsample_bilinear2d_aa_backward hamming_window mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight
"""


def test_every_product_of_torch_is_counted_or_reported_as_unknown() -> None:
    from microtome.flops.registry import _lookup

    missing = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten" or not _LIKE_PRODUCTS.search(packet):
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
        if not composite and _lookup(op) is None:
            missing.add(packet.rstrip("_"))
    assert sorted(missing - {*_LISTED.split(), *_OTHERS.split()}) == []
