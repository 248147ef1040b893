"""Laws 3 and 4: parts make the whole; the same answer everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import microtome as mt
from microtome import zoo
from microtome.results.metrics import Amounts
from microtome.results.rows import AMOUNTS
from tests.marks import examples

# -- random small nets -------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Any:
        return x + self.inside(x)


class Twice(Residual):
    def forward(self, x: Tensor) -> Any:
        return self.inside(self.inside(x))


def layers(width: int) -> st.SearchStrategy[nn.Module]:
    """Layers that take (batch, width, 6, 6) and give the same."""
    simple = st.sampled_from(
        [
            lambda: nn.Conv2d(width, width, 3, padding=1),
            lambda: nn.Conv2d(width, width, 3, padding=1, bias=False),
            lambda: nn.Conv2d(width, width, 3, padding=2, dilation=2, groups=width),
            lambda: nn.ConvTranspose2d(width, width, 3, padding=1),
            lambda: nn.BatchNorm2d(width),
            lambda: nn.GroupNorm(2, width),
            lambda: nn.ReLU(),
            lambda: nn.Sequential(nn.Conv2d(width, width, 1), nn.ReLU(inplace=True)),
            lambda: nn.GELU(),
            lambda: nn.Hardswish(),
            lambda: nn.MaxPool2d(3, 1, 1),
            lambda: nn.AvgPool2d(3, 1, 1),
            lambda: nn.Dropout(0.5),
            lambda: nn.Linear(6, 6),
            lambda: nn.LayerNorm(6),
            lambda: nn.Softmax(-1),
        ]
    ).map(lambda make: make())
    return st.recursive(
        simple,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda several: nn.Sequential(*several)),
            inner.map(Residual),
            inner.map(Twice),
        ),
        max_leaves=6,
    )


def same(p: mt.Profile, q: mt.Profile) -> None:
    """The same counts at every call."""
    names = ("macs", "flops", "madds", "backward_macs", "backward_flops", "params")
    assert [(row.address, *(getattr(row, name) for name in names)) for row in p] == [
        (row.address, *(getattr(row, name) for name in names)) for row in q
    ]
    assert p.coverage.unknown == q.coverage.unknown == ()


def total(several: Any) -> list[Any]:
    columns = zip(*([getattr(amounts, name) for name in AMOUNTS] for amounts in several), strict=True)
    return [None if None in column else sum(column) for column in columns]


def whole(p: mt.Profile) -> list[Any]:
    return [getattr(p.total, name) for name in AMOUNTS]


def check_law_3(p: mt.Profile) -> None:
    for row in p:
        assert total([row.own, *p.children(row)]) == [getattr(row, name) for name in AMOUNTS]
        assert all(row.peak_bytes >= child.peak_bytes for child in p.children(row))
    for depth in range(max(row.depth for row in p) + 2):
        assert total(p.rows(depth=depth)) == whole(p)
    for granularity in range(1, p.total.height + 2):
        assert total(p.rows(granularity=granularity)) == whole(p)
    assert total(p.by_type().values()) == whole(p)
    forward = [AMOUNTS.index(name) for name in ("macs", "flops", "madds", "read_bytes", "write_bytes")]
    by_op = total(p.by_op().values()) if p.by_op() else [0] * len(AMOUNTS)
    assert [by_op[at] for at in forward] == [whole(p)[at] for at in forward]


@settings(deadline=None, max_examples=examples(40))
@given(layer=layers(4), train=st.booleans(), backward=st.booleans())
def test_law_3_parts_make_the_whole(layer: nn.Module, train: bool, backward: bool) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), layer).train(train)
    check_law_3(mt.profile(model, torch.rand(2, 4, 6, 6), backward=backward))


@pytest.mark.parametrize("name", zoo.names())
def test_law_3_on_the_built_in_models(name: str) -> None:
    check_law_3(mt.profile(*zoo.build(name), backward=True))


@pytest.mark.parametrize("convention", ["torchvision", "fvcore", "ptflops", "torchstat"])
def test_law_3_in_every_convention(convention: str) -> None:
    check_law_3(mt.profile(*zoo.build("tiny-resnet"), convention=convention))


@settings(deadline=None, max_examples=examples(40))
@given(layer=layers(4), train=st.booleans(), backward=st.booleans())
def test_law_4_on_meta_fake_and_real_tensors(layer: nn.Module, train: bool, backward: bool) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), layer).train(train)
    x = torch.rand(2, 4, 6, 6)
    p = mt.profile(model, x, backward=backward)
    for fake in (True, False):
        same(p, mt.profile(model, x, backward=backward, fake=fake))


@settings(deadline=None, max_examples=examples(25))
@given(layer=layers(4))
def test_law_4_with_and_without_gradients_in_other_dtypes_and_layouts(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), layer).eval()
    x = torch.rand(2, 4, 6, 6)
    p = mt.profile(model, x)
    for fake in (None, False):
        with torch.no_grad():
            same(p, mt.profile(model, x, fake=fake))
        with torch.inference_mode():
            same(p, mt.profile(model, x, fake=fake))
        same(p, mt.profile(model, x.to(memory_format=torch.channels_last), fake=fake))
    same(p, mt.profile(model.double(), x.double()))
    same(p, mt.profile(model.bfloat16(), x.bfloat16()))


@pytest.mark.parametrize("name", zoo.names())
@pytest.mark.parametrize("train", [False, True])
def test_law_4_on_the_built_in_models(name: str, train: bool) -> None:
    model, inputs = zoo.build(name)
    model.train(train)
    for backward in (False, True):
        p = mt.profile(model, inputs, backward=backward)
        same(p, mt.profile(model, inputs, backward=backward, fake=True))
        same(p, mt.profile(model, inputs, backward=backward, fake=False))
    with torch.inference_mode():
        p = mt.profile(model, inputs)
        same(p, mt.profile(model, inputs, fake=True))
        same(p, mt.profile(model, inputs, fake=False))


class Attends(nn.Module):
    """A layer around each way to attend."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, need_weights=self.weights)[0]


