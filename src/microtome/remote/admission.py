"""Admission control of a server: bounds on open calls, and on the bytes that it holds for its clients."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from math import inf
from time import monotonic
from typing import Any, NamedTuple

import grpc

from microtome.remote.peers import Peers

#: Seconds that a call waits for a slot, and between its attempts to get one.
_SLOT_TIMEOUT_S, _SLOT_POLL_S = 2.0, 0.05
#: Seconds after which a reply that its peer does not read is stalled, so that its call can be evicted.
STALLED_S = 0.25
#: Seconds that a request to be forwarded waits while too many others are on their way.
_FORWARD_WAIT_S = 0.5
#: The fewest bytes that a forwarded request counts as: it is kept, with its future and its ids, until it is answered.
_FORWARDED_BYTES = 64 << 10
#: Seconds that a call waits for a slot before another is evicted in the middle of an upload: most uploads end sooner.
UPLOAD_GRACE_S = 0.1


class BytePool:
    """A bounded number of bytes, reserved first come, first served, on one event loop.

    A single reservation always succeeds, also one above the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = 0
        self._waiting = 0
        self._turn = asyncio.Lock()  # fair: held by the first of those that wait
        self._released = asyncio.Event()

    @property
    def is_contended(self) -> bool:
        """Whether a reservation waits."""
        return self._waiting > 0

    async def reserve(self, nbytes: int) -> None:
        self._waiting += 1
        try:
            async with self._turn:
                while self.reserved and self.reserved + nbytes > self.capacity:
                    self._released.clear()
                    await self._released.wait()
                self.reserved += nbytes
        finally:
            self._waiting -= 1

    def release(self, nbytes: int) -> None:
        self.reserved -= nbytes
        self._released.set()


