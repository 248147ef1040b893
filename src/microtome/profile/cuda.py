"""How long a CUDA device takes for each call, and how much of its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from microtome.devices import cuda_activity
from microtome.devices.cuda_activity import Activity
from microtome.engine import Call, Probe
from microtome.engine.probes import AnyOp, Where
from microtome.errors import Unsupported, said
from microtome.profile.call_tree import CallTree
from microtome.profile.repeats import Passes, Schedule

Way = Literal["kernels", "graph"]
METHODS: dict[Way, str] = {
    "kernels": "durations of the kernels that the call launched, from torch's profiler",
    "graph": "CUDA events in a graph of the whole forward",
}

#: How many passes one run of torch's profiler holds, and how many the first, when it is not known how long they take.
_AT_ONCE, _FIRST = 10, 3


class DeviceTimes(NamedTuple):
    """Device seconds, a row for each pass.

    Attributes:
        forward: What each call took itself, a column for each.
        until: What was launched until each call ended, a column for each.
        backward: The same of the backward; None if there was none.
        bare: One column: whole forwards without marks.
        bare_backward: Likewise.
    """

    forward: torch.Tensor
    until: torch.Tensor
    backward: torch.Tensor | None
    bare: torch.Tensor
    bare_backward: torch.Tensor | None


class _Owner(NamedTuple):
    """Whose a launch is: of which pass, in which phase, of which call."""

    at_pass: int
    phase: str
    call: int


class _Marks(Probe):
    """Says on the device's timeline whose all is that is launched from now on."""

    def __init__(self, tree: CallTree) -> None:
        self._addresses = tree.addresses
        self._open = ["forward:0"]

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._push(call, "forward" if call.phase == "forward" else "backward")

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._pop()

    def fail(self, call: Call, error: BaseException) -> None:
        self._pop()

    def _push(self, call: Call, phase: str) -> None:
        self._open.append(f"{phase}:{self._addresses[call.address]}")
        cuda_activity.mark(self._open[-1])

    def _pop(self) -> None:
        self._open.pop()
        cuda_activity.mark(self._open[-1])


class _BackwardMarks(_Marks):
    """Those of the backward too. Making it known whose the backward is costs the host time, and the device none."""

    def backward_moves(self, call: Call | None) -> None:
        if len(self._open) > 1 and self._open[-1].startswith("forward"):
            return  # one that a forward runs is part of that
        self._open = [f"backward:{0 if call is None else self._addresses[call.address]}"]
        cuda_activity.mark(self._open[-1])


def kernel_times(runs: Passes, tree: CallTree, schedule: Schedule) -> DeviceTimes:
    """The durations of kernels, copies and fills, each with the call that launched it."""
    calls = len(tree)
    forward: list[torch.Tensor] = []
    until: list[torch.Tensor] = []
    backward: list[torch.Tensor] = []
    bare: list[torch.Tensor] = []
    bare_backward: list[torch.Tensor] = []
    made = 0
    for done in schedule.rounds("timing kernels"):
        if done == made:
            count = min(_AT_ONCE if done else _FIRST, schedule.repeat - done)
            made += count
            marked, plain = _watch(runs, tree, count), _watch(runs, None, count)
            forward.append(_table(marked, "forward", count, calls))
            until.append(_until(marked, count, calls))
            backward.append(_table(marked, "backward", count, calls))
            bare.append(_table(plain, "forward", count, 1))
            bare_backward.append(_table(plain, "backward", count, 1))
    if not torch.cat(bare).any():
        raise Unsupported(
            "torch's profiler saw no kernel: it may not be allowed to, or was built without CUPTI; "
            "with device_time='graph' it is not needed"
        )
    again = runs.backward
    return DeviceTimes(
        torch.cat(forward),
        torch.cat(until),
        torch.cat(backward) if again else None,
        torch.cat(bare),
        torch.cat(bare_backward) if again else None,
    )


def peak_bytes(runs: Passes, tree: CallTree) -> list[int]:
    """The most that the allocator had given out while each call's forward ran, above what it had before the pass."""
    seen = _watch(runs, tree, 1, memory=True)
    owners = list(_owners(seen))
    most = [-1] * len(tree)
    last, given = -1, 0
    for move in (*seen.moves, None):
        until = len(owners) if move is None else move.mark + 1
        for owner in owners[last + 1 : until]:
            if owner.phase == "forward":
                most[owner.call] = max(most[owner.call], given)
        last = max(last, until - 1)
        if move is not None:
            given += move.nbytes
            if move.mark >= 0 and (owner := owners[move.mark]).phase == "forward":
                most[owner.call] = max(most[owner.call], given)
    return tree.peaks(most)


