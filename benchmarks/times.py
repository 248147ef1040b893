"""Accuracy and overhead of measured times on a CPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import microtome as mt
from benchmarks.report import Target
from benchmarks.trace import torchvision_model


def models() -> dict[str, tuple[nn.Module, Any]]:
    image = torch.randn(1, 3, 224, 224)
    found: dict[str, tuple[nn.Module, Any]] = {
        name: (torchvision_model(name), image) for name in ("resnet50", "swin_t")
    }
    if find_spec("transformers"):
        from transformers import GPT2Config, GPT2Model

        found["gpt2"] = (GPT2Model(GPT2Config()).eval(), {"input_ids": torch.zeros(1, 128, dtype=torch.int64)})
    return found


@torch.no_grad()
def run() -> list[Target]:
    targets = []
    for name, (model, inputs) in models().items():
        p = mt.profile(model, inputs, measure="time", repeat=30, budget_s=30)
        assert p.timing is not None
        assert p.total.time_s is not None
        whole = sum(row.own.time_s or 0.0 for row in p) / p.timing.bare.median
        note = f"{name}: {len(p)} calls, {1e6 * p.timing.stamp_s:.2f} us a call taken off, {p.timing.bare.count} passes"
        off = f"{name}: sum of self times over the bare forward, off 1 by"
        targets.append(Target(off, abs(whole - 1), 0.05, note=note))
        targets.append(Target(f"{name}: forward with time stamps / bare", p.timing.ratio, 1.03))
    return targets
