"""Which call lies in which, by index."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from microtome.addresses import unnumbered
from microtome.engine.selectors import Selector
from microtome.results.rows import Row


class CallTree:
    """The calls of a profile that are looked at when it is measured.

    Args:
        depth: How deep to look. A module that runs deeper too is looked at there as well.

    Attributes:
        rows: The rows of the calls, in the order they begin.
        at: The index of each in all rows of the profile.
        paths: The paths of their modules.
        parents: Of each call, the index of the nearest that contains it; None for the root.
        addresses: The index of the call at each `Call.address`, or of the nearest that contains that.
    """

    def __init__(self, rows: Sequence[Row], depth: int | None = None) -> None:
        self.paths = {row.path for row in rows if depth is None or row.depth <= depth}
        self.at = [index for index, row in enumerate(rows) if row.path in self.paths]
        self.rows = [rows[index] for index in self.at]
        self.addresses: dict[str, int] = {}
        self.parents: list[int | None] = []
        for row in rows:
            above = None if row.parent is None else self.addresses[unnumbered(row.parent)]
            if row.path in self.paths:
                self.addresses[unnumbered(row.address)] = len(self.parents)
                self.parents.append(above)
            else:
                assert above is not None  # the root is looked at
                self.addresses[unnumbered(row.address)] = above

    @property
    def order(self) -> list[str]:
        """The addresses as `Call.address` gives them, in the order the calls begin."""
        return [unnumbered(row.address) for row in self.rows]

    def leaves(self) -> list[int]:
        """The calls that no other of them lies in."""
        above = set(self.parents)
        return [index for index in range(len(self)) if index not in above]

    def __len__(self) -> int:
        return len(self.rows)

    def selector(self) -> Selector | None:
        """What names their modules; None where those are all that run."""
        return None if len(self.addresses) == len(self) else lambda path, _: path in self.paths

    def inside(self) -> list[int]:
        """Of each call, how many calls lie inside it."""
        counts = torch.ones(1, len(self), dtype=torch.float64)
        return [int(count) - 1 for count in self.inclusive(counts)[0]]

    def stamped(self) -> list[float]:
        """Of each call, how many others had their time stamps taken when it ended: one that was open, half of them."""
        above: list[int] = []
        for parent in self.parents:
            above.append(0 if parent is None else above[parent] + 1)
        return [at + inside - above[at] / 2 for at, inside in enumerate(self.inside())]

    def inclusive(self, own: torch.Tensor) -> torch.Tensor:
        """From what each call took itself, a row for each pass, what it took with all calls inside it."""
        columns = list(own.unbind(1))
        for index in reversed(range(len(self))):  # what is inside a call begins after it
            if (parent := self.parents[index]) is not None:
                columns[parent] = columns[parent] + columns[index]
        return torch.stack(columns, 1)

    def own(self, inclusive: Sequence[float]) -> list[float]:
        """What is left of each without the calls inside it."""
        own = list(inclusive)
        for index, parent in enumerate(self.parents):
            if parent is not None:
                own[parent] -= inclusive[index]
        return own

    def own_known(self, inclusive: Sequence[float | None]) -> list[float | None]:
        """The same where some are not known; what is left of those, and of what contains them, is not either."""
        own = self.own([math.nan if value is None else value for value in inclusive])
        return [None if math.isnan(value) else value for value in own]

    def known_sums(self, own: Sequence[float | None]) -> list[float | None]:
        """What each took with all calls inside it, of what is known; None where nothing is."""
        sums = list(own)
        for index in reversed(range(len(self))):
            parent = self.parents[index]
            if parent is not None and (inside := sums[index]) is not None:
                sums[parent] = (sums[parent] or 0.0) + inside
        return sums

    def peaks(self, own: Sequence[int]) -> list[int]:
        """The most of each call and those inside it."""
        most = list(own)
        for index in reversed(range(len(self))):
            if (parent := self.parents[index]) is not None:
                most[parent] = max(most[parent], most[index])
        return most
