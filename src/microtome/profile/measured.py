"""The measured half of a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from microtome.inputs import Inputs
from microtome.profile.data import Row
from microtome.profile.timing import Timing, time_calls


def timed(rows: tuple[Row, ...], model: nn.Module, inputs: Inputs, **options: Any) -> tuple[tuple[Row, ...], Timing]:
    """The rows with their times. What a call takes itself is what is left of it without the calls inside."""
    at = {row.address: index for index, row in enumerate(rows)}
    children: list[list[int]] = [[] for _ in rows]
    for index, row in enumerate(rows):
        if row.parent is not None:
            children[at[row.parent]].append(index)
    descendants = [0] * len(rows)
    for index in reversed(range(len(rows))):
        descendants[index] = sum(1 + descendants[child] for child in children[index])
    spreads, timing = time_calls(model, inputs, descendants, **options)
    whole = [spread.median for spread in spreads]
    own = [whole[index] - sum(whole[child] for child in children[index]) for index in range(len(rows))]
    measured = (
        replace(row, time_s=whole[index], time=spreads[index], own=replace(row.own, time_s=own[index]))
        for index, row in enumerate(rows)
    )
    return tuple(measured), timing
