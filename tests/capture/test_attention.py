from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from microtome import zoo
from microtome.capture.attention import fused_weights
from microtome.capture.attention.attention import ATTENTION, Attention, AttentionProbe, attention, rollout
from microtome.engine import Probe, Session
from microtome.errors import BadQuery, NoMatch, Unsupported
from microtome.inputs import Inputs
from tests.marks import examples

EPS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float64: 1e-12}


def near(actual: Tensor, expected: Tensor) -> bool:
    limit = EPS[actual.dtype]
    return actual.shape == expected.shape and torch.allclose(actual.double(), expected.double(), rtol=0, atol=limit)


def by_hand(q: Tensor, k: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """softmax(q kᵀ · scale + mask) in double, written out; zero where all keys are masked."""
    scores = q.double() @ k.double().transpose(-2, -1) * (scale or 1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    return scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0)


class Watch(TorchFunctionMode):
    """The queries and keys that fused attention was given, seen without microtome."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self._note(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **rest: Any) -> None:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        if rest.get("is_causal"):
            attn_mask = torch.ones(q.shape[-2], k.shape[-2]).tril().bool()
        self.weights.append(by_hand(q.detach(), k.detach(), attn_mask, rest.get("scale")))


def watched(run: Callable[[], Any]) -> list[Tensor]:
    with Watch() as watch, torch.no_grad():
        run()
    return watch.weights


# -- fused attention ---------------------------------------------------------------------------------------------------


class Fused(nn.Module):
    """Calls attention with whatever it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


def weights_of(*args: Any, **kwargs: Any) -> Tensor:
    asked = {name: kwargs.pop(name) for name in ("heads", "rows") if name in kwargs}
    return attention(Fused(), Inputs(*args, **kwargs), **asked)[0]


def told_by_values(q: Tensor, k: Tensor, **kwargs: Any) -> Tensor:
    """What the fused kernel itself used: with the identity for values, its output is its weights."""
    eye = torch.eye(k.shape[-2], dtype=q.dtype).expand(*k.shape[:-1], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, eye, **kwargs)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, dict[str, Any]]:
    size = st.integers(1, 4)
    batch, groups, group, i, j, d = (draw(size) for _ in range(6))
    gqa = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    heads = groups * group if gqa else groups

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    kwargs: dict[str, Any] = {"enable_gqa": True} if gqa else {}
    shape = (*(n if draw(st.booleans()) else 1 for n in (batch, heads, i)), j)
    kind = draw(st.sampled_from(["none", "causal", "boolean", "additive", "2d"]))
    if kind == "causal":
        kwargs["is_causal"] = True
    elif kind == "boolean":
        kwargs["attn_mask"] = random(*shape) > 0
    elif kind == "additive":
        kwargs["attn_mask"] = random(*shape).masked_fill(random(*shape) > 1, -math.inf)
    elif kind == "2d":
        kwargs["attn_mask"] = random(*shape[2:]) > -1
    if draw(st.booleans()):
        kwargs["scale"] = draw(st.sampled_from([0.1, 1.0, 3.0]))
    return random(batch, heads, i, d), random(batch, groups, j, d), kwargs


@settings(max_examples=examples(150), deadline=None)
@given(cases())
def test_fused_attention_has_the_weights_that_its_kernel_used(case: tuple[Tensor, Tensor, dict[str, Any]]) -> None:
    q, k, kwargs = case
    found = weights_of(q, k, k, **kwargs)
    assert found.dtype == q.dtype
    assert near(found, told_by_values(q, k, **kwargs))


@settings(max_examples=examples(50), deadline=None)
@given(cases(), st.integers(0, 7), st.integers(0, 7), st.sampled_from([1, 5, 1 << 20]))
def test_heads_and_rows_are_slices_of_the_whole(case: Any, head: int, row: int, block: int) -> None:
    q, k, kwargs = case
    head, row = head % q.shape[1], row % q.shape[2]
    whole = weights_of(q, k, k, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_weights, "BLOCK", block)
        assert near(weights_of(q, k, k, **kwargs), whole)
        part = weights_of(q, k, k, **kwargs, heads=[head, 0], rows=[row, -1])
    assert near(part, whole[:, [head, 0]][:, :, [row, -1]])


