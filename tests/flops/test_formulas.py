"""Each formula against a closed form, derived above the number. A multiply-accumulate is a product added to a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import microtome as mt
from microtome.errors import BadFormula, NoMatch, Unsupported
from microtome.flops.registry import _registered, _resolved, cost_of, register_formula


class Function(nn.Module):
    """A model that runs one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def counts(function: Any, *shapes: tuple[int, ...] | Tensor) -> tuple[int, int, int]:
    inputs = tuple(torch.rand(shape) if isinstance(shape, tuple) else shape for shape in shapes)
    total: Any = mt.profile(Function(function), inputs, strict=True).total
    return total.macs, total.flops, total.madds


def test_a_product_of_matrices() -> None:
    # 2 x 3 by 3 x 5: 10 sums of 3 products; each sum takes 3 multiplications and 2 additions.
    assert counts(torch.mm, (2, 3), (3, 5)) == (30, 60, 50)


def test_a_linear_layer_adds_its_bias_once_for_each_output() -> None:
    # 2 x 3 tokens of 4 to 5: 30 sums of 4 products, and 30 biases.
    assert counts(nn.Linear(4, 5), (2, 3, 4)) == (120, 240 + 30, 120 + 90 + 30)
    # Without the bias, and with tokens that lie apart in memory, which torch multiplies in another way.
    assert counts(nn.Linear(4, 5, bias=False), torch.rand(3, 2, 4).transpose(0, 1)) == (120, 240, 210)


def test_products_broadcast() -> None:
    # 7 x 1 x 2 x 3 by 5 x 3 x 4: 7 * 5 products of a 2 x 3 and a 3 x 4 matrix, each of 8 sums of 3.
    assert counts(torch.matmul, (7, 1, 2, 3), (5, 3, 4))[0] == 7 * 5 * 24
    assert counts(torch.matmul, (3,), (3, 4))[0] == 12
    assert counts(torch.matmul, (3,), (3,))[0] == 3
    assert counts(torch.mv, (2, 3), (3,))[0] == 6


def test_einsum_is_the_products_it_makes() -> None:
    # Over b and i: for each of 2 batches a 3 x 4 by 4 x 5 product.
    assert counts(lambda a, b: torch.einsum("bij,bjk->bik", a, b), (2, 3, 4), (2, 4, 5))[0] == 2 * 3 * 4 * 5


def test_products_that_add() -> None:
    # 2 batches of 3 x 4 by 4 x 5, added to what is there.
    assert counts(torch.baddbmm, (2, 3, 5), (2, 3, 4), (2, 4, 5)) == (120, 240 + 30, 210 + 30)
    assert counts(torch.addmv, (2,), (2, 3), (3,)) == (6, 14, 10 + 2)
    # The batch is summed too: 15 sums of 2 * 4 products.
    assert counts(torch.addbmm, (3, 5), (2, 3, 4), (2, 4, 5))[0] == 15 * 8
    # a b^T of 2 and 3: 6 products, 6 additions.
    assert counts(torch.addr, (2, 3), (2,), (3,)) == (0, 12, 12)


def test_a_bilinear_layer_sums_over_both_inputs() -> None:
    # For each of 5 batches and 4 outputs: 2 * 3 pairs, each two products, the second added to a sum; and a bias.
    macs, flops, _ = counts(nn.Bilinear(2, 3, 4), (5, 2), (5, 3))
    assert (macs, flops) == (120, 2 * 120 + 120 + 20)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions_of_all_ranks_with_groups(rank: int, groups: int) -> None:
    # 4 channels to 6, kernel 3, 8 places become 6 in each direction; each output sums 3^rank * 4 / groups products.
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](4, 6, 3, groups=groups)
    outputs = 2 * 6 * 6**rank
    macs = outputs * 3**rank * 4 // groups
    assert counts(layer, (2, 4, *[8] * rank)) == (macs, 2 * macs + outputs, 2 * macs - outputs + outputs)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolutions_spread_each_input(rank: int, groups: int) -> None:
    # Each of 2 * 4 * 5^rank inputs goes to 3^rank places of 6 / groups channels.
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1](4, 6, 3, stride=2, groups=groups)
    assert counts(layer, (2, 4, *[5] * rank))[0] == 2 * 4 * 5**rank * 3**rank * 6 // groups


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_backward_of_a_convolution_takes_the_forward_twice(groups: int, transposed: bool) -> None:
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 8, 3, stride=2, groups=groups)
    total: Any = mt.profile(layer, torch.rand(2, 4, 9, 9).requires_grad_(), backward=True).total
    assert total.backward_macs == 2 * total.macs
    frozen = mt.profile(layer, torch.rand(2, 4, 9, 9), backward=True).total  # no gradient of the input
    assert frozen.backward_macs == total.macs


