"""Device times of all calls, compared with the kernel time of an unobserved run."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import microtome as mt
from benchmarks.report import Target
from benchmarks.trace import torchvision_model

CASES = {("resnet50", 32): 0.02, ("vit_b_16", 32): 0.02, ("resnet50", 1): 0.05, ("vit_b_16", 1): 0.05}


def kernel_seconds(model: nn.Module, x: torch.Tensor, passes: int = 10) -> float:
    """What torch's own table says, without microtome."""
    return median(kernels_of(lambda: model(x)) for _ in range(passes))


def kernels_of(run: Callable[[], object]) -> float:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    rows = seen.key_averages()  # rows of operators have the times of their kernels too
    return sum(row.self_device_time_total for row in rows if row.device_type.name == "CUDA") / 1e6


@torch.no_grad()
def run() -> list[Target]:
    targets = []
    for (name, batch), most in CASES.items():
        model, x = torchvision_model(name).cuda(), torch.randn(batch, 3, 224, 224, device="cuda")
        for _ in range(5):
            model(x)
        real = kernel_seconds(model, x)
        for way in ("kernels", "graph"):
            options: dict[str, Any] = {"device_time": way}
            p = mt.profile(model, x, measure="time", **options)
            whole = sum(row.own.device_s or 0.0 for row in p)
            bound = sum(bool(row.is_launch_bound) for row in p if row.height == 1)
            note = (
                f"{name}, batch {batch}, {way}: {1e3 * whole:.3f} ms in {len(p)} calls, kernels {1e3 * real:.3f} ms, "
                f"host {1e3 * (p.total.time_s or 0):.3f} ms, {bound} layers launch-bound"
            )
            limit = most if way == "kernels" else float("inf")
            title = f"{name}, batch {batch}, {way}: device times / kernels, off 1 by"
            targets.append(Target(title, abs(whole / real - 1), limit, note=note))
    return targets + backward()


@torch.enable_grad()
def backward() -> list[Target]:
    model, x = torchvision_model("resnet50").cuda().train(), torch.randn(32, 3, 224, 224, device="cuda")

    def step() -> None:
        output = model(x)
        torch.autograd.backward(output, torch.ones_like(output))
        model.zero_grad()

    sums = [kernels_of(step) for _ in range(8)][3:]
    p = mt.profile(model, x, measure="time", backward=True)
    whole = sum((row.own.device_s or 0.0) + (row.own.backward_device_s or 0.0) for row in p)
    note = f"resnet50, batch 32, training: {1e3 * whole:.3f} ms, kernels {1e3 * median(sums):.3f} ms"
    title = "resnet50, batch 32, forward and backward: device times / kernels, off 1 by"
    return [Target(title, abs(whole / median(sums) - 1), 0.02, note=note)]
