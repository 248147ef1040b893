"""How long the host takes for each call: passes with two time stamps a call, beside bare ones."""

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
from microtome.inputs import Inputs
from microtome.profile.call_tree import CallTree
from microtome.profile.repeats import Passes, Schedule, check_calls
from microtome.results.methods import Timing

METHOD = "two time stamps a call; the least cost of stamps is taken off"
BACKWARD_METHOD = "a time stamp wherever the backward goes from one call to another"


class Stopwatch(Probe):
    """Notes when each call began and ended, in the order they began. Nothing else happens in it."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self.begins = [0] * len(addresses)
        self.ends = [0] * len(addresses)
        self.restart()

    def restart(self) -> None:
        """A new pass begins."""
        self._calls: list[Call] = []
        self._open: list[int] = []

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.phase != "forward":
            return
        at = len(self._calls)
        self._calls.append(call)
        self._open.append(at)
        if at < len(self.begins):
            self.begins[at] = perf_counter_ns()

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call.phase != "forward":
            return
        at = self._open.pop()
        if at < len(self.ends):
            self.ends[at] = perf_counter_ns()

    def fail(self, call: Call, error: BaseException) -> None:  # which the model may catch
        self.exit(call, (), {}, None)

    def durations(self) -> list[int]:
        """Nanoseconds of each call, if the pass made the calls that it is to make."""
        check_calls([call.address for call in self._calls], self._addresses)
        return [end - begin for begin, end in zip(self.begins, self.ends, strict=True)]

    def until(self) -> list[int]:
        """Nanoseconds from the beginning of the run to the end of each call."""
        return [end - self.begins[0] for end in self.ends]


class _BackwardWatch(Probe):
    """Notes when the backward goes over to another call, those that run again in it included."""

    def __init__(self) -> None:
        self.events: list[tuple[Call | None, int]] = []
        self._at: Call | None = None
        self._before: list[Call | None] = []
        self._forwards = 0

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.phase == "recompute":
            self._before.append(self._at)
            self.backward_moves(call)
        else:
            self._forwards += 1

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call.phase == "recompute":
            self.backward_moves(self._before.pop())
        else:
            self._forwards -= 1

    def fail(self, call: Call, error: BaseException) -> None:  # how a checkpoint ends early
        self.exit(call, (), {}, None)

    def backward_moves(self, call: Call | None) -> None:
        if not self._forwards:  # one that a forward runs is part of that
            self._at = call
            self.events.append((call, perf_counter_ns()))

    @property
    def seconds(self) -> float:
        """From the first of it to the end."""
        return (self.events[-1][1] - self.events[0][1]) / 1e9 if self.events else 0.0

    def own(self, tree: CallTree, stamp_s: float) -> list[float]:
        """The seconds of each call's own backward; nobody's are the root's."""
        seconds = [0.0] * len(tree)
        for (call, begin), (_, end) in pairwise(self.events):
            seconds[0 if call is None else tree.addresses[call.address]] += (end - begin) / 1e9 - stamp_s
        return seconds


class HostTimes(NamedTuple):
    """Seconds, a row for each pass, a column for each call.

    Attributes:
        calls: What each call took with all calls inside it.
        until: From the beginning of the run to the end of each call.
    """

    calls: torch.Tensor
    until: torch.Tensor


def time_forward(runs: Passes, tree: CallTree, schedule: Schedule) -> tuple[HostTimes, Timing]:
    """How long calls took, and how that was found."""
    warmups = runs.warm_up(schedule)
    bare: list[float] = []
    stamped: list[float] = []
    table: list[list[int]] = []
    until: list[list[int]] = []
    watch = Stopwatch(tree.order)
    session = runs.session(watch, tree)
    alone = runs.forward_alone()
    grad = torch.is_grad_enabled() or runs.backward
    with session, torch.set_grad_enabled(grad):
        alone.once()  # it looks up the modules once
    for _ in schedule.rounds("timing"):
        with torch.set_grad_enabled(grad):
            bare.append(alone.once().forward_s)
            watch.restart()
            with session:
                stamped.append(alone.once().forward_s)
        table.append(watch.durations())
        until.append(watch.until())
    stamp_s = _stamp_cost()
    seconds, ends = (torch.tensor(stamps, dtype=torch.float64) / 1e9 for stamps in (table, until))
    seconds -= stamp_s * torch.tensor(tree.inside(), dtype=torch.float64)
    ends -= stamp_s * torch.tensor(tree.stamped(), dtype=torch.float64)
    timing = Timing(
        bare=spreads(torch.tensor(bare)[:, None], "bare passes")[0],
        ratio=median(stamped) / median(bare),
        stamp_s=stamp_s,
        warmups=warmups,
        fast_paths=runs.fast_paths,
    )
    return HostTimes(seconds, ends), timing


def time_backward(runs: Passes, tree: CallTree, schedule: Schedule, timing: Timing) -> tuple[torch.Tensor, Timing]:
    """The seconds of each call's own backward, a row for each pass; and how it was done."""
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
    """Makes one node of autograd and computes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


def _stamp_cost(calls: int = 200, rounds: int = 7) -> float:
    """What a call with stamps takes more than one without, on modules that do nothing."""
    runs = Passes(nn.Sequential(*(nn.Identity() for _ in range(calls))), Inputs(None), backward=False)
    watch = Stopwatch(["", *map(str, range(calls))])
    session = Session(runs.model, [watch], other_threads="unseen")
    bare: list[float] = []
    stamped: list[float] = []
    for _ in range(rounds):  # the least counts, so that the first, which looks up the modules, does not
        bare.append(runs.once().forward_s)
        watch.restart()
        with session:
            stamped.append(runs.once().forward_s)
    return max(min(stamped) - min(bare), 0.0) / calls


def _backward_stamp_cost(calls: int = 200, rounds: int = 7) -> float:
    """What the backward of a call takes more when it is watched, where it computes nothing."""
    with torch.inference_mode(False):
        x = torch.zeros(1, requires_grad=True)
        runs = Passes(nn.Sequential(*(_TimedCall() for _ in range(calls))), Inputs(x), backward=True)
        bare: list[float] = []
        watched: list[float] = []
        for _ in range(rounds):
            bare.append(runs.once().backward_s)
            watch = _BackwardWatch()
            with Session(runs.model, [watch], other_threads="unseen"):
                runs.once()
            watched.append(watch.seconds)
    return max(min(watched) - min(bare), 0.0) / calls
