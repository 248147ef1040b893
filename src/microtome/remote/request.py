"""A request of a client: its state, its messages, and the time of each phase."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from math import inf
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from microtome.inputs import Inputs
from microtome.remote import protocol
from microtome.remote.payloads import ExpectedReply
from microtome.results.requests import RequestRecord
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.serialization import encode

#: Bytes of each part of a request that is sent in several messages: short, so that the server sees progress.
_PART_BYTES = 1 << 20


class Route(NamedTuple):
    """The cut and the codec of a request.

    Attributes:
        at: The cut; None: the model is not cut, and runs here. `""`: the inputs are sent.
    """

    at: str | None
    codec: str


@dataclass(frozen=True)
class RequestOptions:
    """Options of every request.

    Attributes:
        deadline_s: Seconds that a request may take; None: any number.
        has_fallback: Whether this device computes the output if the server does not answer.
        max_reply_bytes: The most bytes of a reply; None: derived from the example.
    """

    deadline_s: float | None = None
    has_fallback: bool = False
    max_reply_bytes: int | None = None


class RequestState(Enum):
    """The state of a request. It ends in one of the last three."""

    CREATED = "created"
    HEAD_DONE = "head done"
    SENT = "sent"
    REPLIED = "replied"
    LOCAL = "local"
    FAILED = "failed"


class RemoteRequest:
    """A request from its inputs to its output.

    `CREATED` → `HEAD_DONE` → `SENT` → `REPLIED`. It ends as `LOCAL` if this device computes the output, because the
    model is not cut, or because the server does not answer; and as `FAILED` if nobody does.

    Attributes:
        deadline_s: The seconds that it may take; None: any number.
        deadline: When it must be answered, a time of `monotonic`; None: it has no deadline.
        boundary: The values that cross the cut; None: none do.
        expected: Bounds and checks of the reply.
        reply: The message of the server, or the error that ended the request.
        nbytes: The size of the encoded boundary; 0: it is not encoded.
        attempts: How often it was sent.
        retry_until: Until when it is sent again after a broken stream.
        replied_at: When the reply arrived, a time of `perf_counter`.
        is_alone: Whether no other request of this client was in flight when it was sent.
        timing: Seconds of each phase, by the field of `RequestRecord`.
        reason: Why it did not run where it was to run; or why it failed.
    """

    def __init__(
        self, inputs: Inputs, route: Route, deadline_s: float | None = None, head_s: float | None = None
    ) -> None:
        """`head_s`: the seconds that the head took, if it has run."""
        self.id = uuid.uuid4().hex
        self.inputs = inputs
        self.route = route
        self.state = RequestState.CREATED
        self.deadline_s = deadline_s
        self.deadline = None if deadline_s is None else monotonic() + deadline_s
        self.boundary: Boundary | None = None
        self.expected: ExpectedReply | None = None
        self.reply: Future[Any] = Future()
        self.nbytes = 0
        self.attempts = 0
        self.retry_until = inf
        self.replied_at = 0.0
        self.is_alone = False
        self.timing: dict[str, float] = {} if head_s is None else {"head_s": head_s}
        self.reason: str | None = None
        self._header = protocol.Request()
        self._message = b""  # the header and the encoded boundary
        self._received_bytes = 0
        self._started = perf_counter() - (head_s or 0.0)
        self._sent_at = 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.timing[phase] = perf_counter() - start

    # -- messages ------------------------------------------------------------------------------------------------------

    @property
    def reply_bytes(self) -> int:
        """The most bytes of the reply."""
        return protocol.DEFAULT_REPLY_BYTES if self.expected is None else self.expected.reply_bytes

    def encode(self, boundary: Boundary) -> None:
        """Serialize the boundary, with the header of its message before it in the same bytes."""
        self._header = protocol.Request(id=self.id, codec=self.route.codec)
        self._set_timeout()
        check_facts = boundary.record is None
        self._message = encode(
            boundary.metadata, boundary.tensors, self.route.codec, self._prefix, check_facts=check_facts
        )

    def encode_step(self, step: Any, payload: memoryview) -> None:
        """Serialize a step of a session, of whose boundary the payload is the rest after the header."""
        self._header = protocol.Request(id=self.id, codec=self.route.codec, step=step)
        self._set_timeout()
        self._message = self._prefix(len(payload)) + payload

    def _prefix(self, nbytes: int) -> bytes:
        self.nbytes = nbytes
        return protocol.payload_prefix(self._header, nbytes)

    def _set_timeout(self) -> None:
        if self.deadline is not None:
            self._header.timeout_s = max(self.deadline - monotonic(), 1e-3)

    def parts(self, max_bytes: int | None) -> list[memoryview]:
        """Split the encoded boundary for a server that accepts `max_bytes` in a message; None: any number."""
        whole = memoryview(self._message)[len(self._message) - self.nbytes :]
        if max_bytes is None or self.nbytes <= max_bytes:
            return [whole]
        return [whole[start : start + _PART_BYTES] for start in range(0, self.nbytes, _PART_BYTES)]

    def first_message(self, part: memoryview) -> bytes:
        """Count an attempt, and return the message of the first part, with the time that is left until the deadline."""
        self.attempts += 1
        is_whole = len(part) == self.nbytes
        if self.attempts > 1 and self.deadline is not None:
            self._set_timeout()
        elif is_whole:
            return self._message
        self._header.size = 0 if is_whole else self.nbytes
        return protocol.with_payload(self._header, part)

    # -- states --------------------------------------------------------------------------------------------------------

    def mark_sent(self, *, is_alone: bool) -> None:
        self.state, self.is_alone, self._sent_at = RequestState.SENT, is_alone, perf_counter()

    def mark_replied(self, reply: Any) -> None:
        """Take the phases of the server from its reply; the remaining time is that of the wire."""
        self.state = RequestState.REPLIED
        elapsed, timing = self.replied_at - self._sent_at, reply.timing
        phases = {
            "server_decode_s": timing.decode_s,
            "queue_s": timing.queue_s,
            "tail_s": timing.run_s,
            "server_encode_s": timing.encode_s,
        }
        phases = {name: spent if 0 <= spent <= elapsed else 0.0 for name, spent in phases.items()}  # else it is false
        self.timing |= phases | {"wire_s": max(elapsed - sum(phases.values()), 0.0)}
        self._received_bytes = len(reply.output)

    def mark_failed(self, reason: str) -> None:
        self.state, self.reason = RequestState.FAILED, reason

    def record(self) -> RequestRecord:
        """Return the record of a request that has ended now."""
        where = {RequestState.REPLIED: "cloud", RequestState.LOCAL: "edge"}.get(self.state, "nowhere")
        return RequestRecord(
            self.route.at,
            self.route.codec,
            where,
            **self.timing,
            total_s=perf_counter() - self._started,
            sent_bytes=self.nbytes + self._header.step.ByteSize(),
            received_bytes=self._received_bytes,
            attempts=self.attempts,
            reason=self.reason,
            alone=self.is_alone,
            began=self._started,
        )