@pytest.mark.parametrize("backward", [False, True])
def test_law_4_on_each_backend_of_attention(backward: bool) -> None:
    model, x = Attends(weights=False), torch.rand(2, 5, 8, requires_grad=True)
    p = mt.profile(model, x, backward=backward)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            q = mt.profile(model, x, backward=backward, fake=False)
        same(p, q)
        if backend is not SDPBackend.MATH:  # which lays out its output otherwise, so that it is copied
            assert [row.peak_bytes for row in q] == [row.peak_bytes for row in p]
            assert [row.saved_bytes for row in q] == [row.saved_bytes for row in p]


def test_law_4_with_the_fast_path_of_attention() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.rand(2, 5, 8)
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():  # the fast path is taken without gradients alone
        p = mt.profile(layer, x, fake=False)
    same(p, mt.profile(layer, x))
    # Asking for the weights runs the products one by one: the same products, and their mean besides.
    a, b = (mt.profile(Attends(weights), x).total.macs for weights in (False, True))
    assert a == b


class Again(nn.Module):
    """A checkpoint of a module, or of a function, with attention or a recurrent layer inside."""

    def __init__(self, what: str, reentrant: bool, plain: bool = False) -> None:
        super().__init__()
        self.what, self.reentrant, self.plain = what, reentrant, plain
        self.lstm = nn.LSTM(8, 8)
        self.linear = nn.Linear(8, 8)

    def attend(self, x: Tensor) -> Tensor:
        q = self.linear(x)
        return nn.functional.scaled_dot_product_attention(q, q, q)

    def forward(self, x: Tensor) -> Any:
        function = self.lstm if self.what == "lstm" else self.attend
        output = function(x) if self.plain else checkpoint(function, x, use_reentrant=self.reentrant)
        return output[0] if self.what == "lstm" else output


@pytest.mark.parametrize("what", ["lstm", "attention"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_law_4_where_a_backward_computes_again(what: str, reentrant: bool) -> None:
    x = torch.rand(5, 2, 8, requires_grad=True)
    once: Any = mt.profile(Again(what, reentrant, plain=True), x, backward=True).total
    again: list[Any] = [mt.profile(Again(what, reentrant), x, backward=True, fake=fake) for fake in (None, True, False)]
    for p in again:
        assert p.total.backward_macs == once.backward_macs + once.macs
        assert p.coverage.unknown == ()
        same(p, again[0])


def test_a_gradient_that_a_forward_takes_is_part_of_the_forward() -> None:
    class Force(nn.Module):
        def __init__(self, attends: bool) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.attends = attends

        def forward(self, x: Tensor) -> Any:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = self.net(x)
                y = nn.functional.scaled_dot_product_attention(y, y, y) if self.attends else y
                return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    x = torch.rand(1, 2, 8)
    # Forward: two layers of 2 x 64. Its gradient for the input: the same again; the weights ask for none.
    for fake in (None, True, False):
        p = mt.profile(Force(attends=False), x, fake=fake)
        assert p.total.macs == 4 * 128
    same(mt.profile(Force(attends=True), x), mt.profile(Force(attends=True), x, fake=False))
    both = mt.profile(Force(attends=True), x, backward=True)
    assert both.total.macs == mt.profile(Force(attends=True), x).total.macs
    assert both.total.backward_macs


def test_gradients_that_inputs_carry_are_not_accumulated_to() -> None:
    x = torch.rand(2, 8, requires_grad=True)
    x.grad = torch.zeros(2, 8)
    totals = [mt.profile(nn.Linear(8, 8), x, backward=True, fake=fake).total for fake in (None, True, False)]
    assert len({total.backward_flops for total in totals}) == 1


def test_autocast_around_functions_is_not_counted_on_meta_tensors() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return nn.functional.linear(x, self.weight)

    p = mt.profile(Casts(), torch.rand(2, 8))
    assert (p.total.outputs[0].dtype, p.how.partition(" ")[0]) == ("bfloat16", "fake")


@settings(deadline=None, max_examples=examples(40))
@given(layer=layers(4), train=st.booleans())
def test_backward_flops_are_those_of_torch(layer: nn.Module, train: bool) -> None:
    """On what FlopCounterMode knows: products and convolutions. It takes the groups of a convolution for one."""
    if any(isinstance(module, nn.Conv2d) and module.groups > 1 for module in layer.modules()):
        return
    model = nn.Sequential(nn.Conv2d(4, 4, 1), layer).train(train)
    x = torch.rand(2, 4, 6, 6, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output = model(x)
        forward = counter.get_total_flops()
        output.sum().backward()
    total: Any = mt.profile(model, x, backward=True).total
    assert 2 * total.macs == forward
    assert 2 * total.backward_macs == counter.get_total_flops() - forward


def test_resnet18_matches_the_test_of_torchs_counter() -> None:
    zoo.import_torchvision()
    from torchvision.models import resnet18

    total: Any = mt.profile(resnet18(), torch.rand(1, 3, 224, 224), backward=True).total
    # torch counts 10,884,440,064 where the input asks for a gradient too: one more pass through the first convolution.
    asks: Any = mt.profile(resnet18(), torch.rand(1, 3, 224, 224, requires_grad=True), backward=True).total
    assert 2 * (asks.macs + asks.backward_macs) == 10_884_440_064
    assert asks.backward_macs - total.backward_macs == 64 * 112 * 112 * 3 * 49


def test_unknown_amounts_stay_none() -> None:
    assert Amounts().backward_flops is None
