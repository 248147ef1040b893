"""The requests of one call on the server that are not answered, in the order in which they have replies."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from microtome.remote.worker import QueuedRequest


class ReplyQueue:
    """Hands requests with replies from the threads that compute them to the event loop, which writes them.

    Attributes:
        unanswered: The requests whose replies are not written.
        window: Bounds the requests of a stream on this server, without those that were forwarded: further stages of
            these may be here.
    """

    def __init__(self, leave_queue: Callable[[QueuedRequest], None], window: int) -> None:
        """Call `leave_queue` on the event loop when a request is computed or forwarded."""
        self.unanswered: set[QueuedRequest] = set()
        self.window = asyncio.Semaphore(window)
        self._loop = asyncio.get_running_loop()
        self._leave_queue = leave_queue
        self._resolved: deque[QueuedRequest] = deque()
        self._changed = asyncio.Event()
        self._has_ended = False

    # -- from any thread -----------------------------------------------------------------------------------------------

    def forwarded(self, request: QueuedRequest) -> None:
        self._call_soon(self._on_forwarded, request)

    def resolved(self, request: QueuedRequest) -> None:
        self._call_soon(self._on_resolved, request)

    def _call_soon(self, function: Callable[[QueuedRequest], None], request: QueuedRequest) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server ended before the computation
            self._loop.call_soon_threadsafe(function, request)

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def _on_forwarded(self, request: QueuedRequest) -> None:
        self._leave_queue(request)
        self.window.release()

    def _on_resolved(self, request: QueuedRequest) -> None:
        self._leave_queue(request)
        self._resolved.append(request)
        self._changed.set()

    async def next(self) -> QueuedRequest | None:
        """Return the next request that has a reply; None: all are answered, and there are no further ones."""
        while not self._resolved:
            if self._has_ended and not self.unanswered:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._resolved.popleft()

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request whose reply was written."""
        self.unanswered.discard(request)
        if request.forwarded_bytes is None:
            self.window.release()

    def end(self) -> None:
        """Expect no further requests."""
        self._has_ended = True
        self._changed.set()
