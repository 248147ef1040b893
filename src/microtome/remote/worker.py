"""The threads of a server that compute: each request in the queue gets a reply, if only an error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import NamedTuple

from microtome.remote import protocol
from microtome.remote.budget import ReplyBudget
from microtome.remote.error_kinds import Draining, Late, TooLarge, as_message
from microtome.remote.logs import ID_CHARS
from microtome.remote.metrics import Metrics
from microtome.remote.served_model import Decoded, ServedModel, check_codec
from microtome.units import size

log = logging.getLogger("microtome.remote")


#: The most bytes of a boundary in one message. gRPC holds a message that is not yet complete, on every call that is
#: open, and nobody is told of it: what is longer comes in parts. 4 MiB is also gRPC's own limit where none is set.
PART = 4 << 20
#: The fewest and the most calls that are open at once.
_CALLS = 16, 256


class Limits(NamedTuple):
    """Limits of a server.

    Attributes:
        max_message: Bytes of a request.
        concurrency: Requests, or batches of them, computed at once.
        held: Bytes that are held for clients: a quarter each for messages on their way, requests of which parts have
            come, requests that wait to be computed, and replies that wait to be taken.
        batch: Requests computed together at most; 1: each alone.
        batch_window_s: Seconds that the first of a batch waits for others.
    """

    max_message: int
    concurrency: int
    held: int
    batch: int = 1
    batch_window_s: float = 0.0

    @property
    def share(self) -> int:
        """Bytes of each of the four."""
        return self.held // 4

    @property
    def part(self) -> int:
        """The most bytes of a boundary in one message."""
        return min(PART, self.max_message)

    @property
    def calls(self) -> int:
        """The most calls that may be open: as many as have room for a message in flight."""
        return min(max(self.share // PART, _CALLS[0]), _CALLS[1])


class QueuedRequest(NamedTuple):
    """A request that waits to be computed.

    Attributes:
        arrived: When it came, and `ends`, when the client gives up.
    """

    id: str
    data: memoryview
    codec: str
    arrived: float
    ends: float

    @property
    def nbytes(self) -> int:
        """Bytes that it holds while it waits."""
        return len(self.data) + len(self.id) + len(self.codec)


class _Item:
    """A request in the queue; if it is cancelled there, it holds nothing from then on."""

    def __init__(self, work: QueuedRequest) -> None:
        self._work: QueuedRequest | None = work
        self.reply: Future[bytes] = Future()
        self.reply.add_done_callback(self._forget)

    @property
    def work(self) -> QueuedRequest:
        assert self._work is not None
        return self._work

    def _forget(self, reply: Future[bytes]) -> None:
        if reply.cancelled():
            self._work = None


class _Begun(NamedTuple):
    item: _Item
    decoded: Decoded
    queue_s: float


class WorkerPool:
    """Threads that compute requests, several together where that is allowed."""

    def __init__(
        self, served: ServedModel, limits: Limits, metrics: Metrics, replies: ReplyBudget, fail: Callable[[str], None]
    ) -> None:
        """Start them; `fail` is called, in one of them, when the device can compute nothing any more."""
        self._served = served
        self._limits = limits
        self._metrics = metrics
        self._replies = replies
        self._on_failure = fail
        self._failure: str | None = None
        self._gate = _Gate()
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"microtome-tail-{number}", daemon=True)
            for number in range(limits.concurrency)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: QueuedRequest) -> Future[bytes]:
        """The reply, later; cancelled, the request is not computed if it has not begun."""
        item = _Item(work)
        self._queue.put(item)
        return item.reply

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Have nothing computed meanwhile."""
        with self._gate.alone():
            yield

    def close(self, timeout: float) -> None:
        """Compute nothing more, and wait for what is being computed: Python aborts when it ends in the middle of it."""
        self._queue.put(None)
        self._replies.close()
        ends = perf_counter() + timeout
        for thread in self._threads:
            thread.join(max(ends - perf_counter(), 0.0))

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            items = [first, *self._others()]
            self._replies.wait_for_room()
            with self._gate.shared():
                self._compute([item for item in items if item.reply.set_running_or_notify_cancel()])
            del first, items  # while it waits, it holds nothing
        self._queue.put(None)  # for the next thread

    def _others(self) -> Iterator[_Item]:
        """Yield requests that come soon after the first of a batch."""
        ends = perf_counter() + self._limits.batch_window_s
        for _ in range(self._limits.batch - 1):
            try:
                item = self._queue.get(timeout=max(ends - perf_counter(), 0.0))
            except Empty:
                return
            if item is None:
                self._queue.put(None)
                return
            yield item

    # -- a batch, in one of the threads --------------------------------------------------------------------------------

    def _compute(self, items: list[_Item]) -> None:
        groups: dict[str | int, list[_Begun]] = {}
        for item in items:
            try:
                begun = self._begin(item)
                key = self._served.key(begun.decoded.boundary) if len(items) > 1 else None
            except BaseException as error:  # noqa: BLE001  whatever it is, the client is told, and others are served
                self._fail(item, error)
            else:
                groups.setdefault(id(item) if key is None else key, []).append(begun)
        for group in groups.values():
            self._together(group)

    def _begin(self, item: _Item) -> _Begun:
        now, work = perf_counter(), item.work
        if self._failure is not None:
            raise Draining(f"the server ends, since its device failed: {self._failure}")
        if now > work.ends:
            raise Late(f"the request waited {now - work.arrived:.3f} s, longer than the client does")
        if len(work.data) > self._limits.max_message:
            raise TooLarge(f"{size(len(work.data))} are more than {size(self._limits.max_message)}")
        check_codec(work.codec)
        return _Begun(item, self._served.decode(work.data, self._limits.held), now - work.arrived)

    def _together(self, group: list[_Begun]) -> None:
        start = perf_counter()
        try:
            outputs = self._served.compute([begun.decoded.boundary for begun in group])
        except BaseException as error:  # noqa: BLE001  whatever the model raises, the client is told
            if len(group) == 1:
                self._fail(group[0].item, error)
            elif self._has_failed():
                for begun in group:
                    self._fail(begun.item, Draining(f"the server ends, since its device failed: {self._failure}"))
            else:  # one of them is to blame, and the others are not
                for begun in group:
                    self._together([begun])
            return
        run_s = perf_counter() - start
        self._metrics.batches.observe(len(group))
        for begun, output in zip(group, outputs, strict=True):
            try:
                reply, spent = self._reply(begun, output, run_s, len(group))
            except BaseException as error:  # noqa: BLE001  what the model returned cannot be sent
                self._fail(begun.item, error)
            else:
                self._replies.add(len(reply))
                begun.item.reply.set_result(reply)  # on its way: what follows makes only the next one wait
                self._note(begun, spent, len(group))

    def _reply(self, begun: _Begun, output: object, run_s: float, batch: int) -> tuple[bytes, dict[str, float]]:
        """The message, and the seconds of each phase."""
        work, at = begun.item.work, begun.decoded.boundary.at
        start = perf_counter()
        data = self._served.encode(output, at, work.codec)
        spent = {
            "decode_s": begun.decoded.seconds,
            "queue_s": begun.queue_s,
            "run_s": run_s,
            "encode_s": perf_counter() - start,
        }
        head = protocol.Reply(id=work.id, timing=protocol.Timing(**spent, batch=batch))
        return protocol.with_bytes(head, data), spent

    def _note(self, begun: _Begun, spent: dict[str, float], batch: int) -> None:
        at = begun.decoded.boundary.at
        self._metrics.requests.labels(at).inc()
        for phase, seconds in spent.items():
            self._metrics.seconds.labels(phase.removesuffix("_s")).observe(seconds)
        log.info("answered", extra={"request": begun.item.work.id[:ID_CHARS], "at": at, "batch": batch, **spent})

    def _fail(self, item: _Item, error: BaseException) -> None:
        kind, message = as_message(error)
        self._metrics.errors.labels(kind).inc()
        log.warning("failed", extra={"request": item.work.id[:ID_CHARS], "kind": kind, "reason": message.message})
        reply = protocol.Reply(id=item.work.id, error=message).SerializeToString()
        self._replies.add(len(reply))
        item.reply.set_result(reply)
        self._has_failed()

    def _has_failed(self) -> bool:
        """Whether the device can compute nothing any more; the first to notice says so."""
        if self._failure is None:
            self._failure = self._served.device_failure()
            if self._failure is not None:
                self._on_failure(self._failure)
        return self._failure is not None


class _Gate:
    """Many at once, or one alone, for whom those that come later wait."""

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
    def alone(self) -> Iterator[None]:
        with self._changed:  # whoever comes now waits for it
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._inside)
                yield
            finally:
                self._waiting -= 1
                self._changed.notify_all()
