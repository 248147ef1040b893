"""A message to one server: an encoded request, and the future of its reply."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from microtome.errors import RemoteError
from microtome.remote import protocol
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.serialization import encode

if TYPE_CHECKING:
    from microtome.remote.connection import Connection

#: Bytes of each part of a request that is sent in several messages: short, so that the server sees progress.
_PART_BYTES = 1 << 20


class Message:
    """An encoded request to one server, and its reply.

    Attributes:
        deadline: When the reply must be here, a time of `monotonic`; None: any time.
        reply_bytes: The most bytes of the reply.
        reply: The reply of the server, or the error that ended the request.
        nbytes: The size of the encoded boundary.
        attempts: How often it was sent.
        retry_until: Until when it is sent again after a broken stream.
        connection: The connection that has it, once it is submitted.
        failover: Called with the error if there is no reply; returns whether another server has the message now.
        replied_at: When the reply arrived, a time of `perf_counter`.
    """

    def __init__(
        self, header: Any, *, deadline: float | None = None, reply_bytes: int = protocol.DEFAULT_REPLY_BYTES
    ) -> None:
        """Begin with the header, a `Request` without a boundary."""
        self.deadline = deadline
        self.reply_bytes = reply_bytes
        self.reply: Future[Any] = Future()
        self.nbytes = 0
        self.attempts = 0
        self.retry_until = inf
        self.connection: Connection | None = None
        self.failover: Callable[[RemoteError], bool] | None = None
        self.replied_at = 0.0
        self._header = header
        self._data = b""  # the header and the encoded boundary
        self._set_timeout()

    @property
    def id(self) -> str:
        return str(self._header.id)

    @property
    def total_bytes(self) -> int:
        """The bytes of the boundary, and of the step of a session that it is."""
        return self.nbytes + int(self._header.step.ByteSize())

    def encode(self, boundary: Boundary, codec: str | None = None) -> None:
        """Serialize a boundary, with the header of the message before it in the same bytes.

        Args:
            codec: None: that of the reply.
        """
        self._data = encode(boundary, codec or self._header.codec or "raw", self._prefix)

    def set_payload(self, payload: bytes | memoryview) -> None:
        """Take a boundary that is encoded already; of a step, the rest after its header."""
        self._data = b"".join((self._prefix(len(payload)), payload))

    @property
    def payload(self) -> memoryview:
        """The encoded boundary."""
        return memoryview(self._data)[len(self._data) - self.nbytes :]

    def fail(self, error: RemoteError) -> None:
        """End with an error, unless another server takes the message."""
        if self.failover is None or not self.failover(error):
            self.reply.set_exception(error)

    def _prefix(self, nbytes: int) -> bytes:
        self.nbytes = nbytes
        return protocol.payload_prefix(self._header, nbytes)

    def _set_timeout(self) -> None:
        if self.deadline is not None:
            self._header.timeout_s = max(self.deadline - monotonic(), 1e-3)

    def parts(self, max_bytes: int | None) -> list[memoryview]:
        """Split the encoded boundary for a server that accepts `max_bytes` in a message; None: any number."""
        whole = self.payload
        if max_bytes is None or self.nbytes <= max_bytes:
            return [whole]
        return [whole[start : start + _PART_BYTES] for start in range(0, self.nbytes, _PART_BYTES)]

    def first_part(self, part: memoryview) -> bytes:
        """Count an attempt, and return the message of the first part, with the time that is left until the deadline."""
        self.attempts += 1
        is_whole = len(part) == self.nbytes
        if self.attempts > 1 and self.deadline is not None:
            self._set_timeout()
        elif is_whole:
            return self._data
        self._header.size = 0 if is_whole else self.nbytes
        return protocol.with_payload(self._header, part)
