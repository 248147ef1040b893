"""A thread that writes, behind a queue that is bounded in bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    @property
    def held_bytes(self) -> int: ...


Item = TypeVar("Item", bound=Sized)


class Writer(Generic[Item]):
    """Writes items one after the other; the first error ends the thread and is kept.

    Args:
        write: Called in the thread.

    Attributes:
        pending_bytes: What the items hold that are not written yet, the one being written included.
        error: Why writing ended.
    """

    def __init__(self, write: Callable[[Item], None]) -> None:
        self.pending_bytes = 0
        self.error: Exception | None = None
        self._write = write
        self._queue: deque[Item] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="microtome-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs: not in a process that was forked from the one it was made in."""
        return self._thread.is_alive()

    def put(self, item: Item) -> None:
        with self._changed:
            if self.error is None:
                self._queue.append(item)
                self.pending_bytes += item.held_bytes
                self._changed.notify_all()

    def wait_until(self, pending_bytes: int) -> None:
        """Wait until no more than that is pending, or writing has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.pending_bytes <= pending_bytes or not self.alive)

    def drain(self) -> None:
        """Wait until everything is written, or writing has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or not self.alive)

    def stop(self) -> None:
        """Let the thread write what is queued and end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    return
                item = self._queue[0]
            try:
                self._write(item)
            except Exception as error:  # noqa: BLE001  whoever adds next is told
                with self._changed:
                    self.error = error
                    self._queue.clear()
                    self.pending_bytes = 0
                    self._changed.notify_all()
                return
            with self._changed:
                self._queue.popleft()
                self.pending_bytes -= item.held_bytes
                self._changed.notify_all()
            del item  # its memory, before the wait for the next
