"""The measured peak of each call, compared with torch's statistics for that call alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import microtome as mt
from benchmarks.report import Target
from benchmarks.trace import torchvision_model


@contextmanager
def peak_of(module: nn.Module) -> Iterator[list[int]]:
    """Record the peak of allocated memory during each call of a module, with plain hooks."""
    found: list[int] = []

    def before(_: nn.Module, __: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def after(_: nn.Module, __: Any, ___: Any) -> None:
        found.append(torch.cuda.max_memory_allocated())

    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def run() -> list[Target]:
    targets = []
    for name in ("resnet50", "swin_t", "densenet121"):
        torch.cuda.empty_cache()
        model, x = torchvision_model(name).cuda(), torch.randn(8, 3, 224, 224, device="cuda")
        for _ in range(3):
            model(x)
        own = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
        beside = torch.cuda.memory_allocated() - own  # workspaces of libraries, and the rounding of blocks
        p = mt.profile(model, x, measure="memory")
        off = {}
        for row in p:
            with peak_of(model.get_submodule(row.path)) as found:
                model(x)
            _, _, index = row.address.partition("#")
            real = found[int(index or 0)]
            off[row.address] = abs((row.measured_peak_bytes or 0) + beside - real) / real
        worst = max(off, key=off.__getitem__)
        peak = (p.total.measured_peak_bytes or 0) / 2**20
        static = p.total.peak_bytes / 2**20
        note = f"{name}: {len(p)} calls, worst {worst!r}; the whole {peak:.1f} MiB, static {static:.1f}"
        targets.append(Target(f"{name}: peak of each call, off at most by", off[worst], 0.02, note=note))
        del model, x, p
    return targets
