"""Each convention against the tool it is named after; test_published.py has that of torchvision."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import microtome as mt
from microtome import zoo
from microtome.flops.conventions import CONVENTIONS
from microtome.profile.profile import profile_trace
from microtome.trace.trace import record
from tests.marks import slow

zoo.import_torchvision()
from torchvision import models  # noqa: E402

MODELS = ["resnet18", "mobilenet_v3_small", "densenet121", "googlenet", "squeezenet1_0", "swin_t", "vit_b_32", "vgg11"]


def build(name: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # googlenet says that its initialisation will change
        options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
        return getattr(models, name)(**options).eval()


class Functions(nn.Module):
    """What the tools count without a module, and what they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(3, 4, 3, stride=2, groups=1)
        self.norm = nn.GroupNorm(2, 4)
        self.prelu = nn.PReLU()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.prelu(self.norm(self.conv(x))))
        x = F.interpolate(F.adaptive_avg_pool2d(F.silu(x), 4), scale_factor=2)
        x = torch.matmul(F.softmax(x, -1), x.transpose(-1, -2))
        return torch.add(F.max_pool2d(x, 2), torch.mul(F.avg_pool2d(x, 2), 3)).relu() + 1


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.gru = nn.GRU(5, 4, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        x, _ = self.gru(self.lstm(x)[0])
        return self.attention(x, x, x)[0]


OWN: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "functions": (Functions, (1, 3, 8, 8)),
    "recurrent": (Recurrent, (1, 7, 6)),
}


def model_and_shape(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    if name in OWN:
        kind, shape = OWN[name]
        return kind().eval(), shape
    return build(name), (1, 3, 224, 224)


@pytest.mark.parametrize("name", [*MODELS[:3], "functions", *slow(*MODELS[3:])])
def test_fvcore_counts_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)  # it sees nothing inside the fast path
    model, shape = model_and_shape(name)
    x = torch.rand(shape)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            from fvcore.nn import FlopCountAnalysis

            theirs = FlopCountAnalysis(model, x).total()
    finally:
        logging.disable(logging.NOTSET)
    with torch.no_grad():
        assert mt.profile(model, x, convention="fvcore").total.flops == theirs


@pytest.mark.parametrize("name", [*MODELS[:3], *OWN, *slow(*MODELS[3:])])
def test_ptflops_counts_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptflops import get_model_complexity_info

    model, shape = model_and_shape(name)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)  # it sees nothing inside the fast path
    with torch.no_grad():
        ours = mt.profile(model, torch.rand(shape), convention="ptflops").total
        theirs, params = get_model_complexity_info(model, shape[1:], as_strings=False, print_per_layer_stat=False)
    assert (ours.flops, ours.trainable_params) == (theirs, params)


def test_torchvision_counts_products_alone() -> None:
    model, x = build("resnet18"), torch.rand(1, 3, 224, 224)
    p = mt.profile(model, x, convention="torchvision")
    assert p.total.flops == p.total.macs == mt.profile(model, x).total.macs
    assert p["layer1.0.bn1"].flops == 0


def test_quantities_that_a_convention_lacks_are_none() -> None:
    total = mt.profile(nn.Linear(2, 2), "1x2", convention="fvcore", backward=True).total
    assert (total.flops, total.madds, total.backward_flops) == (4, None, None)


def test_every_convention_prices_one_trace_as_a_run_of_its_own() -> None:
    model, inputs = Functions().eval(), mt.Inputs.of(torch.randn(2, 3, 16, 16))
    trace, costs = record(model, inputs)
    runs = 0

    def count_run(*_: Any) -> None:
        nonlocal runs
        runs += 1

    with model.register_forward_pre_hook(count_run):
        priced = {
            name: profile_trace(trace, costs, model, inputs, convention, backward=False)
            for name, convention in CONVENTIONS.items()
        }
    assert runs == 0
    for name, p in priced.items():
        assert p == mt.profile(model, inputs, convention=name)
    assert len({p.total.flops for p in priced.values()}) == len(priced)
