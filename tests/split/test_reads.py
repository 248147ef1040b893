"""What Python code reads of tensors crosses, and is listed: what a cut states is what its head sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import microtome as mt
from benchmarks.split_zoo.models import build, entries
from microtome import zoo
from microtome.errors import Unsupported
from tests.marks import slow
from tests.split.test_stages import same


def check(model: nn.Module, given: Any, most: int | None = None) -> dict[str, int]:
    """Every cut listed can be made, is exact, and states the bytes that its head sends on the example."""
    inputs = mt.Inputs.of(given)
    with torch.no_grad():
        whole = inputs.run(model)
        cuts = mt.cuts(model, inputs)
        step = 1 if most is None else -(-len(cuts) // most)
        for cut in cuts[step // 2 :: step]:
            head, tail = mt.split(model, inputs, at=cut)
            boundary = head(*inputs.args, **inputs.kwargs)
            assert (cut.at, boundary.nbytes) == (cut.at, cut.nbytes)
            assert same(tail(mt.Boundary.from_bytes(boundary.to_bytes())), whole), cut.at
    return {cut.at: cut.nbytes for cut in cuts}


Body = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.a, self.b, self.c, self.body = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def branch(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    z = net.b(x)
    return net.c(z if y.sum() > 0 else -z)


def masks(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    kept = y[y > 0]
    return net.c(net.b(x)) + kept.numel()


def mask_of_another(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    kept = y[x > 0]
    return net.c(net.b(x)) + kept.numel()


def nonzero(net: Any, x: Tensor) -> Tensor:
    rows = (net.a(x)[:, 0] > 0).nonzero()
    return net.c(net.b(x)) + len(rows)


def to_list(net: Any, x: Tensor) -> Tensor:
    numbers = net.a(x).tolist()
    return net.c(net.b(x)) * numbers[0][0]


def to_numpy(net: Any, x: Tensor) -> Tensor:
    numbers = net.a(x).numpy()
    return net.c(net.b(x)) * float(numbers[0, 0])


def to_list_after(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    z = net.c(net.b(x))
    return z * y.tolist()[0][0]


def indices(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    order = y[:, 0].argsort()
    return net.c(net.b(x)[order])


def repeats(net: Any, x: Tensor) -> Tensor:
    counts = (net.a(x)[:, 0] > 0).long() + 1
    return net.c(net.b(x).repeat_interleave(counts, 0))


class Lists(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y * x.tolist()[0][0]


def inside_a_call(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    return net.c(Lists()(y, net.b(x)))


READS: list[Body] = [branch, masks, mask_of_another, nonzero, to_list, to_numpy, to_list_after, indices, repeats]


@pytest.mark.parametrize("body", [*READS, inside_a_call], ids=lambda body: body.__name__)
def test_what_is_read_is_listed(body: Body) -> None:
    torch.manual_seed(0)
    sizes = check(Net(body).eval(), torch.randn(3, 4))
    assert list(sizes) == ["a", "b", "c"]


def test_indexing_by_arange_sends_nothing() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        pairs = y[torch.arange(3), torch.arange(3)]
        return net.c(net.b(x)) + pairs.shape[0]

    assert check(Net(body).eval(), torch.randn(3, 4)) == {"a": 48, "b": 48, "c": 48}


def test_a_mask_that_the_tail_makes_itself_has_nothing_sent_but_what_it_is_made_of() -> None:
    assert check(Net(mask_of_another).eval(), torch.randn(3, 4)) == {"a": 48, "b": 96, "c": 96}


class Packed(nn.Module):
    """A common encoder of sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.last = nn.Embedding(9, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.gru(packed)
        return self.last(pad_packed_sequence(hidden, batch_first=True)[0])


class TakesPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.middle, self.last = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, packed: PackedSequence) -> Tensor:
        hidden, _ = self.gru(packed)
        return self.last(self.middle(pad_packed_sequence(hidden, batch_first=True)[0]))


