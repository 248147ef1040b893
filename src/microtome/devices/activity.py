"""Kernels with their durations, and allocations, of a device, from torch's profiler.

Marks attribute launches: each belongs to the last mark before it. They are annotations on the profiler's own timeline,
so no two clocks are compared, and nothing on the device waits for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
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
        mark: The index of the last mark before its launch; -1 before the first.
    """

    mark: int
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes that the device's allocator allocated or, if negative, freed.

    Attributes:
        mark: The index of the last mark before it.
    """

    mark: int
    nbytes: int


@dataclass
class Activity:
    """The activity of a device, each list in order.

    Attributes:
        labels: The labels of the marks.
    """

    labels: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)


def mark(label: str) -> None:
    """Attribute launches to this label, until the next mark."""
    with record_function(_PREFIX + label):
        pass


@contextmanager
def watch(device_type: str, *, launch_prefix: str, memory: bool = False) -> Iterator[Activity]:
    """Yield an activity, which is filled when the block ends.

    Args:
        launch_prefix: The common prefix of the runtime functions that launch kernels.
        memory: Collect allocations too.
    """
    if is_profiler_enabled():
        raise Unsupported("torch's profiler is running, and only one can: measure outside of it")
    activity = Activity()
    with profile(use_device=device_type, use_kineto=True, profile_memory=memory) as profiler:
        yield activity
        torch.accelerator.synchronize()
    results = profiler.kineto_results
    assert results is not None
    _fill(activity, results.events(), device_type, launch_prefix)


def _is_launch(event: Any, launch_prefix: str) -> bool:
    name = event.name()
    return name.startswith(launch_prefix) and "::" not in name and not event.is_user_annotation()


def _fill(activity: Activity, events: list[Any], device_type: str, launch_prefix: str) -> None:
    marks: list[tuple[int, str]] = []
    launch_times: dict[int, int] = {}  # by the correlation id of a launch and its kernel
    op_times: dict[int, int] = {}
    kernels: list[Any] = []
    allocations: list[Any] = []
    for event in events:
        name, event_type = event.name(), event.device_type().name.lower()
        if event_type == device_type:
            if name == "[memory]":
                allocations.append(event)
            elif not event.is_user_annotation():
                kernels.append(event)
        elif event_type == "cpu" and event.is_user_annotation() and name.startswith(_PREFIX):
            marks.append((event.start_ns(), name.removeprefix(_PREFIX)))
        elif event_type == "cpu" and _is_launch(event, launch_prefix):
            launch_times[event.correlation_id()] = event.start_ns()
        elif event.correlation_id():
            op_times[event.correlation_id()] = event.start_ns()
    marks.sort(key=itemgetter(0))
    mark_times = [time for time, _ in marks]
    activity.labels = [label for _, label in marks]

    def mark_at(time: int) -> int:
        return bisect_right(mark_times, time) - 1

    def launch_time(kernel: Any) -> int:
        """Return the time of the launch on the host; if unknown, that of the operator; else that of the kernel."""
        time = launch_times.get(kernel.correlation_id(), op_times.get(kernel.linked_correlation_id()))
        return kernel.start_ns() if time is None else time

    timed = sorted(((launch_time(kernel), kernel) for kernel in kernels), key=itemgetter(0))
    activity.launches = [Launch(mark_at(time), kernel.name(), kernel.duration_ns() / 1e9) for time, kernel in timed]
    allocations.sort(key=lambda event: event.start_ns())
    activity.allocations = [Allocation(mark_at(event.start_ns()), event.nbytes()) for event in allocations]
