"""The memory of a run, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["parameter", "buffer", "input", "constant", "op", "rest"]


@dataclass(frozen=True, slots=True)
class Alive:
    """Memory that is in use at the peak.

    Attributes:
        kind: What it was made by: `"op"` for an operator, else what it was when the run began; `"rest"` for all that
            are not named.
        name: The address of the call that made it; of an input its place; empty where several are one.
        count: How many pieces of memory. All parameters are one entry, and so are all buffers.
    """

    kind: Kind
    name: str
    nbytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory of a run, operator by operator, weights and inputs included.

    Attributes:
        live_bytes: What lives while each operator runs.
        calls: The row whose code ran each, by its index among the rows; of the backward, the row it belongs to.
        forward: How many of them are of the forward; those of the backward follow.
        alive: What lives while the operator with the most runs, the largest first.
    """

    live_bytes: tuple[int, ...]
    calls: tuple[int, ...]
    forward: int
    alive: tuple[Alive, ...]

    @property
    def peak(self) -> int | None:
        """The operator while which the most lives; None where none ran."""
        return max(range(len(self.live_bytes)), key=self.live_bytes.__getitem__, default=None)

    def check(self, rows: int) -> None:
        """Raise if it is not the timeline of a profile with so many rows."""
        if len(self.calls) != len(self.live_bytes) or not 0 <= self.forward <= len(self.calls):
            raise ValueError(f"expected a row for each of {len(self.live_bytes)} operators, got {len(self.calls)}")
        if outside := [at for at in self.calls if not 0 <= at < rows]:
            raise ValueError(f"expected operators of {rows} rows, got one of row {outside[0]}")
