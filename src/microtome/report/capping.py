"""Cap long tables: keep the first rows, the last and the costliest, and say how many are left out between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Row = TypeVar("Row")

#: The rows that are kept at either end.
_ENDS = 6


def cap(costs: Sequence[float | None], most: int, parents: Sequence[int | None] | None = None) -> list[int]:
    """Return the indices of at most so many rows, the first, the last and the costliest, and of single rows between.

    A single row is as high as the line that would say that it is left out.

    Args:
        costs: The cost of each row; None: unknown.
        parents: The index of the row that contains each, which is kept with it; None: there is none.

    >>> cap([1, 9, 1, 1, 1, 1, 8, 1, 1, 1], 6)
    [0, 1, 2, 6, 7, 8, 9]
    >>> cap([1, 2, 3], 6)
    [0, 1, 2]
    """
    count = len(costs)
    if count <= most:
        return list(range(count))
    ends = min(_ENDS, most // 3)
    kept: set[int] = set()
    costliest = sorted(range(count), key=lambda index: (-(costs[index] or 0), index))
    for index in (*costliest[:ends], *range(count - ends, count), *range(ends), *costliest):
        path = _path(index, parents) - kept
        if len(kept) + len(path) <= most:
            kept |= path
    return [index for index in range(count) if index in kept or {index - 1, index + 1} - {-1, count} <= kept]


def _path(index: int | None, parents: Sequence[int | None] | None) -> set[int]:
    """Return a row and the rows that contain it."""
    path: set[int] = set()
    while index is not None and index not in path:
        path.add(index)
        index = None if parents is None else parents[index]
    return path


def with_gaps(kept: Sequence[int], rows: Sequence[Row], count: int) -> list[Row | int]:
    """Return the kept rows, with the number of rows left out where there are some.

    >>> with_gaps([0, 1, 4], ["a", "b", "c"], 7)
    ['a', 'b', 2, 'c', 2]
    """
    filled: list[Row | int] = []
    following = 0
    for index, row in zip((*kept, count), (*rows, None), strict=True):
        if index > following:
            filled.append(index - following)
        if row is not None:
            filled.append(row)
        following = index + 1
    return filled
