"""Measure the time and memory of each call on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch

from microtome.devices.activity import Activity, mark
from microtome.engine import Call, Probe
from microtome.engine.probes import AnyOp, Where
from microtome.errors import Unsupported
from microtome.profile.call_tree import CallTree
from microtome.profile.passes import Passes, PassSchedule

DeviceTimeMethod = Literal["kernels", "graph"]
METHODS: dict[DeviceTimeMethod, str] = {
    "kernels": "durations of the kernels that the call launched, from torch's profiler",
    "graph": "CUDA events in a graph of the whole forward",
}

#: The passes in one run of torch's profiler, and in the first run, when their duration is not known.
_PASSES_PER_RUN, _FIRST_PASSES = 10, 3


class DeviceTimes(NamedTuple):
    """Device seconds, a row for each pass.

    Attributes:
        forward: The own time of each call, a column for each.
        elapsed: The time of everything launched until each call ended, a column for each.
        backward: The own time of each call in the backward; None if there was none.
        bare: One column: whole forwards without marks.
        bare_backward: One column: whole backwards without marks.
    """

    forward: torch.Tensor
    elapsed: torch.Tensor
    backward: torch.Tensor | None
    bare: torch.Tensor
    bare_backward: torch.Tensor | None


class _Owner(NamedTuple):
    """The pass, phase and call that a launch belongs to."""

    at_pass: int
    phase: str
    call: int


class _CallMarks(Probe):
    """Marks the device's timeline with the running call."""

    def __init__(self, tree: CallTree) -> None:
        self._addresses = tree.addresses
        self._open = ["forward:0"]

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        phase = "forward" if call.phase == "forward" else "backward"
        self._open.append(f"{phase}:{self._addresses[call.address]}")
        mark(self._open[-1])

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._open.pop()
        mark(self._open[-1])

    def fail(self, call: Call, error: BaseException) -> None:
        self.exit(call, (), {}, None)


class _BackwardMarks(_CallMarks):
    """Marks the calls of the backward too, which takes time on the host and none on the device."""

    def backward_moves(self, call: Call | None) -> None:
        if len(self._open) > 1 and self._open[-1].startswith("forward"):
            return  # a backward inside a forward is part of it
        self._open = [f"backward:{0 if call is None else self._addresses[call.address]}"]
        mark(self._open[-1])


def kernel_times(runs: Passes, tree: CallTree, schedule: PassSchedule) -> DeviceTimes:
    """Sum the durations of kernels, copies and fills by the call that launched them."""
    tables: list[DeviceTimes] = []
    passes = 0
    for done in schedule.rounds("timing kernels"):
        if done == passes:
            count = min(_PASSES_PER_RUN if done else _FIRST_PASSES, schedule.repeat - done)
            passes += count
            marked, plain = _watch(runs, tree, count), _watch(runs, None, count)
            tables.append(
                DeviceTimes(
                    _own_times(marked, "forward", count, len(tree)),
                    _elapsed_times(marked, count, len(tree)),
                    _own_times(marked, "backward", count, len(tree)),
                    _own_times(plain, "forward", count, 1),
                    _own_times(plain, "backward", count, 1),
                )
            )
    forward, elapsed, backward, bare, bare_backward = map(torch.cat, zip(*tables, strict=True))
    if not bare.any():
        raise Unsupported(
            "torch's profiler reported no kernel: it may lack permission, or was built without CUPTI; "
            "device_time='graph' does not need it"
        )
    if not runs.backward:
        return DeviceTimes(forward, elapsed, None, bare, None)
    return DeviceTimes(forward, elapsed, backward, bare, bare_backward)


def peak_bytes(runs: Passes, tree: CallTree) -> list[int]:
    """Return the peak of allocated bytes during each call's forward, above what was allocated before the pass."""
    activity = _watch(runs, tree, 1, memory=True)
    changes: dict[int, list[int]] = {}
    for allocation in activity.allocations:
        changes.setdefault(allocation.mark, []).append(allocation.nbytes)
    peaks = [-1] * len(tree)
    allocated = sum(changes.get(-1, ()))
    for index, owner in enumerate(_owners(activity)):
        levels = list(accumulate(changes.get(index, ()), initial=allocated))
        allocated = levels[-1]
        if owner.phase == "forward":
            peaks[owner.call] = max(peaks[owner.call], *levels)
    return tree.peaks(peaks)


def _watch(runs: Passes, tree: CallTree | None, count: int, *, memory: bool = False) -> Activity:
    """Collect the activity of passes, with marks for each call of a tree, if there is one."""
    with runs.backend.watch_activity(memory=memory) as activity:
        for _ in range(count):
            if tree is None:
                runs.once(mark)
                continue
            probe = _BackwardMarks(tree) if runs.backward else _CallMarks(tree)
            with runs.session(probe, tree):
                runs.once(mark)
    return activity


