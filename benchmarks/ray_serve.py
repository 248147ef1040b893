"""Throughput of `microtome.scale.ray.deploy` compared with `mt.serve`, with the same batching on one node.

`python -m benchmarks ray-serve [--save]`; `python -m benchmarks.ray_serve serve` is the server of the comparison.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import microtome as mt
from benchmarks.remote.batching import CLIENTS, IN_FLIGHT, Clients
from benchmarks.report import Target
from benchmarks.timing import take_turns

ROUNDS = 24
AT, BATCH, WINDOW = "stem", 8, "5ms"


def build() -> tuple[nn.Module, Tensor]:
    """A net of which 0.3 GMACs are in the tail, whose kernels gain little from a batch."""
    torch.manual_seed(0)
    blocks = [layer for _ in range(9) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    tail = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000))
    stem = nn.Sequential(nn.Conv2d(3, 64, 8, stride=4, padding=2), nn.ReLU())
    return nn.Sequential(OrderedDict(stem=stem, tail=tail)).eval(), torch.randn(1, 3, 128, 128)


def serve_until_stdin_ends() -> None:
    torch.set_num_threads(1)
    with mt.serve(*build(), listen="127.0.0.1:0", batch=BATCH, batch_window=WINDOW) as server:
        print(server.address, flush=True)
        sys.stdin.read()


@contextmanager
def server_process() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.ray_serve", "serve"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


@contextmanager
def ray_node() -> Iterator[None]:
    """A Ray cluster of one node."""
    import ray

    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": variables},
    )
    try:
        yield
    finally:
        ray.serve.shutdown()
        ray.shutdown()


@contextmanager
def ray_deployment() -> Iterator[Any]:
    """The tail on a cluster of one node."""
    from microtome.scale.ray import deploy

    with ray_node():
        stages = mt.split(*build(), at=AT)
        with deploy(stages, only=[AT], batch=BATCH, batch_window=WINDOW, listen="127.0.0.1:0") as deployment:
            yield deployment


def run() -> list[Target]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        items = [torch.randn(1, 3, 128, 128) for _ in range(IN_FLIGHT)]
        plain = Clients(stack, stack.enter_context(server_process()), build, AT, items)
        deployment = stack.enter_context(ray_deployment())
        on_ray = Clients(stack, deployment.address, build, AT, items)
        # The fastest round of each: Ray has more processes, which other work on the machine delays.
        times = take_turns({"serve": plain.send_all, "ray": on_ray.send_all}, ROUNDS, of=min)
    rates = {name: CLIENTS * IN_FLIGHT / seconds for name, seconds in times.items()}
    note = (
        f"nine convolutions of 64 channels after {AT}, batches of {BATCH}, {CLIENTS * IN_FLIGHT} requests at once; in "
        f"a second of the fastest of {ROUNDS} rounds, mt.serve answers {rates['serve']:.0f}, "
        f"Ray Serve {rates['ray']:.0f}"
    )
    return [
        Target(
            "64 requests at once: time over Ray Serve / over mt.serve",
            times["ray"] / times["serve"],
            1 / 0.9,
            note=note,
        )
    ]


if __name__ == "__main__":
    serve_until_stdin_ends()
