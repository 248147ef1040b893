"""A request of a client: its state, its way over the servers, and the time of each phase."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from microtome.errors import sanitize_text
from microtome.inputs import Inputs
from microtome.remote import protocol
from microtome.remote.message import Message
from microtome.remote.payloads import ExpectedReply
from microtome.results.requests import HopRecord, RequestRecord
from microtome.split.boundary.boundary import Boundary


class Route(NamedTuple):
    """The cuts and the codecs of a request.

    Attributes:
        at: The first cut; None: the model is not cut, and runs here. `""`: the inputs are sent.
        codec: The codec of what crosses it.
        later: The further cuts of a chain, in order.
        later_codecs: The codecs of what crosses these; empty: the same as at the first cut.
    """

    at: str | None
    codec: str
    later: tuple[str, ...] = ()
    later_codecs: tuple[str, ...] = ()

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codec at each cut."""
        return (self.codec, *(self.later_codecs or [self.codec] * len(self.later)))

    def reply_codec(self, hop: int) -> str:
        """Return the codec of a server's reply: that of the cut after its stage, or of the last cut for the output."""
        return self.codecs[min(hop + 1, len(self.later))]

    @property
    def cuts(self) -> tuple[str, ...]:
        """The addresses of all cuts; without `""`, since nothing runs before it."""
        return tuple(at for at in (self.at, *self.later) if at)

    @property
    def first_stage(self) -> int:
        """The number of the first stage that does not run here: after the head, or the one that takes the inputs."""
        return 1 if self.at else 0


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
        boundary: The values that cross the first cut; None: none do.
        payload: The encoded values that cross the last cut that was reached; None: the first one.
        stage: The number of the stage that runs next.
        expected: Bounds and checks of the reply.
        message: The last message to a server; None: it is not encoded.
        reply: The last server's reply, or the error that ended the request.
        is_cancelled: Whether nobody waits for the reply any more.
        is_alone: Whether no other request of this client was in flight when it was sent.
        timing: Seconds of each phase, by the field of `RequestRecord`.
        hops: The servers that have answered.
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
        self.payload: bytes | None = None
        self.stage = route.first_stage
        self.expected: ExpectedReply | None = None
        self.message: Message | None = None
        self.reply: Future[Any] = Future()
        self.is_cancelled = False
        self.is_alone = False
        self.timing: dict[str, float] = {} if head_s is None else {"head_s": head_s}
        self.hops: list[HopRecord] = []
        self.reason: str | None = None
        self._attempts = 0
        self._sent_bytes = self._received_bytes = 0
        self._started = perf_counter() - (head_s or 0.0)
        self._sent_at = 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.timing[phase] = perf_counter() - start

    def make_message(self, reply_bytes: int, hop: int = 0, **fields: Any) -> Message:
        """Return a message to the server of a hop without a boundary; `fields` are those of a `Request`."""
        header = protocol.Request(id=self.id, codec=self.route.reply_codec(hop), **fields)
        return Message(header, deadline=self.deadline, reply_bytes=reply_bytes)

    # -- states --------------------------------------------------------------------------------------------------------

    def mark_sent(self, *, is_alone: bool) -> None:
        self.state, self.is_alone, self._sent_at = RequestState.SENT, is_alone, perf_counter()

    def add_reply(self, message: Message, reply: Any) -> None:
        """Count the reply of one server, and of those to which it forwarded the request."""
        self._count(message)
        self._received_bytes += len(reply.output)
        address = "" if message.connection is None else message.connection.address
        for server, timing in ((address, reply.timing), *((one.server, one) for one in reply.forwarded)):
            at = (self.route.at, *self.route.later)[len(self.hops)] or ""
            spent = timing.decode_s, timing.queue_s, timing.run_s, timing.encode_s
            self.hops.append(HopRecord(sanitize_text(server), at, *spent))

    def _count(self, message: Message) -> None:
        self._attempts = max(self._attempts, message.attempts)
        self._sent_bytes += message.total_bytes

    def mark_replied(self) -> None:
        """Take the phases of the servers from their replies; the remaining time is that of the wire."""
        assert self.message is not None
        self.state = RequestState.REPLIED
        elapsed = self.message.replied_at - self._sent_at
        phases = {
            "server_decode_s": sum(hop.decode_s for hop in self.hops),
            "queue_s": sum(hop.queue_s for hop in self.hops),
            "tail_s": sum(hop.run_s for hop in self.hops),
            "server_encode_s": sum(hop.encode_s for hop in self.hops),
        }
        phases = {name: spent if 0 <= spent <= elapsed else 0.0 for name, spent in phases.items()}  # else it is false
        self.timing |= phases | {"wire_s": max(elapsed - sum(phases.values()), 0.0)}

    def mark_failed(self, reason: str) -> None:
        self.state, self.reason = RequestState.FAILED, reason

    def record(self) -> RequestRecord:
        """Return the record of a request that has ended now."""
        where = {RequestState.REPLIED: "cloud", RequestState.LOCAL: "edge"}.get(self.state, "nowhere")
        if self.message is not None and self.state is not RequestState.REPLIED:
            self._count(self.message)
        return RequestRecord(
            self.route.at,
            self.route.codec,
            where,
            **self.timing,
            total_s=perf_counter() - self._started,
            sent_bytes=self._sent_bytes,
            received_bytes=self._received_bytes,
            attempts=self._attempts,
            reason=self.reason,
            alone=self.is_alone,
            later=self.route.later,
            hops=tuple(self.hops) if self.route.later else (),
            began=self._started,
        )
