"""Write parts and batches in a background thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from microtome.capture.store.batch import Batch, ShardPart

Item = ShardPart | Batch


class Task:
    """A function to run once in the thread."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self.is_submitted = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001  `put_here` raises it
            self.error = error


class WriterThread:
    """Writes items in order in a background thread; the first error ends it and is kept.

    It is no `ThreadPoolExecutor`, which accepts nothing once the interpreter shuts down: an `atexit` handler may close
    a recording.

    Args:
        write: Called in the thread with an item, and a function to call right before the system call, during which
            other threads can run. Called again with the same item if `put_here` was interrupted.

    Attributes:
        pending_bytes: The memory of items that are not written yet, including the one being written.
        error: The error that ended the thread.
    """

    def __init__(self, write: Callable[[Item, Callable[[], None]], None]) -> None:
        self.pending_bytes = 0
        self.error: BaseException | None = None
        self._write = write
        self._queue: deque[Item] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._task: Task | None = None
        self._process = os.getpid()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="microtome-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; it does not in a forked process.

        Not by `Thread.is_alive`, which, interrupted by a signal, takes a running thread for stopped from then on
        (CPython 3.11 and 3.12).
        """
        return not self._has_ended and self._process == os.getpid()

    def put(self, item: Item) -> None:
        with self._changed:
            if self.error is None:
                self._queue.append(item)
                self.pending_bytes += item.buffered_bytes
                self._changed.notify_all()

    def put_here(self, item: Item, meanwhile: Callable[[], None]) -> None:
        """Write an item in the caller's thread, after the queued ones, and run a function in the other meanwhile.

        Both are complete when this returns, unless writing has failed. It is this way round because a thread that
        returns from a system call waits for the interpreter lock while another runs many small operators, mostly until
        that ends.
        """
        self.drain()
        if self.error is not None:
            return
        task, errors = Task(meanwhile), list[BaseException]()
        try:
            self._write_here(item, partial(self._submit, task), errors)
        finally:
            self._submit(task)
            self._wait_for(lambda: self._task is None)
            if errors:
                self._fail(errors[0])
                self._thread.join()
        if task.error is not None:
            raise task.error

    def _write_here(self, item: Item, on_io: Callable[[], None], errors: list[BaseException]) -> None:
        """Write an item; append the error to `errors` if it is not written."""
        try:
            self._write(item, on_io)
        except Exception as error:  # noqa: BLE001  kept, as those in the thread are
            errors.append(error)
        except BaseException:  # an interrupt, which does not end the recording
            try:
                self._write(item, on_io)
            except BaseException as error:  # noqa: BLE001
                errors.append(error)
            raise

    def _submit(self, task: Task) -> None:
        with self._changed:
            if not task.is_submitted:
                task.is_submitted = True
                self._task = task
                self._changed.notify_all()

    def wait_until(self, pending_bytes: int) -> None:
        """Wait until no more bytes than that are pending, or writing has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.pending_bytes <= pending_bytes or not self.alive)

    def drain(self) -> None:
        """Wait until everything is written, or writing has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or not self.alive)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait, even if interrupted: otherwise the task would still run when the interrupt is handled."""
        with self._changed:
            try:
                self._changed.wait_for(condition)
            except BaseException:
                self._changed.wait_for(condition)
                raise

    def stop(self) -> None:
        """Let the thread write what is queued and end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write_queued()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _write_queued(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._task or self._stopping)
                task, item = self._task, self._queue[0] if self._queue else None
            if task is not None:
                task.run()
                with self._changed:
                    self._task = None
                    self._changed.notify_all()
            elif item is None or not self._try_write(item):
                return
            del task, item  # free its memory before waiting for the next

    def _try_write(self, item: Item) -> bool:
        try:
            self._write(item, lambda: None)
        except Exception as error:  # noqa: BLE001  the next `add` raises it
            self._fail(error)
            return False
        with self._changed:
            self._queue.popleft()
            self.pending_bytes -= item.buffered_bytes
            self._changed.notify_all()
        return True

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = error
            self._stopping = True
            self._queue.clear()
            self.pending_bytes = 0
            self._changed.notify_all()