def test_packed_sequences_cross() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([6, 3, 4])
    assert list(check(Packed().eval(), (torch.randint(0, 9, (3, 6)), lengths))) == ["embed", "gru", "last"]
    packed = pack_sequence([torch.randn(5, 4), torch.randn(3, 4)])
    assert list(check(TakesPacked().eval(), mt.Inputs(packed))) == ["gru", "middle", "last"]


class Flex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.a(x).view(1, 1, -1, 3, 16).unbind(3)
        attended = flex_attention(q, k, v)
        assert isinstance(attended, Tensor)
        return self.c(self.b(attended))


@pytest.mark.filterwarnings("ignore")  # that it is slow when it is not compiled
def test_a_cut_after_flex_attention_sends_what_it_reads() -> None:
    torch.manual_seed(0)
    assert list(check(Flex().eval(), torch.randn(1, 8, 16))) == ["a", "b", "c"]


def vat() -> tuple[nn.Module, mt.Inputs]:
    zoo.import_torchvision()
    from vit_pytorch.vat import VAT, ViT

    vit = ViT(image_size=32, patch_size=16, num_classes=10, dim=16, heads=2, depth=2, mlp_dim=24)
    model = VAT(
        vit, dim=16, depth=2, heads=2, dim_head=8, mlp_dim=24, dim_action=5, num_views=2, num_tasks=4, time_seq_len=2
    )
    return model.eval(), mt.Inputs(torch.randn(2, 2, 3, 2, 32, 32), tasks=torch.randint(0, 4, (2,)))


def test_vit_pytorch_vat_states_what_it_sends() -> None:
    torch.manual_seed(0)
    assert len(check(*vat(), most=8)) > 50


ZOO = """
    torchvision:maxvit_t transformers:deberta-v2 transformers:whisper transformers:llava
    vit-pytorch:regionvit vit-pytorch:xcit timm:swin_transformer/swin_tiny_patch4_window7_224
"""


@pytest.mark.parametrize("name", ["transformers:mixtral", "vit-pytorch:cct", *slow(*ZOO.split())])
def test_models_state_what_they_send(name: str) -> None:
    entry = {str(entry): entry for entry in entries()}[name]
    model, inputs = build(entry)
    check(model.eval(), inputs[0], most=4)


# -- what is listed can be split ---------------------------------------------------------------------------------------


class Flattens(nn.Module):
    """A common idiom: weights are laid out in one piece, for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gru, self.b = nn.Linear(4, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.gru.flatten_parameters()
        return self.b(self.gru(self.a(x))[0])


def test_flatten_parameters_is_harmless() -> None:
    assert list(check(Flattens().eval(), torch.randn(2, 6, 4))) == ["a", "gru", "b"]


class Hooked(nn.Module):
    """Keeps the output of a layer by a forward hook, and consumes it later."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.block, self.b, self.c = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4), nn.Linear(4, 4)
        self.get_submodule(at).register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.block(x))
        kept = self.kept
        del self.kept
        return self.c(y) + kept


def test_a_hook_of_a_call_that_is_left_out_runs_in_the_tail() -> None:
    assert list(check(Hooked("block").eval(), torch.randn(2, 4))) == ["block.0", "block.1", "block", "b", "c"]


@pytest.mark.parametrize("at", ["block.0", "block.1"])
def test_a_hook_inside_a_call_that_is_left_out_refuses_the_cut(at: str) -> None:
    model, x = Hooked(at).eval(), torch.randn(2, 4)
    assert list(check(model, x)) == ["block.0", "block.1"]
    for cut in mt.cuts(model, x).refused:
        assert cut.refused is not None
        assert cut.refused.startswith(f"a forward hook of {at!r} sets kept on the model, and would not run in the")


def test_an_error_of_the_models_code_in_the_tail_is_a_refusal() -> None:
    runs: list[str] = []

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            runs.append("adds")
            return x + 1

    class Pops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.adds, self.last = Adds(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            runs.clear()
            y = self.adds(x)
            runs.pop()
            return self.last(y)

    with pytest.raises(Unsupported, match=r"cannot be cut at 'adds': its code raised IndexError: .* in the tail"):
        mt.split(Pops(), torch.randn(2, 4), at="adds")
