"""Measure the host's time of each call: passes with two time stamps per call, beside passes without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.devices.statistics import spreads
from microtome.engine import Call, Probe, Session
from microtome.engine.compiled_code import runs_compiled_code
from microtome.inputs import Inputs
from microtome.profile.call_tree import CallTree
from microtome.profile.passes import Passes, PassSchedule, check_calls
from microtome.results.measurements import Timing

METHOD = "two time stamps per call; the minimum cost of the stamps is subtracted"
BACKWARD_METHOD = "a time stamp wherever the backward goes from one call to another"


class Stopwatch(Probe):
    """Records when each call began and ended, in the order they began, and does nothing else."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self.begins = [0] * len(addresses)
        self.ends = [0] * len(addresses)
        self.restart()

    def restart(self) -> None:
        """Begin a new pass."""
        self._calls: list[Call] = []
        self._open: list[int] = []

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.phase != "forward":
            return
        index = len(self._calls)
        self._calls.append(call)
        self._open.append(index)
        if index < len(self.begins):
            self.begins[index] = perf_counter_ns()

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call.phase != "forward":
            return
        index = self._open.pop()
        if index < len(self.ends):
            self.ends[index] = perf_counter_ns()

    def fail(self, call: Call, error: BaseException) -> None:  # which the model may catch
        self.exit(call, (), {}, None)

    def durations(self) -> list[int]:
        """Return the nanoseconds of each call, after checking that the pass made the expected calls."""
        check_calls([call.address for call in self._calls], self._addresses)
        return [end - begin for begin, end in zip(self.begins, self.ends, strict=True)]

    def elapsed(self) -> list[int]:
        """Return the nanoseconds from the beginning of the run to the end of each call."""
        return [end - self.begins[0] for end in self.ends]


class _BackwardWatch(Probe):
    """Records when the backward goes from one call to another, including recomputed ones."""

    def __init__(self) -> None:
        self.events: list[tuple[Call | None, int]] = []
        self._current: Call | None = None
        self._interrupted: list[Call | None] = []
        self._forwards = 0

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.phase == "recompute":
            self._interrupted.append(self._current)
            self.backward_moves(call)
        else:
            self._forwards += 1

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call.phase == "recompute":
            self.backward_moves(self._interrupted.pop())
        else:
            self._forwards -= 1

    def fail(self, call: Call, error: BaseException) -> None:  # how a checkpoint ends early
        self.exit(call, (), {}, None)

    def backward_moves(self, call: Call | None) -> None:
        if not self._forwards:  # a backward inside a forward is part of it
            self._current = call
            self.events.append((call, perf_counter_ns()))

    @property
    def seconds(self) -> float:
        """The duration of the whole backward."""
        return (self.events[-1][1] - self.events[0][1]) / 1e9 if self.events else 0.0

    def own(self, tree: CallTree, stamp_s: float) -> list[float]:
        """Return the seconds of each call's own backward; those of no call belong to the root."""
        seconds = [0.0] * len(tree)
        for (call, begin), (_, end) in pairwise(self.events):
            seconds[0 if call is None else tree.addresses[call.address]] += (end - begin) / 1e9 - stamp_s
        return seconds


class HostTimes(NamedTuple):
    """Seconds, a row for each pass, a column for each call.

    Attributes:
        inclusive: The time of each call, including the calls inside it.
        elapsed: The time from the beginning of the run to the end of each call.
    """

    inclusive: torch.Tensor
    elapsed: torch.Tensor


def time_forward(runs: Passes, tree: CallTree, schedule: PassSchedule) -> tuple[HostTimes, Timing]:
    """Measure the times of calls; return them with the overhead of the measurement."""
    warmups = runs.warm_up(schedule)
    bare: list[float] = []
    stamped: list[float] = []
    durations: list[list[int]] = []
    elapsed: list[list[int]] = []
    watch = Stopwatch(tree.order)
    session = runs.session(watch, tree)
    forward = runs.forward_only()
    grad = torch.is_grad_enabled() or runs.backward
    with session, torch.set_grad_enabled(grad):
        forward.once()  # the session's first run builds its index of modules
    for _ in schedule.rounds("timing"):
        with torch.set_grad_enabled(grad):
            bare.append(forward.once().forward_s)
            watch.restart()
            with session:
                stamped.append(forward.once().forward_s)
        durations.append(watch.durations())
        elapsed.append(watch.elapsed())
    stamp_s = _stamp_cost()
    inclusive, ends = (torch.tensor(stamps, dtype=torch.float64) / 1e9 for stamps in (durations, elapsed))
    inclusive -= stamp_s * torch.tensor(tree.inside(), dtype=torch.float64)
    ends -= stamp_s * torch.tensor(tree.stamp_counts(), dtype=torch.float64)
    timing = Timing(
        bare=spreads(torch.tensor(bare)[:, None], "bare passes")[0],
        ratio=median(stamped) / median(bare),
        stamp_s=stamp_s,
        warmups=warmups,
        fast_paths=runs.fast_paths,
        compiled=runs_compiled_code(runs.model),
    )
    return HostTimes(inclusive, ends), timing


def time_backward(runs: Passes, tree: CallTree, schedule: PassSchedule, timing: Timing) -> tuple[torch.Tensor, Timing]:
    """Measure the seconds of each call's own backward, a row for each pass; return them with the overhead."""
    stamp_s = _backward_stamp_cost()
    table: list[list[float]] = []
    bare: list[float] = []
    stamped: list[float] = []
    for _ in schedule.rounds("timing the backward"):
        bare.append(runs.once().backward_s)
        watch = _BackwardWatch()
        with runs.session(watch, tree):
            runs.once()
        stamped.append(watch.seconds)
        table.append(watch.own(tree, stamp_s))
    timing = replace(
        timing,
        backward=spreads(torch.tensor(bare)[:, None], "bare passes")[0],
        backward_ratio=median(stamped) / median(bare),
        backward_stamp_s=stamp_s,
    )
    return torch.tensor(table, dtype=torch.float64), timing


class _TimedCall(nn.Module):
    """Creates one autograd node and computes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


def _stamp_cost(calls: int = 200, rounds: int = 7) -> float:
    """Measure the overhead of the time stamps of a call, on modules that do nothing."""
    runs = Passes(nn.Sequential(*(nn.Identity() for _ in range(calls))), Inputs(None), backward=False)
    watch = Stopwatch(["", *map(str, range(calls))])
    session = Session(runs.model, [watch], other_threads="ignore")
    bare: list[float] = []
    stamped: list[float] = []
    for _ in range(rounds):  # the minimum counts, so the first, which builds the index of modules, does not
        bare.append(runs.once().forward_s)
        watch.restart()
        with session:
            stamped.append(runs.once().forward_s)
    return max(min(stamped) - min(bare), 0.0) / calls


def _backward_stamp_cost(calls: int = 200, rounds: int = 7) -> float:
    """Measure the overhead of observing the backward of a call, on modules that do nothing."""
    with torch.inference_mode(False):
        x = torch.zeros(1, requires_grad=True)
        runs = Passes(nn.Sequential(*(_TimedCall() for _ in range(calls))), Inputs(x), backward=True)
        bare: list[float] = []
        watched: list[float] = []
        for _ in range(rounds):
            bare.append(runs.once().backward_s)
            watch = _BackwardWatch()
            with Session(runs.model, [watch], other_threads="ignore"):
                runs.once()
            watched.append(watch.seconds)
    return max(min(watched) - min(bare), 0.0) / calls
