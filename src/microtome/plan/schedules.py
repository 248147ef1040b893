"""Schedules of a pipeline in training, and the time of a step under one.

The order of the actions is that of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple


class Action(NamedTuple):
    """The forward or the backward of a micro-batch in a stage."""

    is_backward: bool
    micro_batch: int


class TimedAction(NamedTuple):
    """An action in time."""

    action: Action
    begin_s: float
    end_s: float


class Transfer(NamedTuple):
    """The transfers from a stage to the next and back, for each micro-batch.

    Attributes:
        forward_s: The seconds for which the activations occupy the link; `backward_s`: their gradients.
        delay_s: The seconds that a message takes in addition, one way.
    """

    forward_s: float
    backward_s: float
    delay_s: float


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards."""
    return [Action(is_backward, index) for is_backward in (False, True) for index in range(micro_batches)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """As many forwards as stages are left, then a backward and a forward in turn.

    >>> [f"{'FB'[action.is_backward]}{action.micro_batch}" for action in one_forward_one_backward(0, 2, 4)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'F3', 'B2', 'B3']
    """
    ahead = in_flight("1f1b", stage, stages, micro_batches)
    turns = ((Action(True, index - ahead), Action(False, index)) for index in range(ahead, micro_batches))
    warmup = (Action(False, index) for index in range(ahead))
    cooldown = (Action(True, index) for index in range(micro_batches - ahead, micro_batches))
    return [*warmup, *chain.from_iterable(turns), *cooldown]


_ORDERS: dict[str, Callable[[int, int, int], list[Action]]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Return the most micro-batches whose activations a stage holds at once."""
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)


def run_schedule(
    schedule: str,
    micro_batches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfers: Sequence[Transfer],
    ready_s: Sequence[float] | None = None,
) -> list[list[TimedAction]]:
    """Return when each stage runs what, each on a device of its own; a step ends with the last slot.

    An action starts once the one before it on its device has ended and its tensors have arrived. A link sends one
    message at a time in each direction, while the devices compute.

    Args:
        forward_s: Seconds of a micro-batch in each stage.
        transfers: Those from each stage to the next.
        ready_s: When each micro-batch is on the first device; None: at once.

    >>> slots = run_schedule("gpipe", 2, [1.0, 1.0], [2.0, 2.0], [Transfer(0.0, 0.0, 0.0)])
    >>> max(slot.end_s for stage in slots for slot in stage)            # (2 + 2 - 1) * (1 + 2)
    9.0
    """
    return _ScheduleRun(schedule, micro_batches, forward_s, backward_s, transfers).run(ready_s or [0.0] * micro_batches)


class _ScheduleRun:
    """A simulated step of a pipeline."""

    def __init__(
        self,
        schedule: str,
        micro_batches: int,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        transfers: Sequence[Transfer],
    ) -> None:
        self._stages = len(forward_s)
        self._orders = [_ORDERS[schedule](stage, self._stages, micro_batches) for stage in range(self._stages)]
        self._seconds = (forward_s, backward_s)
        self._transfers = transfers
        self._arrivals: dict[tuple[int, Action], float] = {}
        self._links_free_s: dict[tuple[int, bool], float] = {}
        self._slots: list[list[TimedAction]] = [[] for _ in range(self._stages)]

    def run(self, ready_s: Sequence[float]) -> list[list[TimedAction]]:
        for index, seconds in enumerate(ready_s):
            self._arrivals[0, Action(False, index)] = seconds
        while any(len(slots) < len(order) for slots, order in zip(self._slots, self._orders, strict=True)):
            for stage in range(self._stages):
                self._advance(stage)
        return self._slots

    def _advance(self, stage: int) -> None:
        """Run the actions of a stage until one whose tensors were not sent yet."""
        slots, order = self._slots[stage], self._orders[stage]
        while len(slots) < len(order):
            action = order[len(slots)]
            arrived_s = self._arrivals.get((stage, action))
            if arrived_s is None:
                return
            begin_s = max(arrived_s, slots[-1].end_s) if slots else arrived_s
            end_s = begin_s + self._seconds[action.is_backward][stage]
            slots.append(TimedAction(action, begin_s, end_s))
            self._send(stage, action, end_s)

    def _send(self, stage: int, action: Action, now_s: float) -> None:
        if not action.is_backward and stage == self._stages - 1:
            self._arrivals[stage, Action(True, action.micro_batch)] = now_s
            return
        target = stage - 1 if action.is_backward else stage + 1
        if target < 0:
            return
        transfer = self._transfers[min(stage, target)]
        link = (min(stage, target), action.is_backward)
        sent_s = max(now_s, self._links_free_s.get(link, 0.0))
        sent_s += transfer.backward_s if action.is_backward else transfer.forward_s
        self._links_free_s[link] = sent_s
        self._arrivals[target, action] = sent_s + transfer.delay_s
