"""A pipelined training step of two processes on the CPU, beside the same parts of the model written by hand."""

from __future__ import annotations

import torch

from benchmarks.pipelined_step import (
    LLAMA_FLOOR,
    Workload,
    make_llama,
    make_resnet,
    make_targets,
    run_processes,
    run_step,
)
from benchmarks.report import Target


def _make_llama() -> Workload:
    return make_llama(8, 256, 4, 64, 4)


def _make_resnet() -> Workload:
    return make_resnet(4, 64, 4)


def run() -> list[Target]:
    targets: list[Target] = []
    for name, make, rounds, floor in (("llama", _make_llama, 20, LLAMA_FLOOR), ("ResNet-50", _make_resnet, 10, "")):
        results = run_processes(run_step, make, torch.device("cpu"), rounds)
        targets += make_targets(results, f"a {name}, over gloo", f" of a {name}", floor)
    return targets
