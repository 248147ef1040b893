"""A thread that writes, behind a queue that is bounded in bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    @property
    def held_bytes(self) -> int: ...


Item = TypeVar("Item", bound=Sized)


class Task:
    """Something to do once."""

    def __init__(self, what: Callable[[], None]) -> None:
        self._what = what
        self.is_begun = False
        self.error: BaseException | None = None

    def do(self) -> None:
        try:
            self._what()
        except BaseException as error:  # noqa: BLE001  whose task it is, is told
            self.error = error


def _nothing() -> None: ...


class Writer(Generic[Item]):
    """Writes items one after the other; the first error ends the thread and is kept.

    Args:
        write: Called in the thread with an item and a function to call when all is left to the system, during which
            other threads can run. A second time with the same item where `put_here` was interrupted.

    Attributes:
        pending_bytes: What the items hold that are not written yet, the one being written included.
        error: Why writing ended.
    """

    def __init__(self, write: Callable[[Item, Callable[[], None]], None]) -> None:
        self.pending_bytes = 0
        self.error: BaseException | None = None
        self._write = write
        self._queue: deque[Item] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._task: Task | None = None
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

    def put_here(self, item: Item, meanwhile: Callable[[], None]) -> None:
        """Write an item in the caller's thread, after those that are queued, and do something in the other meanwhile.

        When this has returned both are done, or writing has failed. It is done this way round since a thread that comes
        back from the system waits for the interpreter while another runs many small operators, mostly until that ends.
        """
        self.drain()
        if self.error is not None:
            return
        task, lost = Task(meanwhile), list[BaseException]()
        try:
            self._write_here(item, partial(self._begin, task), lost)
        finally:
            self._begin(task)
            self._wait(lambda: self._task is None)
            if lost:
                self._fail(lost[0])
                self._thread.join()
        if task.error is not None:
            raise task.error

    def _write_here(self, item: Item, begun: Callable[[], None], lost: list[BaseException]) -> None:
        """Write an item, or put into `lost` why it is not written."""
        try:
            self._write(item, begun)
        except Exception as error:  # noqa: BLE001  whoever asks is told, as of those in the thread
            lost.append(error)
        except BaseException:  # an interrupt, which does not end the recording
            try:
                self._write(item, begun)
            except BaseException as error:  # noqa: BLE001
                lost.append(error)
            raise

    def _begin(self, task: Task) -> None:
        with self._changed:
            if not task.is_begun:
                task.is_begun = True
                self._task = task
                self._changed.notify_all()

    def wait_until(self, pending_bytes: int) -> None:
        """Wait until no more than that is pending, or writing has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.pending_bytes <= pending_bytes or not self.alive)

    def drain(self) -> None:
        """Wait until everything is written, or writing has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or not self.alive)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait, also when interrupted: else who is interrupted would find that something is still at work."""
        with self._changed:
            try:
                self._changed.wait_for(until)
            except BaseException:
                self._changed.wait_for(until)
                raise

    def stop(self) -> None:
        """Let the thread write what is queued and end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._task or self._stopping)
                task, item = self._task, self._queue[0] if self._queue else None
            if task is not None:
                task.do()
                with self._changed:
                    self._task = None
                    self._changed.notify_all()
            elif item is None or not self._written(item):
                return
            del task, item  # its memory, before the wait for the next

    def _written(self, item: Item) -> bool:
        try:
            self._write(item, _nothing)
        except Exception as error:  # noqa: BLE001  whoever adds next is told
            self._fail(error)
            return False
        with self._changed:
            self._queue.popleft()
            self.pending_bytes -= item.held_bytes
            self._changed.notify_all()
        return True

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = error
            self._stopping = True
            self._queue.clear()
            self.pending_bytes = 0
            self._changed.notify_all()
