"""Speed of splitting, boundaries and tracking on a CUDA device, as ratios and rates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

import microtome as mt
from benchmarks.report import Target
from benchmarks.trace import torchvision_model
from microtome import zoo


def run() -> list[Target]:
    model, ids = build_llama()
    return [*split_llama(model, ids), *run_llama(model, ids), *boundaries(), *track_training()]


def build_llama() -> tuple[nn.Module, torch.Tensor]:
    """A llama of 16 layers of 4096 in bf16, 7.5 GB, and 1,024 tokens."""
    zoo.import_torchvision()  # which transformers imports
    import transformers

    config = transformers.LlamaConfig(num_hidden_layers=16, use_cache=False)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        return model, torch.arange(1024)[None]


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = perf_counter()
    run()
    torch.cuda.synchronize()
    return perf_counter() - began


@torch.no_grad()
def split_llama(model: nn.Module, ids: torch.Tensor) -> list[Target]:
    inputs = {"input_ids": ids, "use_cache": False}
    model(**inputs)
    first, second = (seconds(lambda: mt.split(model, inputs, at="model.layers.7")) for _ in range(2))
    note = f"weights of {sum(p.nbytes for p in model.parameters()) / 1e9:.1f} GB; split again {second:.2f} s"
    return [Target("mt.split of a llama, bf16, s", first, 2.5, note=note)]


@torch.no_grad()
def run_llama(model: nn.Module, ids: torch.Tensor) -> list[Target]:
    return [compare_stages(model, ids, batch, most) for batch, most in ((1, 1.02), (8, 1.01))]


def compare_stages(model: nn.Module, ids: torch.Tensor, batch: int, most: float, rounds: int = 30) -> Target:
    inputs = {"input_ids": ids.expand(batch, -1).contiguous(), "use_cache": False}
    head, tail = mt.split(model, inputs, at="model.layers.7")
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        for run, kept in zip((lambda: model(**inputs), lambda: tail(head(**inputs))), times, strict=True):
            taken = seconds(run)
            if index >= rounds // 3:  # a machine that has just started is slower
                kept.append(taken)
    plain, split = map(median, times)
    note = f"batch {batch}: {1e3 * plain:.2f} ms plain, {1e3 * split:.2f} ms in two stages"
    floor = (
        "before its layers, the model reads on the host whether positions are packed, in the tail again: there the "
        "read waits for the kernels of the head, and the device for the host"
    )
    return Target(f"llama, batch {batch}: head + tail / plain", split / plain, most, note=note, floor=floor)


def boundaries() -> list[Target]:
    targets = []
    for megabytes in (55, 437):
        tensor = torch.randn(megabytes * 500_000, device="cuda").bfloat16()
        boundary = mt.Boundary("layer", "0", {"layer": tensor}, {})
        data = boundary.to_bytes()
        ways: dict[str, Callable[[], Any]] = {
            "to_bytes": boundary.to_bytes,
            "from_bytes": lambda data=data: mt.Boundary.from_bytes(data, device="cuda"),  # type: ignore[misc]
        }
        for name, way in ways.items():
            taken = median(seconds(way) for _ in range(7))
            title = f"{name} of {megabytes} MB on the GPU: 6 GB/s / rate"
            note = f"{name}, {megabytes} MB: {len(data) / taken / 1e9:.1f} GB/s"
            targets.append(Target(title, taken * 6e9 / len(data), 1.0, note=note))
    return targets


@torch.enable_grad()
def track_training(rounds: int = 15) -> list[Target]:
    model, x = torchvision_model("resnet50").cuda().train(), torch.randn(32, 3, 224, 224, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    times: dict[str, list[float]] = {"plain": [], "tracked": []}
    for index in range(rounds):
        for name, kept in times.items():
            with mt.track(model) if name == "tracked" else nullcontext():
                taken = [seconds(step) for _ in range(4)]
            if index >= rounds // 3:
                kept += taken
    plain, tracked = median(times["plain"]), median(times["tracked"])
    note = f"resnet50, batch 32, a training step: {1e3 * plain:.2f} ms, tracked {1e3 * tracked:.2f} ms"
    return [Target("resnet50, a training step, mt.track / plain", tracked / plain, 1.05, note=note)]