def test_attention_on_all_kernels() -> None:
    # 2 batches of 3 heads, 5 queries, 7 keys of 4, values of 6: 5 * 7 scores of 4 products, 5 * 6 outputs of 7.
    macs = 2 * 3 * (5 * 7 * 4 + 5 * 6 * 7)
    q, k, v = (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)
    scores = 2 * 3 * 5 * 7
    assert counts(F.scaled_dot_product_attention, q, k, v)[:2] == (macs, 2 * macs + 6 * scores)
    named = lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v)  # noqa: E731
    assert counts(named, q, k, v)[0] == macs
    mask = torch.zeros(5, 7)
    assert counts(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), q, k, v)[1] == 2 * macs + 7 * scores
    # Two heads of keys shared by four of queries: as many products as with four.
    grouped = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # noqa: E731
    assert counts(grouped, (1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))[0] == 4 * 2 * 5 * 5 * 8


def test_the_kernels_of_attention_count_as_the_function_does() -> None:
    q, k, v = (torch.rand(2, 3, 5, 8, device="meta") for _ in range(3))
    aten = torch.ops.aten
    work = cost_of(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v), {}, (q, q))
    assert work is not None
    assert (work.macs, work.flops, work.madds) == counts(F.scaled_dot_product_attention, *([(2, 3, 5, 8)] * 3))
    for name in ("flash", "efficient", "cudnn"):
        packet = getattr(aten, f"_scaled_dot_product_{name}_attention")
        assert cost_of(packet.default, (q, k, v), {}, (q, q)) == work
        assert flop_registry[packet](q, k, v, out_val=(q, q)) == 2 * work.macs  # as torch counts them


@pytest.mark.parametrize("fast", [False, True])
def test_multi_head_attention_and_encoder_layers(fast: bool) -> None:
    # Batch 2, 5 tokens of 8, 2 heads: 4 projections of 8 by 8 for each token; in each head 5 x 5 scores of 4, and back.
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        x = torch.rand(2, 5, 8)
        attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        macs = 2 * 5 * 4 * 64 + 2 * 2 * 2 * 25 * 4
        with torch.no_grad():
            assert mt.profile(attention, (x, x, x), strict=True).total.macs == macs
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
            # and two linear layers between 8 and 16.
            assert mt.profile(layer, x, strict=True).total.macs == macs + 2 * 5 * 2 * 8 * 16
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_the_fused_kernels_of_multi_head_attention_and_encoder_layers() -> None:
    x = torch.rand(2, 5, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    a, out = attention, torch.rand(2, 5, 8)
    weights = (a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias)
    work = cost_of(torch.ops.aten._native_multi_head_attention.default, (x, x, x, 8, 2, *weights), {}, (out, out))
    assert work is not None
    assert work.macs == 2 * 5 * 4 * 64 + 2 * 2 * 2 * 25 * 4
    norms = (layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias)
    linear = (layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias)
    args = (x, 8, 2, *weights, False, False, 1e-5, *norms, *linear)
    fused = cost_of(torch.ops.aten._transformer_encoder_layer_fwd.default, args, {}, out)
    with torch.no_grad():
        eager = mt.profile(layer, x, strict=True).total
    assert fused is not None
    assert (fused.macs, fused.flops, fused.madds) == (eager.macs, eager.flops, eager.madds)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": 2}, {"bias": False}])
def test_recurrent_layers(kind: Any, options: dict[str, Any]) -> None:
    # Each matrix is applied once to each of 2 * 7 tokens.
    layer = kind(3, 5, batch_first=True, **options)
    gates = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}[kind]
    both = 2 if options.get("bidirectional") else 1
    widths = [3, *[5 * both] * (options.get("num_layers", 1) - 1)]
    macs = 2 * 7 * both * sum(gates * 5 * (width + 5) for width in widths)
    assert counts(layer, (2, 7, 3))[0] == macs


