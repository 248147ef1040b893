"""A pipelined training step on one CUDA device: `python -m benchmarks.training_gpu [--save] [--device cpu]`.

Two processes share the device. NCCL refuses that in most versions; then gloo carries the tensors, over the host. The
model is a llama in bfloat16 that is cut after half of its layers. With `--device cpu` it is a small one.
"""

from __future__ import annotations

import argparse
import os

import torch

from benchmarks.pipelined_step import LLAMA_FLOOR, Workload, make_llama, make_targets, run_processes, run_step
from benchmarks.report import Target, machine, markdown, save


def _make_large() -> Workload:
    return make_llama(16, 2048, 4, 1024, 8, torch.bfloat16, intermediate=8192, heads=16)


def _make_small() -> Workload:
    return make_llama(4, 64, 2, 16, 4, torch.bfloat16)


def run(device: str, backends: list[str], rounds: int) -> list[Target]:
    """Run with the first backend that works."""
    refusals: list[str] = []
    make = _make_small if device == "cpu" else _make_large
    for backend in backends:
        try:
            results = run_processes(run_step, make, torch.device(device), rounds, backend=backend)
        except Exception as error:  # noqa: BLE001  of a process, whose own error is in the text
            lines = [line for line in str(error).splitlines() if line.strip()]
            refusals.append(f"{backend} fails with: {lines[-1]:.200}")
            print(refusals[-1])
            continue
        return make_targets(results, "; ".join([f"over {backend}", *refusals]), floor=LLAMA_FLOOR)
    raise SystemExit("no backend works")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="default: nccl, or gloo if it fails")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic kernels
    default = ["gloo"] if options.device == "cpu" else ["nccl", "gloo"]
    text = markdown(run(options.device, [options.backend] if options.backend else default, options.rounds))
    print(machine(), text, sep="\n\n")
    if options.save:
        print("written to", save("training-gpu", text, "python -m benchmarks.training_gpu --save"))


if __name__ == "__main__":
    main()
