"""Bounds on the bytes that a server holds for its clients."""

from __future__ import annotations

import asyncio
import threading
from collections import deque


class BytePool:
    """Reserve bytes of a bounded total, first come, first served. For one event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_contended(self) -> bool:
        """Whether somebody waits for room."""
        return bool(self._waiting)

    async def take(self, nbytes: int) -> None:
        """Wait until there is room; one request alone always has it."""
        if not self._waiting and self._fits(nbytes):
            self.held += nbytes
            return
        entry = nbytes, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry[1].cancelled() or not entry[1].done():
                self._waiting.remove(entry)
            else:  # it was given room as it was cancelled
                self.held -= nbytes
            self._admit()
            raise

    def give_back(self, nbytes: int) -> None:
        self.held -= nbytes
        self._admit()

    def _fits(self, nbytes: int) -> bool:
        return not self.held or self.held + nbytes <= self.most

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            nbytes, future = self._waiting[0]
            if future.done():  # cancelled: it removes itself
                return
            self._waiting.popleft()
            self.held += nbytes
            future.set_result(None)


class ReplyBudget:
    """Count the bytes of replies that are not yet written; while there are too many, workers wait. For any thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def is_full(self) -> bool:
        return self.held > self.most

    def add(self, nbytes: int) -> None:
        with self._changed:
            self.held += nbytes

    def drop(self, nbytes: int) -> None:
        """Count a reply no more: it was written, or its call has ended."""
        with self._changed:
            self.held -= nbytes
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self.is_full)

    def close(self) -> None:
        """Wake all that wait for room."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
