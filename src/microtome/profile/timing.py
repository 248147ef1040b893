"""How long each call takes on a CPU: passes with two time stamps a call, beside bare ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import Any

import torch
from torch import nn

from microtome.engine import Call, Probe, Session, tensors_in
from microtome.engine.standin import stand_in
from microtome.errors import BadQuery, Unsupported
from microtome.inputs import Inputs
from microtome.measure.environment import environment
from microtome.measure.spread import Spread, spreads

#: Told how many passes are done and how many there will be, if that is known.
Progress = Callable[[int, int | None], None]

_WARM_UP_MOST = 20
_STABLE = 0.03


@dataclass(frozen=True, slots=True)
class Timing:
    """How the times of a profile were measured.

    Attributes:
        bare: Seconds of a whole pass without time stamps, run in turns with the others.
        ratio: A pass with time stamps over a bare one, the medians.
        stamp_s: What the stamps of a call take, measured on modules that do nothing; it is taken off the calls around.
        warmups: How many passes were made before.
        environment: The machine and the software.
    """

    bare: Spread
    ratio: float
    stamp_s: float
    warmups: int
    environment: dict[str, str]


class _Stopwatch(Probe):
    """Notes when each call began and ended, in the order they began. Nothing else happens in it."""

    def __init__(self, calls: int) -> None:
        self.begins = [0] * calls
        self.ends = [0] * calls
        self.count = 0
        self._open: list[int] = []

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = self.count
        self.count = at + 1
        self._open.append(at)
        if at < len(self.begins):
            self.begins[at] = perf_counter_ns()

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        at = self._open.pop()
        if at < len(self.ends):
            self.ends[at] = perf_counter_ns()


def time_calls(
    model: nn.Module,
    inputs: Inputs,
    descendants: list[int],
    *,
    repeat: int = 30,
    budget_s: float = 20.0,
    progress: Progress | None = None,
) -> tuple[list[Spread], Timing]:
    """The seconds that each call of the forward takes, with all calls inside it, in the order they begin.

    Args:
        descendants: Of each call, how many calls lie inside it.
        repeat: How many passes to make, fewer where the budget is used up before.
    """
    _check(model, inputs, repeat, budget_s)
    calls = len(descendants)
    with stand_in(model, inputs, "real") as given, _no_garbage_collection():
        warmups = _warm_up(model, given, budget_s)
        bare: list[float] = []
        stamped: list[float] = []
        table: list[list[int]] = []
        watch = _Stopwatch(calls)
        session = Session(model, [watch])
        with session:
            _seconds(model, given)  # it looks up the modules once
        began = perf_counter()
        for done in range(repeat):
            if progress is not None:
                progress(done, repeat)
            bare.append(_seconds(model, given))
            watch.count = 0
            with session:
                stamped.append(_seconds(model, given))
            if watch.count != calls:
                raise Unsupported(f"a pass made {watch.count} calls, and another {calls}: their times have no order")
            table.append([end - begin for begin, end in zip(watch.begins, watch.ends, strict=True)])
            if perf_counter() - began > budget_s and len(bare) >= 3:
                break
    stamp_s = _stamp_cost()
    seconds = torch.tensor(table, dtype=torch.float64) / 1e9 - stamp_s * torch.tensor(descendants, dtype=torch.float64)
    timing = Timing(
        bare=spreads(torch.tensor(bare)[:, None])[0],
        ratio=median(stamped) / median(bare),
        stamp_s=stamp_s,
        warmups=warmups,
        environment=environment(),
    )
    return spreads(seconds), timing


def _check(model: nn.Module, inputs: Inputs, repeat: int, budget_s: float) -> None:
    if repeat < 3:
        raise BadQuery(f"a spread needs 3 passes or more: repeat is {repeat}")
    if budget_s <= 0:
        raise BadQuery(f"the budget is a time in seconds above 0, got {budget_s}")
    tensors = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
    other = sorted({tensor.device.type for tensor in tensors} - {"cpu"})
    if other:
        raise Unsupported(f"times are measured on the CPU, and there are tensors on {', '.join(other)}")


def _warm_up(model: nn.Module, inputs: Inputs, budget_s: float) -> int:
    """Run until two passes in a row take about the same."""
    last, began = _seconds(model, inputs), perf_counter()
    for done in range(2, _WARM_UP_MOST + 1):
        now = _seconds(model, inputs)
        if abs(now - last) <= _STABLE * last or perf_counter() - began > budget_s / 4:
            return done
        last = now
    return _WARM_UP_MOST


def _seconds(model: nn.Module, inputs: Inputs) -> float:
    began = perf_counter()
    inputs.run(model)
    return perf_counter() - began


def _stamp_cost(calls: int = 200, rounds: int = 7) -> float:
    """What a call with stamps takes more than one without, on modules that do nothing."""
    model, given = nn.Sequential(*(nn.Identity() for _ in range(calls))), Inputs(None)
    watch = _Stopwatch(calls + 1)
    session = Session(model, [watch])
    bare: list[float] = []
    stamped: list[float] = []
    for _ in range(rounds):  # the least counts, so that the first, which looks up the modules, does not
        bare.append(_seconds(model, given))
        watch.count = 0
        with session:
            stamped.append(_seconds(model, given))
    return max(min(stamped) - min(bare), 0.0) / calls


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
