"""Law 4 on a GPU: the same counts as without one, whatever kernels run; and memory as CUDA measures it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

import microtome as mt
from microtome import zoo
from tests.profile.test_laws import same

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]


def on_gpu(model: nn.Module, inputs: Any) -> tuple[nn.Module, mt.Inputs]:
    return model.cuda(), mt.Inputs.of(inputs).to("cuda")


@pytest.mark.parametrize("name", zoo.names())
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_the_built_in_models_count_the_same(name: str, train: bool, backward: bool) -> None:
    model, inputs = zoo.build(name)
    model.train(train)
    p = mt.profile(model, inputs, backward=backward)
    there, given = on_gpu(model, inputs)
    for fake in (None, True, False):
        if fake is False and name == "tiny-lstm" and backward and not train:
            continue  # cuDNN has no such backward
        same(p, mt.profile(there, given, backward=backward, fake=fake))
    with torch.inference_mode():
        if not backward:
            same(p, mt.profile(there, given, fake=True))
            same(p, mt.profile(there, given, fake=False))


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


BACKENDS = ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("backward", [False, True])
def test_every_backend_of_attention_counts_the_same(backend: str, backward: bool) -> None:
    q, k, v = (torch.rand(2, 4, 64, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    p = mt.profile(Attends(), (q, k, v), backward=backward)
    given = mt.Inputs(*(tensor.detach().cuda().requires_grad_() for tensor in (q, k, v)))
    with sdpa_kernel(getattr(SDPBackend, backend)):
        there = mt.profile(Attends(), given, backward=backward, fake=False)
    same(p, there)
    if backend != "MATH":
        assert there.total.saved_bytes == p.total.saved_bytes


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("backward", [False, True])
def test_recurrent_kernels_count_the_same(kind: Any, backward: bool) -> None:
    model, x = kind(16, 32, num_layers=2, bidirectional=True, batch_first=True), torch.rand(3, 7, 16)
    p = mt.profile(model, x, backward=backward)
    there, given = on_gpu(model, x)
    same(p, mt.profile(there, given, backward=backward, fake=False))


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_recurrent_cells_count_the_same(kind: Any) -> None:
    model, x = kind(16, 32), torch.rand(3, 16)
    p = mt.profile(model, x, backward=True)
    there, given = on_gpu(model, x)
    same(p, mt.profile(there, given, backward=True, fake=False))


def test_norms_and_dropout_count_the_same() -> None:
    layers = [nn.RMSNorm(16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.5), nn.SiLU(), nn.GELU()]
    model, x = nn.Sequential(*layers).train(), torch.rand(4, 16, requires_grad=True)
    p = mt.profile(model, x, backward=True)
    there, given = on_gpu(model, x.detach())
    given.args[0].requires_grad_()
    same(p, mt.profile(there, given, backward=True, fake=False))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "swin_t", "vit_b_32", "densenet121"])
def test_peak_memory_matches_cuda_allocations(name: str) -> None:
    zoo.import_torchvision()
    from torchvision import models

    model = getattr(models, name)().eval().cuda()
    x = torch.rand(8, 3, 224, 224, device="cuda")
    with torch.no_grad():
        model(x)  # and libraries take their work space
        gc.collect()
        p = mt.profile(model, x)
        held = p.total.param_bytes + p.total.buffer_bytes + x.nbytes
        beside = torch.cuda.memory_allocated() - held
        torch.cuda.reset_peak_memory_stats()
        model(x)
        torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - beside
    assert p.how == "meta tensors"
    # CUDA rounds each tensor up, and some kernels want work space.
    assert p.total.peak_bytes == pytest.approx(measured, rel=0.06), (measured, p.total.peak_bytes)


@pytest.mark.parametrize("name", ["resnet18", "swin_t", "vit_b_32"])
def test_saved_bytes_match_cuda_allocations(name: str) -> None:
    zoo.import_torchvision()
    from torchvision import models

    model = getattr(models, name)().train().cuda()
    x = torch.rand(8, 3, 224, 224, device="cuda")
    p = mt.profile(model, x, backward=True)
    model(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = model(x).sum()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    assert p.total.saved_bytes is not None
    # Kernels of attention keep more than their inputs and outputs.
    assert p.total.saved_bytes == pytest.approx(kept, rel=0.2 if name == "vit_b_32" else 0.03), (
        kept,
        p.total.saved_bytes,
    )
    del loss