def test_all_arguments_may_be_positional() -> None:
    q, k, mask = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8), torch.rand(4, 5) > 0.3
    mask[:, 0] = True
    assert near(weights_of(q, k, k, mask, 0.0, False), by_hand(q, k, mask).float())
    assert near(weights_of(query=q, key=k, value=k, attn_mask=mask), by_hand(q, k, mask).float())


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8), (2, 3, 2, 4, 8)])
def test_dimensions_before_the_heads_are_one(shape: tuple[int, ...]) -> None:
    q, mask = torch.randn(shape), torch.rand(4, 4) > 0.5
    mask.fill_diagonal_(True)
    heads = shape[-3] if len(shape) > 3 else 1
    assert near(weights_of(q, q, q, mask), by_hand(q, q, mask).float().reshape(-1, heads, 4, 4))


def test_grouped_heads_need_no_batch() -> None:
    q, k = torch.randn(4, 3, 8), torch.randn(2, 3, 8)
    expected = by_hand(q, k.repeat_interleave(2, 0)).float()
    assert near(weights_of(q, k, k, enable_gqa=True), expected[None])


def test_keys_and_masks_are_broadcast_over_the_batch() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(5, 2, 4, 8)
    assert near(weights_of(q, k, k), by_hand(q.expand(5, 2, 3, 8), k).float())


def test_a_row_of_masked_keys_is_zero_as_in_the_fused_kernel() -> None:
    q, mask = torch.randn(1, 1, 3, 8), torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    found = weights_of(q, q, q, mask)
    assert near(found, told_by_values(q, q, attn_mask=mask))
    assert not found[0, 0, 1].any()


def test_torchs_causal_biases_are_masks() -> None:
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 4, 8)
    lower_right = torch.ones(2, 4).tril(2).bool()
    assert near(weights_of(q, k, k, causal_lower_right(2, 4)), by_hand(q, k, lower_right).float())


def test_dropout_is_not_in_the_weights_and_random_numbers_are_as_without() -> None:
    q = torch.randn(1, 2, 5, 8)
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    outputs: list[Tensor] = []
    model = Fused()
    model.register_forward_hook(lambda _, __, output: outputs.append(output))
    torch.manual_seed(0)
    found = attention(model, Inputs(q, q, q, dropout_p=0.5))
    assert near(found[0], by_hand(q, q).float())
    assert torch.equal(outputs[0], expected)


def test_under_autocast_the_weights_are_those_of_the_lower_precision() -> None:
    q = torch.randn(1, 2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = weights_of(q, q, q)
    assert found.dtype == torch.bfloat16
    assert near(found, by_hand(q.bfloat16(), q.bfloat16()))


def test_calls_of_the_operator_itself_are_observed() -> None:
    class Direct(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return torch.ops.aten.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 5, 8)
    assert near(attention(Direct(), q)[0], by_hand(q, q).float())


def largest_allocation(run: Callable[[], Any]) -> int:
    with torch.profiler.profile(profile_memory=True) as profiler:
        run()
    return max(event.self_cpu_memory_usage for event in profiler.events())


def test_one_row_takes_no_memory_for_the_others() -> None:
    q = torch.randn(1, 4, 512, 16)
    mask = torch.ones(512, 512, dtype=torch.bool)
    fused = largest_allocation(lambda: F.scaled_dot_product_attention(q, q, q, mask))  # makes the mask additive
    assert fused < 4 * 512 * 512 * 4 <= largest_allocation(lambda: weights_of(q, q, q, mask))
    assert largest_allocation(lambda: weights_of(q, q, q, mask, rows="cls")) <= fused
    assert largest_allocation(lambda: weights_of(q, q, q, is_causal=True, rows="cls")) < 4 * 512 * 512


def test_weights_are_computed_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 4, 512, 16).bfloat16()
    kept: dict[str, Tensor] = {}
    monkeypatch.setattr(fused_weights, "BLOCK", 1 << 14)

    def run() -> None:
        model = Fused()
        with Session(model, [AttentionProbe(kept.__setitem__)], composite=ATTENTION):
            model(q, q, q)

    assert largest_allocation(run) == 4 * 512 * 512 * 2  # what is kept: no scores of all rows, which take twice that
    assert near(kept[""], by_hand(q, q))


