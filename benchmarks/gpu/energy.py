"""Energy of a model by layer, compared with NVML's counter over a long plain loop."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import torch
from torch import nn

import microtome as mt
from benchmarks.report import Target
from benchmarks.trace import torchvision_model

_LOOP_S = 10.0


def plain_loop(model: nn.Module, x: torch.Tensor) -> float:
    """Return the energy of a pass in joules, from the counter alone, between two of its updates ten seconds apart."""
    pynvml: Any = import_module("pynvml")
    pynvml.nvmlInit()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def tick() -> tuple[float, float, int]:
        """Run the model until the counter changes."""
        runs, last = 0, pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        while (now := pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) == last:
            for _ in range(4):
                model(x)
                runs += 1
        return now / 1000, time.perf_counter(), runs

    for _ in range(20):
        model(x)
    start_j, began, _ = tick()
    count = 0
    while time.perf_counter() - began < _LOOP_S:
        for _ in range(10):
            model(x)
            count += 1
        torch.cuda.synchronize()
    end_j, _, more = tick()
    torch.cuda.synchronize()
    pynvml.nvmlShutdown()
    return (end_j - start_j) / (count + more)


@torch.no_grad()
def run() -> list[Target]:
    targets = []
    for name, batch in (("resnet50", 128), ("vit_b_16", 32)):  # large enough not to be host-bound
        model, x = torchvision_model(name).cuda(), torch.randn(batch, 3, 224, 224, device="cuda")
        plain = plain_loop(model, x)
        for method in ("share", "replay"):
            options: dict[str, Any] = {"energy": method, "budget_s": 90.0 if method == "replay" else 20.0}
            p = mt.profile(model, x, measure="energy", **options)
            targets += _targets(p, f"{name}, batch {batch}, {method}", plain)
    return targets


def _targets(p: mt.Profile, title: str, plain: float) -> list[Target]:
    use = p.energy
    if use is None or use.whole is None or use.closure_j is None or p.total.energy_j is None:
        raise SystemExit(f"no energy: {p.unavailable}")
    top = max((row for row in p if row.height == 1), key=lambda row: row.energy_j or 0.0)
    spread = top.spreads["energy_j"]
    note = (
        f"{title}: {use.whole.median:.3f} J a pass ({use.whole.low:.3f} to {use.whole.high:.3f}), plain loop "
        f"{plain:.3f} J, {1e3 * (use.pass_s or 0):.2f} ms, idle {use.idle_w:.0f} W; "
        f"layers {p.total.energy_j:.3f} J + closure {use.closure_j:.3f} J; net {p.total.net_energy_j:.3f} J; "
        f"{len(use.not_replayed)} layers not replayed; the most in {top.address!r}: "
        f"{1e3 * spread.median:.2f} mJ ({1e3 * spread.low:.2f} to {1e3 * spread.high:.2f})"
    )
    closes = abs(p.total.energy_j + use.closure_j - use.whole.median) / use.whole.median
    return [
        Target(f"{title}: whole pass / plain loop, off 1 by", abs(use.whole.median / plain - 1), 0.05, note=note),
        Target(f"{title}: layers + closure - whole, of the whole", closes, 1e-9),
    ]