def _watch(runs: Passes, tree: CallTree | None, count: int, *, memory: bool = False) -> Activity:
    """So many passes; with marks for each call of a tree, or none."""
    with cuda_activity.watch(memory=memory) as seen:
        for _ in range(count):
            if tree is None:
                runs.once(cuda_activity.mark)
                continue
            probe = _BackwardMarks(tree) if runs.backward else _Marks(tree)
            with runs.session(probe, tree):
                runs.once(cuda_activity.mark)
    return seen


def _owners(seen: Activity) -> Iterator[_Owner]:
    """What each mark says. A pass begins with one that names no call."""
    at_pass = -1
    for label in seen.labels:
        phase, _, call = label.partition(":")
        at_pass += label == "forward"
        yield _Owner(at_pass, phase, int(call or 0))


def _table(seen: Activity, phase: str, count: int, calls: int) -> torch.Tensor:
    table = torch.zeros(count, calls, dtype=torch.float64)
    owners = list(_owners(seen))
    for launch in seen.launches:
        if launch.mark >= 0 and (owner := owners[launch.mark]).phase == phase:
            table[owner.at_pass, owner.call] += launch.seconds
    return table


def _until(seen: Activity, count: int, calls: int) -> torch.Tensor:
    """The seconds of all that a pass launched before each call ended. Calls are numbered in the order they begin."""
    launched: dict[int, float] = {}
    for launch in seen.launches:
        launched[launch.mark] = launched.get(launch.mark, 0.0) + launch.seconds
    table = torch.zeros(count, calls, dtype=torch.float64)
    begun, total = 0, 0.0
    open_: list[int] = []
    for at, (label, owner) in enumerate(zip(seen.labels, _owners(seen), strict=True)):
        if label == "forward":
            begun, total, open_ = 0, 0.0, []
        if owner.phase != "forward":
            continue
        if label != "forward" and owner.call == begun < calls:
            open_.append(begun)
            begun += 1
        elif open_:  # it went back to the call above
            table[owner.at_pass, open_.pop()] = total
        total += launched.get(at, 0.0)
    return table


# -- the other way -----------------------------------------------------------------------------------------------------


class _CudaEvents(Probe):
    """Records an event where the forward goes from one call to another, if an operator ran since the last.

    Attributes:
        events: Each with the call that the forward went to.
        ended: The index of the event at which each call ended.
    """

    def __init__(self) -> None:
        self.events: list[tuple[torch.cuda.Event, int]] = []
        self.ended: dict[int, int] = {}
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
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self.events.append((event, owner))
        self._ran = False


def graph_times(runs: Passes, tree: CallTree, schedule: Schedule) -> DeviceTimes:
    """The times between events that are recorded in a graph of the forward, where the host cannot slow it down.

    What the device does for an event, and its pauses between kernels, are in them.
    """
    if runs.backward or len(runs.devices) != 1:
        raise Unsupported("the CUDA graph has the forward of a model on one device: leave out device_time")
    with torch.cuda.device(runs.devices[0]):
        probe = _CudaEvents()
        with runs.session(probe, tree):
            graph = _captured(runs)
        plain = _captured(runs)
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        table: list[list[float]] = []
        until: list[list[float]] = []
        bare: list[float] = []
        for _ in schedule.rounds("timing a CUDA graph"):
            graph.replay()
            torch.cuda.synchronize()
            own = [0.0] * len(tree)
            for (event, owner), (after, _) in zip(probe.events, probe.events[1:], strict=False):
                own[owner] += event.elapsed_time(after) / 1e3
            table.append(own)
            first = probe.events[0][0]
            until.append([first.elapsed_time(probe.events[probe.ended[at]][0]) / 1e3 for at in range(len(tree))])
            begins.record()
            plain.replay()
            ends.record()
            torch.cuda.synchronize()
            bare.append(begins.elapsed_time(ends) / 1e3)
    tables = (torch.tensor(rows, dtype=torch.float64) for rows in (table, until, [[one] for one in bare]))
    forward, ended, whole = tables
    return DeviceTimes(forward, ended, None, whole, None)


def _end_capture() -> None:
    """After a capture that failed, torch's random numbers are still for graphs only: one that succeeds ends that."""
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def _captured(runs: Passes) -> torch.cuda.CUDAGraph:
    """The forward as a graph."""
    graph = torch.cuda.CUDAGraph()
    try:
        runs.renew()
        with torch.cuda.graph(graph):
            runs.inputs.run(runs.model)
    except Exception as error:
        _end_capture()
        raise Unsupported(
            f"the model cannot be captured in a CUDA graph: {said(error)}; leave out device_time"
        ) from error
    return graph
