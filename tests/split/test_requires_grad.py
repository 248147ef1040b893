"""What crosses a cut requires a gradient in the tail where it does in the model: kernels and code go by that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import microtome as mt
from microtome.errors import BadBoundary


class Biased(nn.Module):
    """Attention with a learned bias, which is computed once for all layers, as T5's is."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.last = nn.Embedding(64, 4), nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.bias((places[:, None] - places[None]) % 64).permute(2, 0, 1)[None]
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        y: Tensor = self.last(x)
        return y


class Asking(nn.Module):
    """Goes by whether values require gradients, and writes into one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        learned, fixed = self.a(x), self.b(x.detach())
        y = self.c(learned + fixed)
        learned += 1
        y = y * 2 if learned.requires_grad else y
        z: Tensor = y * 3 if fixed.requires_grad else y
        return z + learned * fixed


MODELS = {"biased": (Biased, (2, 24, 32)), "asking": (Asking, (2, 4))}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("input_grad", [True, False])
def test_every_listed_cut_can_be_split_and_is_exact_with_gradients_and_without(
    name: str, grad: bool, input_grad: bool
) -> None:
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    model, x = kind(), torch.randn(shape, requires_grad=input_grad)
    with torch.set_grad_enabled(grad):
        whole = model(x)
        cuts = mt.cuts(model, x)
        assert len(cuts) >= 3
        for cut in cuts:
            stages = mt.split(model, x, at=cut)
            assert stages.verified == "bit-equal", cut.at
            boundary = stages[0](x)
            for sent in (boundary, mt.Boundary.from_bytes(boundary.to_bytes()), boundary):
                given = stages[1](sent)
                assert given.equal(whole), cut.at
                assert given.requires_grad is whole.requires_grad
                assert not any(tensor.requires_grad for tensor in sent.tensors.values())


def test_only_tensors_that_a_boundary_names_require_a_gradient() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    head, tail = mt.split(model, x, at="0")
    boundary = head(x)
    boundary.facts["requires_grad"] = ["other"]
    assert not tail(boundary).requires_grad
    for invalid in ([1], {"0": 1}, "0", None):
        boundary.facts["requires_grad"] = invalid
        with pytest.raises(BadBoundary, match=r"facts.requires_grad.*: expected a"):
            tail(boundary)
    assert tail(head(x)).requires_grad
