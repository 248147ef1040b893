"""A lock that threads share, and that one thread can have to itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """A shared lock that gives priority to exclusive access."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def upgraded(self) -> Iterator[None]:
        """Exclusive access inside a block of `shared`."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
        try:
            with self.exclusive():
                yield
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self._waiting)
                self._inside += 1

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._inside)
                yield
            finally:
                self._waiting -= 1
                self._changed.notify_all()