def test_the_computation_of_weights_is_hidden_from_other_sessions() -> None:
    class Names(Probe):
        def __init__(self) -> None:
            self.names: list[str] = []

        def op(self, where: Any, func: Any, args: Any, kwargs: Any, output: Any) -> None:
            self.names.append(str(func))

    plain, beside, outside = Names(), Names(), Names()
    model, q = Fused(), torch.randn(1, 2, 5, 8)
    with Session(model, [plain], composite=ATTENTION):
        model(q, q, q)
    probe = AttentionProbe(lambda address, weights: weights.sum())
    with Session(model, [outside], composite=ATTENTION), Session(model, [beside, probe], composite=ATTENTION):
        model(q, q, q)
    assert plain.names == beside.names == outside.names


# -- attention in explicit code ----------------------------------------------------------------------------------------


class Explicit(nn.Module):
    """As vit-pytorch writes it."""

    def __init__(self, dim: int = 12, heads: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(self.norm(x)).chunk(3, -1))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        out = torch.matmul(self.dropout(self.attend(dots)), v)
        return out.transpose(1, 2).flatten(2)

    def expected(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            q, k, _ = self.split(x)
            return by_hand(q, k).float()


def modes() -> list[Any]:
    return [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", modes())
def test_explicit_attention_is_captured_where_it_is_computed(mode: Any) -> None:
    first, x = Explicit(), torch.randn(2, 5, 12)
    with mode():
        found = attention(nn.Sequential(first, Explicit()), x)
    assert found.layers == ("0", "1")
    assert near(found["0"], first.expected(x))
    assert near(found.weights[:, 0], found["0"])
    assert not found["0"].requires_grad


def test_dropout_comes_after_and_may_be_in_place() -> None:
    model, x = Explicit(dropout=0.5), torch.randn(2, 5, 12)
    model.dropout.inplace = True
    with torch.no_grad():
        assert near(attention(model, x)[0], model.expected(x))


@pytest.mark.parametrize("mode", modes())
@pytest.mark.parametrize(
    "head",
    [
        lambda x, w: (x @ w).softmax(-1),
        lambda x, w: torch.einsum("bnd,dc->bnc", x, w).softmax(-1),
        lambda x, w: torch.bmm(x, w.expand(len(x), -1, -1)).softmax(-1),
        lambda x, w: F.linear(x.transpose(0, 1), w).softmax(-1),
        lambda x, w: (x.double() @ w.double()).softmax(-1),
        lambda x, w: torch.einsum("bnd,dc->bnc", x.double(), w.double().clone()).softmax(-1),
        lambda x, w: x.softmax(-1),
        lambda x, w: (x.mean(1) @ w).softmax(-1),
    ],
)
def test_the_softmax_of_a_classifier_is_not_attention(head: Callable[[Tensor, Tensor], Tensor], mode: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Explicit()
            self.weight = nn.Parameter(torch.randn(12, 12))

        def forward(self, x: Tensor) -> Tensor:
            return head(self.block(x), self.weight)

    with mode():
        assert attention(Model(), torch.randn(2, 5, 12)).layers == ("block",)


class Scores(nn.Module):
    """Attention whose scores are changed by a function."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.mix = nn.Parameter(torch.randn(3, 3))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.change(torch.einsum("bhid,bhjd->bhij", q, k)).softmax(-1)


def in_place(scores: Tensor) -> Tensor:
    scores += 1
    scores.masked_fill_(torch.ones(4, 5).triu(1).bool(), -math.inf)
    return scores


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": in_place,
    "views": lambda s: s.view(2, 3, 20).transpose(1, 2).transpose(1, 2).reshape(6, 4, 5).view(2, 3, 4, 5),
    "where": lambda s: torch.where(torch.rand(4, 5) > -1, s, torch.tensor(-1e4)),
    "capped": lambda s: 30 * torch.tanh(s / 30),
    "less its maximum": lambda s: s - s.amax(-1, keepdim=True),
    "double": lambda s: s.double(),
    "copied into a buffer": lambda s: torch.zeros(2, 3, 4, 5).copy_(s),
    "with a sink": lambda s: torch.cat([s, torch.zeros(2, 3, 4, 1)], -1),
    "blocks": lambda s: s.unsqueeze(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_scores_are_tracked_through_elementwise_operators_views_and_masks(name: str) -> None:
    model, q, k = Scores(CHANGES[name]), torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8)
    with torch.no_grad():
        expected = model(q, k)
    found = attention(model, (q, k))
    assert torch.equal(found[0], expected.flatten(0, -4))


def test_talking_heads_before_the_softmax_are_captured() -> None:
    model, q = Scores(lambda s: torch.einsum("bhij,hg->bgij", s, model.mix)), torch.randn(2, 3, 4, 8)
    with torch.no_grad():
        assert torch.equal(attention(model, (q, q))[0], model(q, q))
    linear = nn.Linear(3, 3)
    model = Scores(lambda s: linear(s.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
    model.linear = linear
    with torch.no_grad():
        assert torch.equal(attention(model, (q, q))[0], model(q, q))


def test_a_classifier_behind_a_product_without_softmax_is_not_attention() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 5)

        def forward(self, q: Tensor) -> Tensor:
            return self.head(q @ (q.transpose(-1, -2) @ q)).softmax(-1)

    with pytest.raises(NoMatch, match="no attention found in the Linear"):
        attention(Linear(), torch.randn(2, 3, 4, 8))


def test_a_softmax_over_another_dimension_is_not_attention() -> None:
    class Other(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return torch.matmul(q, q.transpose(-1, -2)).softmax(1)

    with pytest.raises(NoMatch, match="no attention found in the Other"):
        attention(Other(), torch.randn(2, 3, 4, 8))


def test_tensors_of_the_run_are_not_kept_alive() -> None:
    import weakref

    alive: list[weakref.ref[Any]] = []

    class Keep(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            scores = torch.matmul(q, q.transpose(-1, -2))
            alive.append(weakref.ref(scores.untyped_storage()))
            return scores.softmax(-1).sum()

    model, probe = Keep(), AttentionProbe(lambda *_: None)
    with torch.no_grad(), Session(model, [probe], composite=ATTENTION):
        model(torch.randn(1, 2, 4, 8))
        assert alive[0]() is None


def test_several_in_one_call_have_names_of_their_own() -> None:
    class Twice(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, q, q), q, q)

    model = nn.Sequential(Twice())
    found = attention(model, torch.randn(1, 2, 4, 8))
    assert found.layers == ("0", "0/attention#1")
    assert found["0/attention#1"] is found[1]


def test_a_layer_that_runs_twice_is_two_layers() -> None:
    layer = Explicit()
    found = attention(nn.Sequential(layer, layer), torch.randn(1, 4, 12))
    assert found.layers == ("0#0", "0#1")
    assert found["0#0"] is found[0]
    with pytest.raises(NoMatch, match="'0' ran 2 times: say which of '0#0', '0#1'"):
        found["0"]


def test_what_a_checkpoint_computes_again_is_not_another_layer() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Explicit()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, kept = Checkpointed(), list[str]()
    with Session(model, [AttentionProbe(lambda address, _: kept.append(address))], composite=ATTENTION):
        model(torch.randn(1, 4, 12)).sum().backward()
    assert kept == ["inner"]


# -- torch's own layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_multihead_attention(need_weights: bool, batch_first: bool, batched: bool) -> None:
    mha = nn.MultiheadAttention(12, 3, batch_first=batch_first, dropout=0.5)
    x, padding = torch.randn(2, 5, 12), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    forbidden = torch.ones(5, 5).triu(1).bool()
    if not batched:
        x, padding = x[:1], padding[:1]
    with torch.no_grad():
        q, k, _ = F.linear(x, mha.in_proj_weight, mha.in_proj_bias).unflatten(-1, (9, 4)).transpose(1, 2).chunk(3, 1)
    expected = by_hand(q, k, ~(padding[:, None, None] | forbidden)).float()
    given = x[0] if not batched else x if batch_first else x.transpose(0, 1)
    kwargs = {
        "key_padding_mask": padding if batched else padding[0],
        "attn_mask": forbidden,
        "need_weights": need_weights,
    }
    found = attention(mha, {"query": given, "key": given, "value": given, **kwargs})
    assert near(found[""], expected)
    part = attention(mha, {"query": given, "key": given, "value": given, **kwargs}, heads=[2, 0], rows="last")
    assert near(part[0], expected[:, [2, 0], -1:])


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_layer_is_observed_despite_its_fast_path(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True).train(training)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 12)
    with torch.no_grad():
        found = attention(model, x)
        expected = model.layers[0].self_attn(x, x, x, average_attn_weights=False)[1]
    assert found.layers == ("layers.0.self_attn", "layers.1.self_attn")
    assert found.weights.shape == (2, 2, 3, 5, 5)
    assert near(found[0], expected)
    assert model.training is True  # the stack itself was not changed
    assert layer.training is training


# -- whole models ------------------------------------------------------------------------------------------------------


def vit() -> nn.Module:
    torchvision = zoo.import_torchvision()
    model: nn.Module = torchvision.models.VisionTransformer(32, 8, 2, 3, 12, 24, num_classes=5)
    return model.eval()


def projected(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """Of the MultiheadAttentions of a model: what their projections of their inputs, taken by hooks, give."""
    weights: list[Tensor] = []

    def hook(mha: nn.Module, args: Any, kwargs: Any) -> None:
        assert isinstance(mha, nn.MultiheadAttention)
        parts = F.linear(args[0], mha.in_proj_weight, mha.in_proj_bias).unflatten(-1, (3 * mha.num_heads, -1))
        q, k, _ = parts.transpose(1, 2).chunk(3, 1)
        weights.append(by_hand(q, k))

    layers = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchvisions_vit(dtype: torch.dtype) -> None:
    model, x = vit().to(dtype), torch.randn(2, 3, 32, 32, dtype=dtype)
    found = attention(model, x)
    expected = projected(model, lambda: model(x))
    names = tuple(f"encoder.layers.encoder_layer_{i}.self_attention" for i in range(2))
    assert found.layers == names
    assert found.weights.shape == (2, 2, 3, 17, 17)
    assert found.weights.dtype == dtype
    assert all(near(a, b) for a, b in zip(found, expected, strict=True))
    cls = attention(model, x, layers=f"**.{names[1].split('.')[-2]}", heads=[1], rows="cls")
    assert cls.layers == names[1:]
    assert near(cls[0], found[1][:, 1:2, :1])


def test_torchvisions_swin_has_windows_so_its_layers_are_a_list() -> None:
    torchvision = zoo.import_torchvision()
    model = torchvision.models.SwinTransformer([4, 4], 12, [2, 2], [2, 3], [2, 2], num_classes=5).eval()
    x = torch.randn(2, 3, 32, 32)
    expected: list[Tensor] = []

    class Softmax(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.softmax:
                expected.append(args[0].double().softmax(-1).float())
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        with Softmax():
            model(x)
        found = attention(model, x)
    # 8 x 8 patches in windows of 2 x 2: 2 · 16 windows; after the merging, 2 · 4
    assert [tuple(weights.shape) for weights in found] == [(32, 2, 4, 4)] * 2 + [(8, 3, 4, 4)] * 2
    assert all(near(a, b) for a, b in zip(found, expected, strict=True))
    assert found.layers[0] == "features.1.0.attn"
    with pytest.raises(BadQuery, match="expected layers with weights of one shape.*use the list, `by_layer`"):
        _ = found.weights
    assert found[:2].weights.shape == (32, 2, 2, 4, 4)


def import_transformers() -> Any:
    zoo.import_torchvision()  # which it imports too
    return pytest.importorskip("transformers")


def of_transformers(name: str, attn: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = import_transformers()
    ids = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])}
    mask = {"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])}
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=12, n_layer=2, n_head=3)
        kind = transformers.GPT2LMHeadModel
    elif name == "llama":
        sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(vocab_size=30, num_attention_heads=6, num_key_value_heads=2, **sizes)
        kind = transformers.LlamaForCausalLM
    else:
        sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 12}
        heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
        config = transformers.BartConfig(vocab_size=30, max_position_embeddings=16, **sizes, **heads)
        kind = transformers.BartModel
        mask["decoder_input_ids"] = torch.tensor([[2, 5, 6], [2, 7, 8]])
    config._attn_implementation = attn
    config.initializer_range = config.init_std = 0.3  # large, so that weights are far from all the same
    return kind(config).eval(), {**ids, **mask}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
def test_models_of_transformers_agree_in_both_ways_of_attention(name: str, dtype: torch.dtype) -> None:
    eager, inputs = of_transformers(name, "eager")
    fused, _ = of_transformers(name, "sdpa")
    eager, fused = eager.to(dtype), fused.to(dtype)
    with torch.no_grad():
        by_code, by_kernel = attention(eager, inputs), attention(fused, inputs)
        expected = watched(lambda: fused(**inputs))
        own = eager(**inputs, output_attentions=True)
    assert by_code.layers == by_kernel.layers
    assert all(near(a, b) for a, b in zip(by_kernel, expected, strict=True))
    real = slice(0, 1)  # the second has padding, whose own rows eager code fills in another way
    limit = 2e-6 if dtype is torch.float32 else 0.1  # eager code rounds scores of up to 10 to 8 bits
    for a, b in zip(by_code, by_kernel, strict=True):
        assert torch.allclose(a[real].float(), b[real].float(), rtol=0, atol=limit)
    if name == "bart":
        theirs = (*own.encoder_attentions, *own.decoder_attentions, *own.cross_attentions)
        assert by_code["decoder.layers.0.encoder_attn"].shape == (2, 3, 3, 4)
    else:
        theirs = own.attentions
    assert all(near(a.to(dtype), b) for a, b in zip(by_code, theirs, strict=True))


def test_t5_adds_its_positions_in_place() -> None:
    transformers = import_transformers()
    config = transformers.T5Config(vocab_size=30, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=3)
    config._attn_implementation = "eager"
    model = transformers.T5Model(config).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "decoder_input_ids": torch.tensor([[0, 5, 6]])}
    with torch.no_grad():
        found = attention(model, inputs)
        own = model(**inputs, output_attentions=True)
    theirs = (*own.encoder_attentions, *own.decoder_attentions, *own.cross_attentions)
    assert [near(a, b) for a, b in zip(found, theirs, strict=True)] == [True] * 3


# -- what is asked, and what is left behind ----------------------------------------------------------------------------


def test_outputs_are_the_same_bit_for_bit_and_the_graph_is_left() -> None:
    model, x = vit().train(), torch.randn(2, 3, 32, 32)
    outputs: list[Tensor] = []
    expected = model(x)
    handle = model.register_forward_hook(lambda _, __, output: outputs.append(output))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = attention(model, x)
    handle.remove()
    assert torch.equal(outputs[0], expected)
    assert outputs[0].requires_grad
    assert model.training
    assert not any(weights.requires_grad for weights in found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_model_is_as_found_after_an_exception() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("not today")

    model, x = nn.Sequential(Explicit(), Fails()), torch.randn(1, 4, 12)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    with pytest.raises(ValueError, match="not today"):
        attention(model, x)
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    assert "_compiled_call_impl" not in vars(model)
    assert attention(model[0], x).layers == ("",)


def test_a_layer_is_wanted_by_any_module_around_it() -> None:
    model, x = nn.Sequential(nn.Sequential(Explicit()), nn.Sequential(Explicit())), torch.randn(1, 4, 12)
    assert attention(model, x, layers="1").layers == ("1.0",)
    assert attention(model, x, layers="0.0.attend").layers == ("0.0",)
    assert attention(model, x, layers=Explicit).layers == ("0.0", "1.0")
    assert attention(model, x, layers=["1", "0.0"]).layers == ("0.0", "1.0")


def test_no_attention_is_an_error_that_names_the_cause() -> None:
    with pytest.raises(NoMatch, match=r"no attention found in the Linear.*has none.*compiled.*flash_attn"):
        attention(nn.Linear(2, 2), torch.ones(1, 2))
    model = nn.Sequential(Explicit(), nn.Linear(12, 12))
    with pytest.raises(NoMatch, match="the selected layers of the Sequential computed no attention; these did: '0'"):
        attention(model, torch.randn(1, 4, 12), layers="1")
    repeated = Explicit()
    model = nn.Sequential(repeated, repeated, nn.Linear(12, 12))
    with pytest.raises(NoMatch, match="these did: '0#0', '0#1'"):
        attention(model, torch.randn(1, 4, 12), layers="2")
    with pytest.raises(NoMatch, match="no module matches the path 'nowhere'"):
        attention(model, torch.randn(1, 4, 12), layers="nowhere")


def test_a_kernel_that_hides_its_weights_is_named() -> None:
    class Hidden(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]

    with pytest.raises(NoMatch, match="kernels that do not expose its weights: 'aten._scaled_dot"):
        attention(Hidden(), torch.randn(1, 2, 4, 8))


def test_scripted_parts_are_named() -> None:
    with quiet_script():
        model = nn.Sequential(torch.jit.script(nn.Linear(12, 12)))
    with pytest.raises((NoMatch, Unsupported), match="script"):
        attention(model, torch.randn(1, 4, 12))


@contextmanager
def quiet_script() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"heads": 1}, "expected heads as a list of indices"),
        ({"heads": []}, "expected heads as a list of indices"),
        ({"heads": [True]}, "expected heads as a list of indices"),
        ({"heads": [3]}, "expected the index of a head from -3 to 2, got 3"),
        ({"rows": "first"}, "expected rows as a list of query indices, 'cls'"),
        ({"rows": [-6]}, "expected the index of a query row from -5 to 4, got -6"),
        ({"device": "nowhere"}, "expected a device of this machine, got 'nowhere'"),
    ],
)
def test_invalid_options_of_attention_raise(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        attention(Explicit(), torch.randn(1, 5, 12), **asked)


def test_inputs_may_be_a_text_and_weights_may_move() -> None:
    found = attention(Explicit(), "2x5x12", device="meta")
    assert found[0].is_meta
    assert repr(found) == "<Attention of 1 layer, 2x3x5x5, float32>"


def test_an_unknown_layer_of_a_result_raises_with_the_nearest() -> None:
    found = attention(nn.Sequential(Explicit()), torch.randn(1, 5, 12))
    with pytest.raises(NoMatch, match="no module at path '1'"):
        found["1"]
    assert [weights is found[0] for weights in found] == [True]
    assert len(found) == 1


# -- rollout -----------------------------------------------------------------------------------------------------------


def stack_of(*layers: list[list[list[float]]]) -> Attention:
    """Of one sample; each layer a list of heads."""
    return Attention(tuple(map(str, range(len(layers)))), tuple(torch.tensor([heads]) for heads in layers))


def test_rollout_by_hand() -> None:
    # Layer 0: heads mean [[.5, .5], [.25, .75]]; with half identity [[.75, .25], [.125, .875]].
    # Layer 1: one head [[1, 0], [1, 0]]; with half identity [[1, 0], [.5, .5]].
    # Second times first: row 0 = [.75, .25]; row 1 = .5 · ([.75, .25] + [.125, .875]) = [.4375, .5625].
    given = stack_of(
        [[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.0, 1.0]]],
        [[[1.0, 0.0], [1.0, 0.0]]],
    )
    expected = torch.tensor([[[0.75, 0.25], [0.4375, 0.5625]]])
    assert torch.allclose(given.rollout(), expected)
    assert torch.allclose(rollout(given), expected)


def test_rollout_normalises_what_heads_and_discarding_leave() -> None:
    # The maximum over heads is [[1, 1], [.5, 1]]; without identity, rows over their sums.
    given = stack_of([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.0, 1.0]]])
    assert torch.allclose(given.rollout(residual=0, heads="max"), torch.tensor([[[0.5, 0.5], [1 / 3, 2 / 3]]]))
    # The minimum is [[0, 0], [0, .5]]: nothing goes into the first row.
    assert torch.allclose(given.rollout(residual=0, heads="min"), torch.tensor([[[0.0, 0.0], [0.0, 1.0]]]))
    # A quarter of the mean's four weights, [[.5, .5], [.25, .75]], is the .25.
    assert torch.allclose(given.rollout(residual=0, discard=0.25), torch.tensor([[[0.5, 0.5], [0.0, 1.0]]]))


def test_rows_of_a_rollout_sum_to_one() -> None:
    flow = attention(vit(), torch.randn(2, 3, 32, 32)).rollout(discard=0.3)
    assert flow.shape == (2, 17, 17)
    assert torch.allclose(flow.sum(-1), torch.ones(2, 17))


def test_a_rollout_of_parts_or_of_other_shapes_is_refused() -> None:
    x = torch.randn(1, 5, 12)
    with pytest.raises(BadQuery, match="expected all query rows, got 'cls'"):
        attention(Explicit(), x, rows="cls").rollout()
    with pytest.raises(BadQuery, match="self-attention over the same tokens, got 1x1x2x3"):
        Attention(("a",), (torch.ones(1, 1, 2, 3),)).rollout()
    with pytest.raises(BadQuery, match="1x1x2x2, 1x1x3x3"):
        Attention(("a", "b"), (torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 3))).rollout()
    whole = attention(Explicit(), x)
    with pytest.raises(BadQuery, match="expected residual from 0 to 1, got 2"):
        whole.rollout(residual=2)
    with pytest.raises(BadQuery, match="'mean', 'max' or 'min', got 'sum'"):
        whole.rollout(heads="sum")  # type: ignore[arg-type]


class Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, key, **self.options)


@pytest.mark.parametrize("lead", [(), (2,), (0,), (1, 2), (0, 2), (2, 1, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(0, 4), (4, 0), (0, 0), (3, 4)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_attention_without_queries_or_keys_is_empty(
    lead: tuple[int, ...], queries: int, keys: int, options: dict[str, Any]
) -> None:
    query, key = torch.randn(*lead, queries, 8), torch.randn(*lead, keys, 8)
    (weights,) = attention(Attends(**options), (query, key)).by_layer
    heads = lead[-1] if len(lead) > 1 else 1
    assert weights.shape == (torch.Size(lead).numel() // heads, heads, queries, keys)


@pytest.mark.parametrize("rows", ["cls", "last"])
def test_of_no_queries_the_first_and_the_last_are_none(rows: Any) -> None:
    empty = torch.randn(1, 2, 0, 8)
    assert attention(Attends(), (empty, empty), rows=rows)[0].shape == (1, 2, 0, 0)
    with pytest.raises(BadQuery, match="expected the index of a query row from 0 to -1, got 0"):
        attention(Attends(), (empty, empty), rows=[0])


def test_indices_of_numpy_and_of_torch_are_numbers_too() -> None:
    import numpy as np

    x = torch.randn(1, 4, 5, 8)
    plain = attention(Attends(), (x, x), heads=[1, 3], rows=[0])
    chosen: list[Any] = [np.array([1, 3]), [np.int64(1), np.int32(3)], torch.tensor([1, 3]), range(1, 4, 2)]
    rows: Any = [np.int64(0)]
    for heads in chosen:
        found = attention(Attends(), (x, x), heads=heads, rows=rows)
        assert (found.heads, found.rows) == ((1, 3), (0,))
        assert torch.equal(found[np.int64(0)], plain[0])  # type: ignore[call-overload]
    for wrong in ([0.5], 1, [True], "01", []):
        with pytest.raises(BadQuery, match="expected heads as a list of indices"):
            attention(Attends(), (x, x), heads=wrong)  # type: ignore[arg-type]
    with pytest.raises(BadQuery, match="expected the address or position of a layer, got 1.5"):
        plain[1.5]  # type: ignore[call-overload]


def test_a_layer_is_found_by_the_module_that_contains_it_alone() -> None:
    found = attention(*zoo.build("tiny-vit"), layers=["blocks.1", "blocks.2"])
    assert found["blocks.1"] is found["blocks.1.attn"]
    assert found.plot(layer="blocks.2", head=1).pixels.equal(found.plot(layer="blocks.2.attn", head=1).pixels)
    with pytest.raises(NoMatch, match="'blocks' has 2 layers of attention: say which of 'blocks.1.attn', 'blocks.2"):
        found["blocks"]
    with pytest.raises(NoMatch, match="no module at path 'block'. Did you mean"):
        found["block"]
    with pytest.raises(NoMatch, match=r"'blocks.0' was not captured; captured: 'blocks.1.attn', .*: add it to layers"):
        found["blocks.0"]


def test_a_shared_layer_has_all_its_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Attends()
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x, self.first(x, x))

    x = torch.randn(1, 2, 3, 4)
    found = attention(Twice(), x)
    assert found.layers == ("first#0", "first#1")
    assert torch.equal(found["second#1"], found[1])
    with pytest.raises(NoMatch, match="'second' ran 2 times: say which of 'first#0', 'first#1'"):
        found["second"]


def test_of_no_layers_there_are_no_weights() -> None:
    none = Attention((), ())
    assert repr(none) == "<Attention of 0 layers>"
    with pytest.raises(BadQuery, match="expected at least one layer, got none"):
        _ = none.weights
    with pytest.raises(BadQuery, match="rollout expected the Attention that mt.attention returns, got a str"):
        rollout("weights")  # type: ignore[arg-type]