def test_an_lstm_that_shrinks_its_state_has_a_third_matrix() -> None:
    # 4 gates of 5 from an input of 3 and a state of 2, then 5 to 2.
    assert counts(nn.LSTM(3, 5, proj_size=2), (7, 2, 3))[0] == 2 * 7 * (4 * 5 * (3 + 2) + 5 * 2)


def test_packed_sequences_count_the_steps_they_have() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.rand(4, 3), torch.rand(2, 3)])
    total: Any = mt.profile(nn.GRU(3, 5), packed).total
    assert total.macs == (4 + 2) * 3 * 5 * (3 + 5)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_recurrent_cells(kind: Any) -> None:
    gates = {nn.RNNCell: 1, nn.GRUCell: 3, nn.LSTMCell: 4}[kind]
    assert counts(kind(3, 5), (2, 3))[0] == 2 * gates * 5 * (3 + 5)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_the_backward_of_recurrent_layers_matches_torchs_decomposition(
    kind: Any, bidirectional: bool, asks: bool
) -> None:
    layer = kind(3, 5, num_layers=2, bidirectional=bidirectional, device="meta")
    x = torch.rand(7, 2, 3, requires_grad=asks, device="meta")
    with FlopCounterMode(display=False) as counter:
        output, state = layer(x)
        forward = counter.get_total_flops()
        states = state if isinstance(state, tuple) else (state,)
        torch.autograd.backward([output, *states], [torch.ones_like(t) for t in (output, *states)])
    total: Any = mt.profile(layer, x, backward=True).total
    assert 2 * total.macs == forward
    assert 2 * total.backward_macs == counter.get_total_flops() - forward


def test_an_embedding_is_no_product() -> None:
    assert counts(nn.Embedding(9, 4), torch.zeros(2, 3, dtype=torch.int64)) == (0, 0, 0)
    # A bag of 3 rows of 4 is summed.
    assert counts(nn.EmbeddingBag(9, 4, mode="sum"), torch.zeros(2, 3, dtype=torch.int64))[1] == 2 * 3 * 4


