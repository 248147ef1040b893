"""The open runs of a recorder, by thread."""

from __future__ import annotations

import itertools
import threading


class OpenRuns(threading.local):
    """The numbers of the open runs of this thread, which follow the order in which runs begin.

    Args:
        counter: Shared by all threads.
    """

    def __init__(self, counter: itertools.count[int]) -> None:
        self._counter = counter
        self._open: list[int] = []

    @property
    def current(self) -> int | None:
        return self._open[-1] if self._open else None

    def begin(self) -> int:
        self._open.append(next(self._counter))
        return self._open[-1]

    def end(self) -> int | None:
        """Return the number of the run that ends; None if none is open."""
        return self._open.pop() if self._open else None
