"""Bound the number of open calls: a new one has one that waits for its peer ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from time import monotonic
from typing import Any

from microtome.remote.budget import BytePool
from microtome.remote.optional_packages import grpc
from microtome.remote.peers import Peers

#: Seconds that a call waits for a place, how often it looks, and for how long a peer must have left its reply untaken
#: to make a place.
_WAIT_S, _LOOK_S, STUCK_S = 2.0, 0.05, 0.25
#: Seconds after which a call that waits for a place has one ended that is sending a request: most requests are complete
#: sooner, and lose nothing.
SENDING_S = 0.1


class Upload:
    """A request that comes in several messages, and is not complete."""

    def __init__(self) -> None:
        self.received = 0
        self.began = self.last = monotonic()

    def add(self, nbytes: int) -> None:
        self.received += nbytes
        self.last = monotonic()

    def rate(self, now: float) -> float:
        """Bytes a second so far."""
        return self.received / max(now - self.began, 1e-3)


class OpenCall:
    """One open call.

    Attributes:
        peer: The other side's address, as gRPC has it.
        is_stream: Whether it may stay open without a message.
        requests: How many are complete and not yet answered.
        has_spoken: Whether it has brought a message.
        quiet_since: When it opened or last brought a message.
        writing: When the reply that is being written was begun, and its bytes; None: none is.
        upload: The request of which parts have come; None: there is none.
        waits: Whether it waits for room that others hold.
        reply_pool: The pool that holds the bytes of its reply; None: no pool of echoes or profiles does.
        ended: The status and the reason with which the server ends it; None: it does not.
    """

    def __init__(self, context: Any, *, is_stream: bool) -> None:
        self.context = context
        self.peer: str = context.peer()
        self.is_stream = is_stream
        self.requests = 0
        self.has_spoken = False
        self.quiet_since = monotonic()
        self.writing: tuple[float, int] | None = None
        self.upload: Upload | None = None
        self.waits = False
        self.reply_pool: BytePool | None = None
        self.ended: tuple[grpc.StatusCode, str] | None = None
        self.task: asyncio.Future[None] | None = None
        self._lock = asyncio.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether the server has nothing to do for it, or not yet a whole request."""
        return not self.requests and self.writing is None

    @property
    def is_sending(self) -> bool:
        """Whether a request of it has begun and is not yet complete."""
        return self.waits or self.upload is not None

    async def read(self) -> bytes | None:
        """The next message; None: there are no more."""
        data = await self.context.read()
        self.has_spoken, self.quiet_since = True, monotonic()
        return None if data is grpc.aio.EOF else data

    async def write(self, reply: bytes) -> None:
        async with self._lock:
            if self.writing is not None:  # the one before was given up
                raise asyncio.CancelledError
            self.writing = monotonic(), len(reply)
            try:
                await self.context.write(reply)
            except grpc.aio.InternalError as error:  # the other side is gone
                raise asyncio.CancelledError from error
            self.writing = None

    def end(self, status: grpc.StatusCode, why: str) -> None:
        """Have it end with a reason."""
        if self.ended is None:
            self.ended = status, why
            if self.task is not None:
                self.task.cancel()


class CallLimiter:
    """A bounded number of open calls.

    Attributes:
        dropped: How many were ended for others, with what they held.
    """

    def __init__(
        self, most: int, peers: Peers, *, trusted: bool = False, clock: Callable[[], float] = monotonic
    ) -> None:
        """`trusted`: who calls has shown a token, where one is asked for."""
        self.most = most
        self._clock = clock
        self.dropped = 0
        self._trusted = trusted
        self._peers = peers
        self._open: dict[OpenCall, None] = {}
        self._waiting = 0

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(tuple(self._open))

    async def run(self, context: Any, body: Callable[[OpenCall], Awaitable[None]], *, is_stream: bool) -> None:
        """Run a call to its end; with too many open, one that waits for its peer is ended for it."""
        call = OpenCall(context, is_stream=is_stream)
        if self._trusted:
            self._peers.trust(call.peer)
        if not await self._has_place():
            why = f"expected at most {self.most} calls at once, and all are busy: try again later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self._open[call] = None
        call.task = task = asyncio.ensure_future(body(call))
        try:
            await asyncio.wait((task,))
        finally:  # the other side may be gone, and this cancelled
            self._open.pop(call, None)
            task.cancel()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            call.task = None
            del task  # an exception that holds itself, by its frames, is freed late, and with it what these hold
        try:
            if call.ended is None and error is not None:
                raise error
        finally:
            del error
        if call.ended is not None and call.writing is None:
            await context.abort(*call.ended)
        elif call.ended is not None:  # a status would wait behind the reply, which is not taken
            raise asyncio.CancelledError

    def disconnect(self, call: OpenCall, why: str) -> None:
        """End a call that cannot be told so, since it takes nothing: with its connection."""
        self._open.pop(call, None)
        self.dropped += 1
        call.end(grpc.StatusCode.DEADLINE_EXCEEDED, why)
        self._peers.disconnect(call.peer)

    async def _has_place(self) -> bool:
        """Wait for a place, and make one where that can be done; whether there is one."""
        began = self._clock()
        self._waiting += 1
        try:
            while len(self._open) >= self.most and not self._end_one(self._clock() - began):
                if self._clock() - began > _WAIT_S or self._waiting > self.most:
                    return False
                await asyncio.sleep(_LOOK_S)
            return True
        finally:
            self._waiting -= 1

    def _end_one(self, waited_s: float) -> bool:
        """End a call for one that has waited so long for a place; whether there was one to end."""
        if self._end_idle(sending=False) or self._end_stuck():
            return True
        return waited_s > SENDING_S and self._end_idle(sending=True)

    def _end_idle(self, *, sending: bool) -> bool:
        """End an idle call of the peer that has most calls: one that has brought nothing, or the one idle longest.

        Args:
            sending: Of those that are sending a request, or of those that are not.
        """
        idle = [call for call in self._open if call.is_idle and call.is_sending == sending]
        if not idle:
            return False
        counts = Counter(call.peer for call in self._open)
        call = max(idle, key=lambda one: (counts[one.peer], not one.has_spoken, -one.quiet_since))
        del self._open[call]
        self.dropped += call.has_spoken
        if sending:
            why = "all calls are in use: send the request again later"
        else:
            why = "the call was idle and others wait: open one when there is a request"
        call.end(grpc.StatusCode.UNAVAILABLE, why)
        return True

    def _end_stuck(self) -> bool:
        """End the call whose reply has waited longest for its peer to take it."""
        before = monotonic() - STUCK_S
        stuck = [(call.writing[0], id(call), call) for call in self._open if call.writing and call.writing[0] < before]
        if not stuck:
            return False
        self.disconnect(min(stuck)[2], "the reply was not taken and others wait")
        return True
