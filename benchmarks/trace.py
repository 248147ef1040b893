"""The cost of a trace, compared with a plain forward and one on meta tensors."""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
from torch import nn

import microtome as mt
from benchmarks.report import Target
from benchmarks.timing import take_turns
from microtome import zoo


def torchvision_model(name: str) -> nn.Module:
    """Build a torchvision model with random weights; its compiled operators need not fit the installed torch."""
    model: nn.Module = getattr(zoo.import_torchvision().models, name)()
    return model.eval()


def on_meta(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    tensors = (*model.named_parameters(), *model.named_buffers())
    weights = {name: torch.empty_like(value, device="meta") for name, value in tensors}
    return torch.func.functional_call(model, weights, (x.to("meta"),))


@torch.no_grad()
def run() -> list[Target]:
    torch.set_num_threads(1)
    targets = []
    x = torch.randn(1, 3, 224, 224)
    for name, most in (("resnet50", 0.7), ("swin_t", 1.1)):
        model = torchvision_model(name)
        contestants = {
            "plain": partial(model, x),
            "meta": partial(on_meta, model, x),
            "trace": partial(mt.trace, model, x),
        }
        plain, bare, traced = take_turns(contestants, rounds=10, of=median).values()
        targets.append(
            Target(f"{name}, batch 1: mt.trace / plain forward (bare meta {bare / plain:.2f})", traced / plain, most)
        )
    return targets
