"""The tree of measured calls, by index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import add
from typing import TypeVar

import torch

from microtome.addresses import strip_first_index
from microtome.engine.selectors import Selector
from microtome.results.rows import Row

T = TypeVar("T")


class CallTree:
    """The measured calls of a profile.

    Args:
        depth: The maximum depth. A module that also runs deeper is measured there as well.

    Attributes:
        rows: The rows of the calls, in the order they begin.
        row_indices: The index of each in all rows of the profile.
        paths: The paths of their modules.
        parents: The index of the nearest measured call that contains each; None for the root.
        addresses: The index of the call at each `Call.address`, or of the nearest measured call that contains it.
    """

    def __init__(self, rows: Sequence[Row], depth: int | None = None) -> None:
        self.paths = {row.path for row in rows if depth is None or row.depth <= depth}
        self.row_indices = [index for index, row in enumerate(rows) if row.path in self.paths]
        self.rows = [rows[index] for index in self.row_indices]
        self.addresses: dict[str, int] = {}
        self.parents: list[int | None] = []
        for row in rows:
            above = None if row.parent is None else self.addresses[strip_first_index(row.parent)]
            if row.path in self.paths:
                self.addresses[strip_first_index(row.address)] = len(self.parents)
                self.parents.append(above)
            else:
                assert above is not None  # the root is always measured
                self.addresses[strip_first_index(row.address)] = above

    @property
    def order(self) -> list[str]:
        """The addresses as `Call.address` gives them, in the order the calls begin."""
        return [strip_first_index(row.address) for row in self.rows]

    def leaves(self) -> list[int]:
        """Return the calls without measured calls inside."""
        parents = set(self.parents)
        return [index for index in range(len(self)) if index not in parents]

    def __len__(self) -> int:
        return len(self.rows)

    def selector(self) -> Selector | None:
        """Return a selector of their modules; None if these are all that run."""
        return None if len(self.addresses) == len(self) else lambda path, _: path in self.paths

    def inside(self) -> list[int]:
        """Return the number of calls inside each call."""
        return [count - 1 for count in self._fold([1] * len(self), add)]

    def stamp_counts(self) -> list[float]:
        """Return the number of calls whose time stamps were taken before each call ended; an open call counts half."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent is None else depths[parent] + 1)
        return [index + inside - depths[index] / 2 for index, inside in enumerate(self.inside())]

    def inclusive(self, own: torch.Tensor) -> torch.Tensor:
        """Sum the own amounts of each call and the calls inside it, for each row."""
        return torch.stack(self._fold(own.unbind(1), add), 1)

    def known_sums(self, own: Sequence[float | None]) -> list[float | None]:
        """Sum the known amounts of each call and the calls inside it; None if none is known."""
        return self._fold(own, lambda outer, inner: outer if inner is None else (outer or 0.0) + inner)

    def peaks(self, own: Sequence[int]) -> list[int]:
        """Return the maximum over each call and the calls inside it."""
        return self._fold(own, max)

    def _fold(self, own: Sequence[T], combine: Callable[[T, T], T]) -> list[T]:
        """Combine the value of each call with those of the calls inside it."""
        folded = list(own)
        for index in reversed(range(len(self))):  # calls inside a call begin after it
            if (parent := self.parents[index]) is not None:
                folded[parent] = combine(folded[parent], folded[index])
        return folded

    def own(self, inclusive: Sequence[float]) -> list[float]:
        """Subtract the amounts of the calls inside from that of each call."""
        own = list(inclusive)
        for index, parent in enumerate(self.parents):
            if parent is not None:
                own[parent] -= inclusive[index]
        return own

    def own_known(self, inclusive: Sequence[float | None]) -> list[float | None]:
        """Subtract as `own` does; None for unknown amounts, and for the calls that contain them."""
        own = self.own([math.nan if value is None else value for value in inclusive])
        return [None if math.isnan(value) else value for value in own]