class ReplyBudget:
    """The bytes of unwritten replies; while there are too many, workers wait. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.unwritten = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def is_full(self) -> bool:
        return self.unwritten > self.capacity

    def add(self, nbytes: int) -> None:
        with self._changed:
            self.unwritten += nbytes

    def remove(self, nbytes: int) -> None:
        """Remove a reply that was written, or whose call has ended."""
        with self._changed:
            self.unwritten -= nbytes
            self._changed.notify_all()

    def wait_until_not_full(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self.is_full)

    def close(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class ForwardBudget(ReplyBudget):
    """The bytes of forwarded requests that are not answered; while there are too many, further ones are refused soon.

    They must not wait for longer: servers that forward to each other would wait for each other for ever.
    """

    _is_stuck = False

    def add(self, nbytes: int) -> None:
        super().add(max(nbytes, _FORWARDED_BYTES))

    def remove(self, nbytes: int) -> None:
        super().remove(max(nbytes, _FORWARDED_BYTES))

    def has_room(self) -> bool:
        """Wait for a short time until it is not full, unless that was in vain since it last was not."""
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._closed or not self.is_full, 0.0 if self._is_stuck else _FORWARD_WAIT_S
            )
            self._is_stuck = not has_room
            return has_room


class Upload:
    """The progress of a request that arrives in several messages."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self.started = self.last_part = monotonic()

    def add(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        self.last_part = monotonic()

    def bytes_per_s(self, now: float) -> float:
        return self.received_bytes / max(now - self.started, 1e-3)


class Write(NamedTuple):
    """A reply that gRPC is writing."""

    started: float
    nbytes: int


class OpenCall:
    """An open call.

    Attributes:
        peer: The address of the client, as `context.peer()` formats it.
        is_stream: Whether it may stay open without a message.
        in_flight: The number of complete requests that are not yet answered.
        has_received: Whether a message has arrived.
        last_read: When it was opened, or its last message arrived.
        write_in_progress: The reply that is being written; None: none is.
        upload: The request that arrives in parts; None: none does.
        is_waiting: Whether it waits for bytes of a pool.
        reply_pool: The pool that holds the bytes of its reply; None for replies of the model.
        ended: The status and the reason with which the server ends it; None: it does not.
    """

    def __init__(self, context: Any, *, is_stream: bool) -> None:
        self.context = context
        self.peer: str = context.peer()
        self.is_stream = is_stream
        self.in_flight = 0
        self.has_received = False
        self.last_read = monotonic()
        self.write_in_progress: Write | None = None
        self.upload: Upload | None = None
        self.is_waiting = False
        self.reply_pool: BytePool | None = None
        self.ended: tuple[grpc.StatusCode, str] | None = None
        self.task: asyncio.Future[None] | None = None
        self._lock = asyncio.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether no complete request of it is computed or answered."""
        return not self.in_flight and self.write_in_progress is None

    @property
    def is_uploading(self) -> bool:
        """Whether a request has begun to arrive and is not yet complete."""
        return self.is_waiting or self.upload is not None

    async def read(self) -> bytes | None:
        """Return the next message; None: the client has sent its last."""
        data = await self.context.read()
        self.has_received, self.last_read = True, monotonic()
        return None if data is grpc.aio.EOF else data

    async def write(self, reply: bytes) -> None:
        async with self._lock:
            if self.write_in_progress is not None:  # the write before was cancelled
                raise asyncio.CancelledError
            self.write_in_progress = Write(monotonic(), len(reply))
            try:
                await self.context.write(reply)
            except grpc.aio.InternalError as error:  # the peer is gone
                raise asyncio.CancelledError from error
            self.write_in_progress = None

    def end(self, status: grpc.StatusCode, reason: str) -> None:
        """Cancel the call, with a status for the client."""
        if self.ended is None:
            self.ended = status, reason
            if self.task is not None:
                self.task.cancel()


class CallLimiter:
    """Bound the number of open calls, evicting one that waits for its peer when a new call finds no slot.

    Attributes:
        evicted: How many calls that had received something were evicted or disconnected.
    """

    def __init__(
        self, capacity: int, peers: Peers, *, are_trusted: bool = False, clock: Callable[[], float] = monotonic
    ) -> None:
        """`are_trusted`: the peers have authenticated, if a token is required."""
        self.capacity = capacity
        self.evicted = 0
        self._clock = clock
        self._are_trusted = are_trusted
        self._peers = peers
        self._open: dict[OpenCall, None] = {}
        self._waiting = 0

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(tuple(self._open))

    async def run(self, context: Any, body: Callable[[OpenCall], Awaitable[None]], *, is_stream: bool) -> None:
        """Run a call to its end once there is a slot for it."""
        call = OpenCall(context, is_stream=is_stream)
        if self._are_trusted:
            self._peers.trust(call.peer)
        if not await self._acquire_slot():
            reason = f"expected at most {self.capacity} calls at once, and all are busy: try again later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        self._open[call] = None
        call.task = task = asyncio.ensure_future(body(call))
        try:
            await asyncio.wait((task,))
        finally:  # also if the peer is gone and this coroutine is cancelled
            self._open.pop(call, None)
            task.cancel()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            call.task = None
            del task  # break the cycle of an exception and its frames, which would keep the request in memory
        try:
            if call.ended is None and error is not None:
                raise error
        finally:
            del error
        if call.ended is not None and call.write_in_progress is None:
            await context.abort(*call.ended)
        elif call.ended is not None:  # a status would queue behind the reply that is not read
            raise asyncio.CancelledError

    def disconnect(self, call: OpenCall, reason: str) -> None:
        """End a call by closing its connection: its peer reads nothing, so it would not receive a status."""
        self._open.pop(call, None)
        self.evicted += 1
        call.end(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
        self._peers.disconnect(call.peer)

    async def _acquire_slot(self) -> bool:
        """Wait for a slot, evicting a call if possible; return False on timeout."""
        started = self._clock()
        self._waiting += 1
        try:
            while len(self._open) >= self.capacity and not self._evict(self._clock() - started):
                if self._clock() - started > _SLOT_TIMEOUT_S or self._waiting > self.capacity:
                    return False
                await asyncio.sleep(_SLOT_POLL_S)
            return True
        finally:
            self._waiting -= 1

    def _evict(self, waited_s: float) -> bool:
        """Evict a call for one that has waited so long, and return whether there was one to evict."""
        if self._evict_idle(uploading=False):
            return True
        stalled = longest_stalled(self._open, monotonic())
        if stalled is not None:
            self.disconnect(stalled, "the reply was not read and others wait")
            return True
        return waited_s > UPLOAD_GRACE_S and self._evict_idle(uploading=True)

    def _evict_idle(self, *, uploading: bool) -> bool:
        """Evict an idle call of the peer with the most calls: one without a message, or else the one idle longest."""
        idle = [call for call in self._open if call.is_idle and call.is_uploading == uploading]
        if not idle:
            return False
        counts = Counter(call.peer for call in self._open)
        call = max(idle, key=lambda call: (counts[call.peer], not call.has_received, -call.last_read))
        del self._open[call]
        self.evicted += call.has_received
        if uploading:
            reason = "all calls are in use: send the request again later"
        else:
            reason = "the call was idle and others wait: open one when there is a request"
        call.end(grpc.StatusCode.UNAVAILABLE, reason)
        return True


def longest_stalled(calls: Iterable[OpenCall], now: float, min_bytes_per_s: float = inf) -> OpenCall | None:
    """Return the call whose reply has been unread longest, beyond `STALLED_S` and the time at a minimum rate."""
    stalled: dict[OpenCall, float] = {}
    for call in calls:
        write = call.write_in_progress
        if write is not None and now - write.started > STALLED_S + write.nbytes / min_bytes_per_s:
            stalled[call] = write.started
    return min(stalled, key=lambda call: stalled[call], default=None)