def _owners(activity: Activity) -> Iterator[_Owner]:
    """Parse the marks. A pass begins with one that names no call."""
    at_pass = -1
    for label in activity.labels:
        phase, _, call = label.partition(":")
        at_pass += label == "forward"
        yield _Owner(at_pass, phase, int(call or 0))


def _own_times(activity: Activity, phase: str, passes: int, calls: int) -> torch.Tensor:
    table = torch.zeros(passes, calls, dtype=torch.float64)
    owners = list(_owners(activity))
    for launch in activity.launches:
        if launch.mark >= 0 and (owner := owners[launch.mark]).phase == phase:
            table[owner.at_pass, owner.call] += launch.seconds
    return table


def _elapsed_times(activity: Activity, passes: int, calls: int) -> torch.Tensor:
    """Sum the seconds of everything that a pass launched before each call ended. Calls are numbered as they begin."""
    launched: dict[int, float] = {}
    for launch in activity.launches:
        launched[launch.mark] = launched.get(launch.mark, 0.0) + launch.seconds
    table = torch.zeros(passes, calls, dtype=torch.float64)
    begun, total = 0, 0.0
    open_: list[int] = []
    for index, (label, owner) in enumerate(zip(activity.labels, _owners(activity), strict=True)):
        if label == "forward":
            begun, total, open_ = 0, 0.0, []
        if owner.phase != "forward":
            continue
        if label != "forward" and owner.call == begun < calls:
            open_.append(begun)
            begun += 1
        elif open_:  # the call ended and its parent continues
            table[owner.at_pass, open_.pop()] = total
        total += launched.get(index, 0.0)
    return table


# -- events in a graph -------------------------------------------------------------------------------------------------


class _GraphEvents(Probe):
    """Records an event where the forward enters or leaves a call, if an operator ran since the last.

    Attributes:
        events: Each with the call that runs after it.
        ended: The index of the event at which each call ended.
    """

    def __init__(self, create_event: Callable[[], Any]) -> None:
        self.events: list[tuple[Any, int]] = []
        self.ended: dict[int, int] = {}
        self._create_event = create_event
        self._open: list[int] = []
        self._count = 0
        self._ran = True

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._ran = True

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open.append(self._count)
        self._count += 1
        self._record()

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call_index = self._open.pop()
        self._record()
        self.ended[call_index] = len(self.events) - 1

    def fail(self, call: Call, error: BaseException) -> None:  # which the model may catch
        self.exit(call, (), {}, None)

    def _record(self) -> None:
        owner = self._open[-1] if self._open else -1
        if not self._ran:
            self.events[-1] = self.events[-1][0], owner
            return
        event = self._create_event()
        event.record()
        self.events.append((event, owner))
        self._ran = False


def graph_times(runs: Passes, tree: CallTree, schedule: PassSchedule) -> DeviceTimes:
    """Measure the times between events that are recorded in a graph of the forward, which the host cannot delay.

    They include the device's work for an event, and its gaps between kernels.
    """
    if runs.backward or len(runs.devices) != 1:
        raise Unsupported("a graph can be captured of the forward on one device: leave out device_time")
    device, backend = runs.devices[0], runs.backend
    with torch.accelerator.device_index(device.index):
        probe = _GraphEvents(backend.event)
        with runs.session(probe, tree):
            graph = _capture_graph(runs)
        plain = _capture_graph(runs)
        own_times: list[list[float]] = []
        elapsed_times: list[list[float]] = []
        bare: list[list[float]] = []
        for _ in schedule.rounds("timing a CUDA graph"):
            graph.replay()
            backend.synchronize(device)
            own = [0.0] * len(tree)
            for (event, owner), (after, _) in pairwise(probe.events):
                own[owner] += backend.elapsed_s(event, after)
            own_times.append(own)
            first = probe.events[0][0]
            ends = (probe.events[probe.ended[index]][0] for index in range(len(tree)))
            elapsed_times.append([backend.elapsed_s(first, end) for end in ends])
            begin = backend.timestamp(device)
            plain.replay()
            end = backend.timestamp(device)
            backend.synchronize(device)
            bare.append([backend.elapsed_s(begin, end)])
    forward, elapsed, whole = (torch.tensor(rows, dtype=torch.float64) for rows in (own_times, elapsed_times, bare))
    return DeviceTimes(forward, elapsed, None, whole, None)


def _capture_graph(runs: Passes) -> Any:
    runs.restore_inputs()
    try:
        return runs.backend.capture_graph(runs.devices[0], lambda: runs.inputs.run(runs.model))
    except Unsupported as error:
        raise Unsupported(f"{error}; leave out device_time") from error
