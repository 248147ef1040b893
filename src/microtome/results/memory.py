"""The memory of a run, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["parameter", "buffer", "input", "constant", "op", "rest"]


@dataclass(frozen=True, slots=True)
class Alive:
    """Memory that is in use at the peak.

    Attributes:
        kind: `"op"` if an operator made it, else the kind of value; `"rest"` for all that are not listed.
        name: The address of the call that made it; of an input its name; empty for several.
        count: The number of storages. All parameters are one entry, and so are all buffers.
    """

    kind: Kind
    name: str
    nbytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory of a run, operator by operator, weights and inputs included.

    Attributes:
        live_bytes: Bytes that are alive while each operator runs.
        calls: The index of the row whose code ran each operator; in the backward, of the row that it belongs to.
        forward: The number of operators of the forward; those of the backward follow.
        alive: The values that are alive at the peak, the largest first.
    """

    live_bytes: tuple[int, ...]
    calls: tuple[int, ...]
    forward: int
    alive: tuple[Alive, ...]

    @property
    def peak(self) -> int | None:
        """The index of the operator at the peak; None where none ran."""
        return max(range(len(self.live_bytes)), key=self.live_bytes.__getitem__, default=None)

    def check(self, rows: int) -> None:
        """Raise if it is not the timeline of a profile with so many rows."""
        if len(self.calls) != len(self.live_bytes) or not 0 <= self.forward <= len(self.calls):
            raise ValueError(f"expected a row for each of {len(self.live_bytes)} operators, got {len(self.calls)}")
        if outside := [at for at in self.calls if not 0 <= at < rows]:
            raise ValueError(f"expected operators of {rows} rows, got one of row {outside[0]}")
