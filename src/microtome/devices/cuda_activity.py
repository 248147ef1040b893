"""What a CUDA device did, from torch's profiler: kernels with their true durations, and the allocator's moves.

Marks say from which moment on what is launched belongs to whom. They are put on the timeline of the profiler itself, so
no two clocks are compared, and nothing on the device waits for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from microtome.engine.torch_internals import is_profiler_enabled
from microtome.errors import Unsupported

_PREFIX = "microtome:"


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, a copy or a fill.

    Attributes:
        mark: Which of the marks was the last before it was launched; -1 before the first.
    """

    mark: int
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class AllocatorMove:
    """Bytes that the device's allocator gave out or, below zero, took back.

    Attributes:
        mark: Which of the marks was the last before it.
    """

    mark: int
    nbytes: int


@dataclass
class Activity:
    """What was done while it was watched, each list in the order of its launches.

    Attributes:
        labels: The marks, in their order.
    """

    labels: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    moves: list[AllocatorMove] = field(default_factory=list)


def mark(label: str) -> None:
    """From now on, what is launched belongs to this label."""
    with record_function(_PREFIX + label):
        pass


@contextmanager
def watch(*, memory: bool = False) -> Iterator[Activity]:
    """Fill an activity when the block has ended.

    Args:
        memory: Whether to have the allocator's moves too.
    """
    if is_profiler_enabled():
        raise Unsupported("torch's profiler is running, and there can be one only: measure outside of it")
    activity = Activity()
    with profile(use_device="cuda", use_kineto=True, profile_memory=memory) as profiler:
        yield activity
        torch.cuda.synchronize()
    results = profiler.kineto_results
    assert results is not None
    _fill(activity, results.events())


def _fill(activity: Activity, events: list[Any]) -> None:
    cuda, cpu = torch.device("cuda").type, torch.device("cpu").type
    marks: list[tuple[int, str]] = []
    launched: dict[int, int] = {}  # when, by the number that a launch and its kernel have in common
    ops: dict[int, int] = {}
    kernels: list[Any] = []
    moves: list[Any] = []
    for event in events:
        name, kind = event.name(), event.device_type().name.lower()
        if kind == cuda:
            if name == "[memory]":
                moves.append(event)
            elif not event.is_user_annotation():
                kernels.append(event)
        elif kind == cpu and event.is_user_annotation() and name.startswith(_PREFIX):
            marks.append((event.start_ns(), name.removeprefix(_PREFIX)))
        elif kind == cpu and name.startswith("cu") and "::" not in name and not event.is_user_annotation():
            launched[event.correlation_id()] = event.start_ns()
        elif event.correlation_id():
            ops[event.correlation_id()] = event.start_ns()
    marks.sort(key=lambda one: one[0])
    times = [time for time, _ in marks]
    activity.labels = [label for _, label in marks]

    def at(time: int) -> int:
        return bisect_right(times, time) - 1

    def launch_time(kernel: Any) -> int:
        """When the host launched it; else, when the operator began that did."""
        begun = launched.get(kernel.correlation_id(), ops.get(kernel.linked_correlation_id()))
        return kernel.start_ns() if begun is None else begun

    timed = sorted(((launch_time(kernel), kernel) for kernel in kernels), key=lambda one: one[0])
    activity.launches = [Launch(at(time), kernel.name(), kernel.duration_ns() / 1e9) for time, kernel in timed]
    moved = sorted(moves, key=lambda event: event.start_ns())
    activity.moves = [AllocatorMove(at(event.start_ns()), event.nbytes()) for event in moved]