@pytest.mark.parametrize(
    ("layer", "shape", "each"),
    [
        (nn.BatchNorm2d(3).eval(), (2, 3, 4, 4), 4),  # minus the mean, over the deviation, times, plus
        (nn.BatchNorm2d(3, affine=False).eval(), (2, 3, 4, 4), 2),
        (nn.LayerNorm(4), (2, 3, 4), 8),  # and the mean (1) and the variance (3)
        (nn.LayerNorm(4, elementwise_affine=False), (2, 3, 4), 6),
        (nn.GroupNorm(2, 4), (2, 4, 5), 8),
        (nn.InstanceNorm2d(3), (2, 3, 4, 4), 6),
        (nn.Softmax(-1), (2, 3, 4), 5),  # the largest, minus it, the exponential, the sum, the quotient
        (nn.LogSoftmax(-1), (2, 3, 4), 5),
        (nn.ReLU(), (2, 3), 1),
        (nn.GELU(), (2, 3), 1),
        (nn.SiLU(), (2, 3), 1),
        (nn.Hardswish(), (2, 3), 1),
        (nn.Sigmoid(), (2, 3), 1),
        (nn.PReLU(), (2, 3), 1),
        (nn.ELU(), (2, 3), 1),
        (nn.Dropout(), (2, 3), 2),  # the mask scaled, and multiplied
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_norms_activations_and_softmax_for_each_element(layer: nn.Module, shape: tuple[int, ...], each: int) -> None:
    assert counts(layer, shape) == (0, each * torch.Size(shape).numel(), each * torch.Size(shape).numel())


def test_an_rms_norm_takes_a_root_for_each_row() -> None:
    # Square, sum, scale and weight for each of 24 elements; for each of 6 rows the root of the mean and epsilon.
    assert counts(nn.RMSNorm(4), (2, 3, 4)) == (0, 4 * 24 + 2 * 6, 4 * 24 + 2 * 6)


def test_pooling_counts_the_elements_of_windows() -> None:
    # 2 x 3 channels, 8 x 8 to 4 x 4 by windows of 2 x 2: 3 comparisons, or 3 additions and a division.
    assert counts(nn.MaxPool2d(2), (2, 3, 8, 8))[1] == 2 * 3 * 16 * 3
    assert counts(nn.AvgPool2d(2), (2, 3, 8, 8))[1] == 2 * 3 * 16 * 4
    assert counts(nn.AvgPool3d(2), (2, 3, 4, 4, 4))[1] == 2 * 3 * 8 * 8
    assert counts(nn.MaxPool1d(2), (2, 3, 8))[1] == 2 * 3 * 4 * 1
    # 5 places to 3 by windows [0, 2), [1, 4), [3, 5): 7 of 5, in both directions.
    assert counts(nn.AdaptiveAvgPool2d(3), (1, 1, 5, 5))[1] == 49
    assert counts(nn.AdaptiveMaxPool2d(3), (1, 1, 5, 5))[1] == 49 - 9


@pytest.mark.parametrize(
    ("mode", "shape", "each"),
    [("nearest", (1, 2, 4, 4), 0), ("bilinear", (1, 2, 4, 4), 7), ("bicubic", (1, 2, 4, 4), 31),
     ("linear", (1, 2, 4), 3), ("trilinear", (1, 2, 4, 4, 4), 15)],
)  # fmt: skip
def test_interpolation_weighs_its_neighbours(mode: str, shape: tuple[int, ...], each: int) -> None:
    # k neighbours: k products and k - 1 additions for each output.
    outputs = torch.Size(shape).numel() * 2 ** (len(shape) - 2)
    assert counts(nn.Upsample(scale_factor=2, mode=mode), shape)[1] == each * outputs


def test_sampling_a_grid_weighs_four_neighbours_and_scales_its_coordinates() -> None:
    sample = lambda x, grid: F.grid_sample(x, grid, align_corners=False)  # noqa: E731
    assert counts(sample, (1, 3, 4, 4), (1, 5, 5, 2))[1] == 3 * 25 * 7 + 2 * 50


def test_fourier_transforms() -> None:
    # 5 n log2 n for a line of n complex numbers, half for real ones: 3 lines of 8.
    assert counts(torch.fft.fft, torch.rand(3, 8, dtype=torch.complex64))[1] == 5 * 24 * 3
    assert counts(torch.fft.rfft, (3, 8))[1] == 5 * 24 * 3 // 2
    assert counts(lambda x: torch.fft.irfft(x, n=8), torch.rand(3, 5, dtype=torch.complex64))[1] == 5 * 24 * 3 // 2
    assert counts(torch.fft.fft2, torch.rand(4, 8, dtype=torch.complex64))[1] == 5 * 32 * 5


def test_reductions_and_moves() -> None:
    assert counts(torch.sum, (2, 3)) == (0, 6, 6)
    assert counts(lambda x: x.amax(-1), (2, 3)) == (0, 6, 6)
    assert counts(lambda x: torch.cat([x, x.transpose(0, 1).contiguous().view(2, 2)]), (2, 2)) == (0, 0, 0)
    assert counts(lambda x: x.add_(1).mul_(2), (2, 3)) == (0, 12, 12)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_layers_count_as_those_they_stand_for() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no engine for quantised layers here")
    x = torch.quantize_per_tensor(torch.rand(2, 4), 0.1, 0, torch.quint8)
    weight = torch.quantize_per_tensor(torch.rand(3, 4), 0.1, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, torch.rand(3))
    out = torch.ops.quantized.linear(x, packed, 0.1, 0)
    work = cost_of(torch.ops.quantized.linear.default, (x, packed, 0.1, 0), {}, out)
    assert work == mt.OpCost(macs=2 * 3 * 4, sums=6, other=6)
    image = torch.quantize_per_tensor(torch.rand(1, 4, 5, 5), 0.1, 0, torch.quint8)
    kernel = torch.quantize_per_tensor(torch.rand(6, 2, 3, 3), 0.1, 0, torch.qint8)
    packed = torch.ops.quantized.conv2d_prepack(kernel, None, [1, 1], [0, 0], [1, 1], 2)
    out = torch.ops.quantized.conv2d(image, packed, 0.1, 0)
    work = cost_of(torch.ops.quantized.conv2d.new, (image, packed, 0.1, 0), {}, out)
    assert work == mt.OpCost(macs=6 * 9 * 2 * 9, sums=54)


def test_our_products_are_those_that_torch_counts() -> None:
    aten = torch.ops.aten
    a, b, c = torch.rand(2, 3), torch.rand(3, 5), torch.rand(2, 5)
    x, w = torch.rand(2, 4, 9, 9), torch.rand(6, 4, 3, 3)
    cases: list[tuple[Any, tuple[Any, ...], Any]] = [
        (aten.mm.default, (a, b), c),
        (aten.addmm.default, (c, a, b), c),
        (aten.bmm.default, (a[None], b[None]), c[None]),
        (aten.baddbmm.default, (c[None], a[None], b[None]), c[None]),
        (aten.convolution.default, (x, w, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1), torch.rand(2, 6, 5, 5)),
    ]
    for func, args, out in cases:
        work = cost_of(func, args, {}, out)
        assert work is not None
        assert 2 * work.macs == flop_registry[func._overloadpacket](*args, out_val=out)


# -- formulas of users -------------------------------------------------------------------------------------------------


@torch.library.custom_op("microtome_tests::scan", mutates_args=())
def scan(x: Tensor) -> Tensor:
    return x.cumsum(-1)


@scan.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_without_a_formula_is_listed_and_strict_raises() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Function(scan))
    p = mt.profile(model, torch.rand(2, 3))
    (unknown,) = p.coverage.unknown
    assert (unknown.name, unknown.runs, unknown.calls) == ("microtome_tests.scan.default", 1, ("1",))
    assert p.coverage.fraction == pytest.approx(1 - 1 / p.coverage.ops)
    assert p.coverage.work is None  # one operator may do most of it
    assert p.as_dict()["coverage"]["work"] is None
    # The linear layer reads 6 inputs, 9 weights and 3 biases and writes 6 numbers; the scan reads 6 and writes 6.
    assert (unknown.moved_bytes, p.coverage.moved_bytes) == (12 * 4, (24 + 12) * 4)
    assert p.coverage.moved_fraction == p.as_dict()["coverage"]["moved_fraction"] == 1 - 12 / 36
    counted = (
        f"counted: {p.coverage.ops - 1} of {p.coverage.ops} operators, which move 66.6% of the bytes, "
        "an unknown share of the work"
    )
    assert counted in " ".join(str(p).split())
    assert "share of the work" in p.to_html()
    assert p["1"].flops is None
    assert p.total.flops == p["0"].flops  # what is known
    with pytest.raises(
        Unsupported, match="no formula is known for microtome_tests.scan.default \\(in '1'\\): register one"
    ):
        mt.profile(model, torch.rand(2, 3), strict=True)


@pytest.mark.parametrize("name", ["packet", "overload", "text"])
def test_registered_formulas_are_used(name: str) -> None:
    packet = torch.ops.microtome_tests.scan
    op: Any = {"packet": packet, "overload": packet.default, "text": "microtome_tests::scan"}[name]
    register_formula(op, lambda x, *, out: mt.OpCost(macs=x.numel(), other=2))
    try:
        total: Any = mt.profile(Function(scan), torch.rand(2, 3), strict=True).total
        assert (total.macs, total.flops) == (6, 14)
    finally:
        _registered.clear()
        _resolved.clear()


def test_a_formula_for_no_operator_is_an_error() -> None:
    with pytest.raises(NoMatch, match="expected an operator as 'mylib::scan', .* got 'microtome_tests::none'"):
        register_formula("microtome_tests::none", lambda *_, out: 0)
    with pytest.raises(BadFormula, match="expected a formula as a function of the operator's arguments, got int"):
        register_formula(torch.ops.aten.add, 3)  # type: ignore[arg-type]
    for function in (torch.relu, nn.ReLU):
        with pytest.raises(BadFormula, match="expected an operator, such as torch.ops.mylib.scan, got"):
            register_formula(function, lambda *_, out: 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (lambda x, *, out: 1 / 0, "the formula of microtome_tests.scan.default failed: ZeroDivisionError"),
        (
            lambda x, *, out: None,
            "expected an OpCost or a number of operations, got None",
        ),
        (lambda *, out: 1, "the formula of microtome_tests.scan.default failed: TypeError"),
        (
            lambda x, *, out: -5,
            "expected an OpCost or a number of operations, got -5",
        ),
    ],
)
def test_a_formula_that_is_wrong_names_its_operator(formula: Any, message: str) -> None:
    register_formula("microtome_tests::scan", formula)
    try:
        with pytest.raises(BadFormula, match=message):
            mt.profile(Function(scan), torch.rand(2, 3))
    finally:
        _registered.clear()
        _resolved.clear()


