"""Numbers of the runs of a model."""

from __future__ import annotations

import itertools
import threading


class RunNumbers(threading.local):
    """Number runs in the order in which they begin, and tell which one is open in the current thread.

    Args:
        counter: Shared by all threads.
    """

    def __init__(self, counter: itertools.count[int]) -> None:
        self._counter = counter
        self._open: list[int] = []

    @property
    def current(self) -> int | None:
        return self._open[-1] if self._open else None

    def begin(self) -> None:
        self._open.append(next(self._counter))

    def end(self) -> None:
        if self._open:
            self._open.pop()
