"""Serializing and reading a boundary, compared with plain copies of the same bytes.

A plain copy is `bytes()` of the tensor's memory, or of the encoded bytes: one thread, new memory, no checks.
`Tensor.clone()` is the same with one thread; from 131 KB on it uses all cores, and waits for those that are busy.
Contestants take turns on tensors that together exceed the core's cache, and their results are kept for a while, as in
a program that does other work in between. In a loop over one tensor, which stays in the cache, a copy of 1 MB costs a
quarter of that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import cycle
from math import inf
from statistics import quantiles
from time import perf_counter

import torch

from benchmarks.report import Target
from microtome.files.tensors import memory_of
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.tensor_bytes import allocate_bytes, copy_hashed

MB = 1_000_000
SIZES_MB = (0.1, 0.3, 1, 3, 10, 50)
#: Smaller boundaries cost what their header costs.
LEAST_MB = 0.3
CODECS = ("raw", "lz4", "zstd", "fp16", "bf16", "int8", "int8_tensor", "int8+zstd")


def in_turns(contestants: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, float]:
    """Time contestants in turns, each cycling through a list of the same work on different data.

    Returns the lower quartile of each, in seconds: some turns are slow because the core is busy.
    """
    queues = {name: cycle(runs) for name, runs in contestants.items()}
    kept: deque[object] = deque(maxlen=len(contestants) * min(map(len, contestants.values())))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 3):
        for name, queue in queues.items():
            run = next(queue)
            began = perf_counter()
            made = run()
            taken = perf_counter() - began
            kept.append(made)
            if round_ >= 3:
                times[name].append(taken)
    return {name: quantiles(taken, n=4)[0] for name, taken in times.items()}


def boundaries(megabytes: float) -> list[Boundary]:
    """Create different boundaries, 16 MB in total, but at least two."""
    count = max(2, round(16 / megabytes))
    elements = int(megabytes * MB) // 4
    return [
        Boundary("layer2.0.conv1", "0" * 32, {"layer2.0.conv1": torch.randn(elements).relu_()}, {"inputs": [[8, 3]]})
        for _ in range(count)
    ]


def copies() -> list[Target]:
    targets = []
    for megabytes in SIZES_MB:
        made = boundaries(megabytes)
        encoded = [one.to_bytes() for one in made]
        views = [memory_of(one.tensors["layer2.0.conv1"]) for one in made]
        half, third = len(made) // 2, len(made) // 3  # so that no contestant finds its data in the cache
        contestants: dict[str, list[Callable[[], object]]] = {
            "copy": [partial(bytes, view) for view in views],
            "copy and hash": [partial(copy_and_hash, view) for view in views[third:] + views[:third]],
            "encode": [one.to_bytes for one in made[half:] + made[:half]],
            "copy back": [partial(bytes, memoryview(data)) for data in encoded],
            "decode": [partial(Boundary.from_bytes, data) for data in encoded[half:] + encoded[:half]],
        }
        took = in_turns(contestants, rounds=max(31, min(301, 2 * len(made) + 1)))
        note = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in took.items())
        most = 1.5 if megabytes >= LEAST_MB else inf
        least = took["copy and hash"] / took["copy"]
        floor = f"{megabytes:g} MB: copying and hashing alone takes {least:.2f} of a copy"
        encode, decode = took["encode"] / took["copy"], took["decode"] / took["copy back"]
        targets += [
            Target(f"encode {megabytes:g} MB / copy", encode, most, note=f"{megabytes:g} MB: {note}", floor=floor),
            Target(f"decode {megabytes:g} MB / copy", decode, most, floor=floor if encode <= most else ""),
        ]
    return targets


def copy_and_hash(view: memoryview) -> bytes:
    """Copy bytes with the digests that guard a boundary, and nothing else: what any encoding costs at least."""
    data, target = allocate_bytes(len(view))
    copy_hashed(view, target)
    return data


def codecs() -> str:
    """Describe the ratio and speed of each codec on 10 MB, half of it zeros."""
    made = Boundary("layer1", "", {"layer1": torch.randn(4, 64, 98, 100).relu_()}, {})
    lines = []
    for codec in CODECS:
        data = made.to_bytes(codec)
        took = in_turns({"to": [partial(made.to_bytes, codec)], "from": [partial(Boundary.from_bytes, data)]}, rounds=5)
        speed = " and ".join(f"{made.nbytes / MB / seconds:.0f}" for seconds in took.values())
        lines.append(f"{codec} {len(data) / made.nbytes:.2f} ({speed} MB/s)")
    return f"Of 10 MB after a ReLU, bytes that remain, and speed to bytes and back: {', '.join(lines)}"


def run() -> list[Target]:
    first, *others = copies()
    last = others.pop()
    return [first, *others, Target(last.name, last.value, last.most, note=codecs())]