@pytest.mark.parametrize("convention", ["torchvision", "fvcore", "ptflops", "torchstat"])
def test_every_convention_reports_unknown_operators(convention: str) -> None:
    p = mt.profile(Function(scan), torch.rand(2, 3), convention=convention)
    assert [op.name for op in p.coverage.unknown] == ["microtome_tests.scan.default"]


def test_out_overloads_count_as_those_without() -> None:
    assert counts(lambda a, b: torch.mm(a, b, out=a.new_empty(2, 5)), (2, 3), (3, 5)) == (30, 60, 50)
    largest = lambda a: torch.max(a, 1, out=(a.new_empty(2), a.new_empty(2, dtype=torch.int64)))[0]  # noqa: E731
    assert counts(largest, (2, 3))[1] == 6
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    assert mt.profile(normed, "2x8", strict=True).coverage.unknown == ()


def test_whole_functions_take_their_arguments_by_name_too() -> None:
    assert counts(lambda x: torch.rms_norm(x, normalized_shape=[4]), (2, 3, 4))[1] == 3 * 24 + 2 * 6
    cell = nn.LSTMCell(3, 5)
    named = lambda x: torch.lstm_cell(  # noqa: E731
        x, (x.new_zeros(2, 5), x.new_zeros(2, 5)), cell.weight_ih, cell.weight_hh, b_ih=cell.bias_ih, b_hh=cell.bias_hh
    )
    assert counts(named, (2, 3)) == counts(cell, (2, 3))


@pytest.mark.parametrize("fake", [None, True, False])
def test_attention_as_an_operator_is_attention(fake: bool | None) -> None:
    q = torch.rand(2, 3, 5, 8)
    expected = mt.profile(Function(F.scaled_dot_product_attention), (q, q, q)).total
    for op in (torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default):
        total = mt.profile(Function(op), (q, q, q), fake=fake).total
        assert (total.flops, total.peak_bytes) == (expected.flops, expected.peak_bytes)


def test_ranges_of_a_profiler_cost_nothing() -> None:
    def ranged(x: Tensor) -> Tensor:
        with torch.profiler.record_function("here"):
            return x + 1

    assert counts(ranged, (2, 3))[1] == 6
