"""A stream of requests to a server, opened again when it breaks. Each request is answered once, or not at all."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic, perf_counter, sleep
from typing import Any

from microtome.errors import RemoteError
from microtome.remote import protocol
from microtome.remote.channel import MOST, REPLY, Security, check_address, open_channel
from microtome.remote.credentials import metadata
from microtome.remote.error_kinds import from_message, from_rpc
from microtome.remote.optional_packages import DecodeError, grpc
from microtome.split.boundary import Boundary
from microtome.split.serialization import encode
from microtome.units import size

__all__ = ["Connection", "Pending", "Security"]

log = logging.getLogger("microtome.remote")

#: Seconds to wait before a stream is opened again: at first, and at most.
_BACKOFF_S = 0.02, 1.0
#: Seconds between attempts to reach a server that is not there.
_KNOCK_S = 0.1
#: Bytes of a part of a request that is sent in several messages: short enough to show that it goes on.
_PART = 1 << 20
#: Bytes and seconds of sending from which the rate of the link is computed: buffers take the first bytes at once.
_TELLING_BYTES, _TELLING_S = 4 << 20, 0.2
#: The most bytes of what a server says of itself: a few strings, and the addresses of its cuts.
_HELLO = 4 << 20


class Pending:
    """A request that was sent and waits for its reply.

    Attributes:
        reply: The message; or the error that ended it.
        nbytes: Bytes of the encoded boundary.
        attempts: How often it was sent.
        answered: When the reply came, as `perf_counter` says it.
        patient_until: When it is no longer sent again after a stream breaks.
        reply_bytes: The most bytes of the reply.
    """

    def __init__(
        self,
        head: Any,
        boundary: Boundary,
        codec: str,
        ends: float | None,
        patience_s: float = 15.0,
        reply_bytes: int = REPLY,
    ) -> None:
        self.id: str = head.id
        self.reply: Future[Any] = Future()
        self.attempts = 0
        self.answered = 0.0
        self.patient_until = monotonic() + patience_s
        self.reply_bytes = reply_bytes
        self._head = head
        self._ends = ends
        self._set_timeout()
        self._message = encode(boundary.metadata, boundary.tensors, codec, self._before)

    def _before(self, nbytes: int) -> bytes:
        self.nbytes = nbytes
        return protocol.before_bytes(self._head, nbytes)

    def _set_timeout(self) -> None:
        if self._ends is not None:
            self._head.timeout_s = max(self._ends - monotonic(), 1e-3)

    def parts(self, most: int | None) -> list[memoryview]:
        """Split the encoded boundary for a server that takes `most` bytes in a message; None: it takes any number."""
        whole = memoryview(self._message)[-self.nbytes :]
        if most is None or self.nbytes <= most:
            return [whole]
        return [whole[at : at + _PART] for at in range(0, self.nbytes, _PART)]

    def message(self, part: memoryview) -> bytes:
        """To be sent now, the first part of it: how long the client waits from now on is in it."""
        self.attempts += 1
        if self.attempts > 1 and self._ends is not None:
            self._set_timeout()
        elif len(part) == self.nbytes:
            return self._message
        self._head.size = 0 if len(part) == self.nbytes else self.nbytes
        return protocol.with_bytes(self._head, part)


class Connection:
    """All requests of a client to one server.

    Attributes:
        address: Of the server.
        down: Why no stream is open now, though one is wanted; None: one is, or none was wanted yet.
        max_part: The most bytes of a boundary that the server takes in one message; None: all.
    """

    def __init__(self, address: str, security: Security | None = None) -> None:
        self.address = address
        self.down: str | None = None
        self.max_part: int | None = None
        self.reconnects = 0
        self._security = security or Security()
        self._metadata = metadata(self._security.token)
        check_address(address, self._security)
        self._channel = self._stream_channel = open_channel(address, self._security)
        self._channel_bytes = self._reply_bytes = REPLY
        self._methods = {name: self._channel.unary_unary(_path(name)) for name in protocol.METHODS if name != "Stream"}
        self._changed = threading.Condition()
        self._pending: dict[str, Pending] = {}
        self._dropped: set[str] = set()  # requests of this stream for whose replies nobody waits any more
        self._outgoing: SimpleQueue[Pending | None] | None = None
        self._call: Any = None
        self._closed = False
        self._fed_bytes, self._fed_s = 0, 0.0
        self._thread: threading.Thread | None = None

    def ask(self, name: str, request: Any, timeout: float, reply_bytes: int = REPLY) -> Any:
        """Call a method that gives one reply.

        Args:
            reply_bytes: The most bytes of the reply, if that is more than every channel takes.

        Raises:
            RemoteError: If there is none.
        """
        data = request.SerializeToString()
        if reply_bytes <= REPLY:
            return self._ask(self._methods[name], name, data, timeout, REPLY)
        most = min(reply_bytes, MOST)
        with open_channel(self.address, self._security, most) as channel:
            return self._ask(channel.unary_unary(_path(name)), name, data, timeout, most)

    def _ask(self, method: Any, name: str, data: bytes, timeout: float, most: int) -> Any:
        ends = monotonic() + timeout
        while True:
            left = ends - monotonic()
            try:
                reply = method(data, timeout=max(left, 0.001), metadata=self._metadata)
                return self._parsed(name, reply)
            except grpc.RpcError as error:
                told = from_rpc(error, self.address, f"answers {name} with more than {size(most)}")
                # The reason is lost if gRPC waits for the server by itself.
                if (
                    told.kind in ("REFUSED", "TOO_LARGE")
                    or error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
                    or left < _KNOCK_S
                ):
                    raise told from error
            except ValueError as error:  # what gRPC says of a channel that was closed
                raise self._was_closed() from error
            sleep(_KNOCK_S)

    def _parsed(self, name: str, reply: bytes) -> Any:
        if name == "Hello" and len(reply) > _HELLO:
            raise RemoteError(f"{self.address} answers {size(len(reply))}, expected at most {size(_HELLO)}", "REFUSED")
        try:
            return protocol.METHODS[name].read_reply(reply)
        except (DecodeError, UnicodeDecodeError) as error:
            raise RemoteError(f"{self.address} answers bytes that are no {name} reply", "REFUSED") from error

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, pending: Pending) -> None:
        """Send a request as soon as there is a stream; it is sent again when that breaks before the reply."""
        with self._changed:
            if self._closed:
                raise self._was_closed()
            self._pending[pending.id] = pending
            if pending.reply_bytes > self._reply_bytes:  # another stream is opened once this one has its replies
                self._reply_bytes = min(1 << (pending.reply_bytes - 1).bit_length(), MOST)
                self._end_stream()
            if self._outgoing is not None:
                self._outgoing.put(pending)
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep_open, name="microtome-client", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def is_idle(self) -> bool:
        """Whether no request waits for a reply."""
        return not self._pending

    def sending_rate(self) -> float | None:
        """Bytes a second while requests waited to be sent, since it was last asked; None: too few did."""
        nbytes, spent = self._fed_bytes, self._fed_s
        if nbytes < _TELLING_BYTES or spent < _TELLING_S:
            return None
        self._fed_bytes, self._fed_s = 0, 0.0
        return nbytes / spent

    def give_up(self, pending: Pending) -> None:
        """Wait no longer: a reply that still comes is dropped."""
        with self._changed:
            if self._pending.pop(pending.id, None) is not None and self._call is not None:
                self._dropped.add(pending.id)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            left, self._pending = list(self._pending.values()), {}
            self._end_stream()
            if self._call is not None:
                self._call.cancel()
            self._changed.notify_all()
        for pending in left:
            pending.reply.set_exception(self._was_closed())
        if self._thread is not None:
            self._thread.join()
        self._stream_channel.close()
        self._channel.close()

    def _end_stream(self) -> None:
        """Send nothing more on the stream that is open."""
        if self._outgoing is not None:
            self._outgoing.put(None)
            self._outgoing = None

    # -- the stream, in a thread of its own ----------------------------------------------------------------------------

    def _keep_open(self) -> None:
        wait_s = _BACKOFF_S[0]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._pending or self.down)
                if self._closed:
                    return
                call = self._open() if self._pending else None
            if call is None:  # nobody asks while it is known to be down: find out when it is back
                self._knock(wait_s)
                wait_s = min(2 * wait_s, _BACKOFF_S[1])
                continue
            error = self._read(call)
            with self._changed:
                is_planned = self._outgoing is None and error.kind == "UNREACHABLE"
                self._end_stream()
                self._call = None
                if self._closed:
                    return
                if is_planned:
                    continue
                if self._answered:
                    wait_s = _BACKOFF_S[0]
                self.down = str(error)
                self.reconnects += 1
                for pending in list(self._pending.values()):
                    if error.kind in ("REFUSED", "TOO_LARGE") or monotonic() > pending.patient_until:
                        del self._pending[pending.id]
                        pending.reply.set_exception(error)
                log.warning("the stream broke", extra={"server": self.address, "reason": str(error)})
                self._changed.wait_for(lambda: self._closed, wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _BACKOFF_S[1])

    def _open(self) -> Any:
        """A stream on which all that wait are sent."""
        self._outgoing = outgoing = SimpleQueue[Pending | None]()
        for pending in self._pending.values():
            outgoing.put(pending)
        self._dropped.clear()
        if self._reply_bytes > self._channel_bytes:
            if self._stream_channel is not self._channel:
                self._stream_channel.close()
            self._channel_bytes = self._reply_bytes
            self._stream_channel = open_channel(self.address, self._security, self._channel_bytes)
        method = protocol.METHODS["Stream"]
        stream = self._stream_channel.stream_stream(_path("Stream"), response_deserializer=method.read_reply)
        self._call = stream(self._feed(outgoing), metadata=self._metadata)
        return self._call

    def _feed(self, outgoing: SimpleQueue[Pending | None]) -> Iterator[bytes]:
        """Yield messages for gRPC, which asks for the next one when it has sent the one before."""
        while (pending := outgoing.get()) is not None:
            with self._changed:
                if outgoing is not self._outgoing:  # the stream broke meanwhile, and another sends it
                    return
                if pending.id not in self._pending:  # given up before its turn: a slow link would never catch up
                    self._dropped.discard(pending.id)
                    continue
                first, *others = pending.parts(self.max_part)
                item, id_ = pending.message(first), pending.id
            del pending, first  # while it waits, it does not hold the reply
            start, nbytes = monotonic(), len(item) + sum(map(len, others))
            yield item
            del item
            for part in others:
                yield protocol.with_bytes(protocol.Request(id=id_), part)
            if not outgoing.empty():
                self._fed_bytes += nbytes
                self._fed_s += monotonic() - start

    def _knock(self, wait_s: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._closed or self._pending, wait_s):
                return
            data = protocol.EchoRequest().SerializeToString()
            self._call = call = self._methods["Echo"].future(data, timeout=1.0, metadata=self._metadata)
        try:
            call.result()
            self.down = None
        except (grpc.RpcError, grpc.FutureCancelledError):
            pass
        finally:
            with self._changed:
                self._call = None

    def _read(self, call: Any) -> RemoteError:
        """Hand replies to those that wait for them until the stream ends; why it did."""
        self._answered = False
        try:
            for reply in call:
                with self._changed:
                    pending = self._pending.pop(reply.id, None)
                    if pending is None and reply.id not in self._dropped:
                        call.cancel()  # an id was damaged on its way, and its request would wait for ever
                        return RemoteError(f"{self.address} answered what it was not asked", "UNREACHABLE")
                    self._dropped.discard(reply.id)
                self._answered, self.down = True, None
                if pending is not None:
                    self._settle(pending, reply)
        except grpc.RpcError as error:
            most = f"the {size(self._channel_bytes)} that the example explains"
            advice = "Split the model on a larger example, or raise max_reply="
            return from_rpc(error, self.address, f"answers more than {most}. {advice}")
        return RemoteError(f"{self.address} ended the stream: it is going down", "UNREACHABLE")

    def _settle(self, pending: Pending, reply: Any) -> None:
        pending.answered = perf_counter()
        if not reply.HasField("error"):
            pending.reply.set_result(reply)
            return
        error = from_message(reply.error, self.address)
        pending.reply.set_exception(error)

    def _was_closed(self) -> RemoteError:
        return RemoteError(f"the connection to {self.address} was closed", "UNREACHABLE")


def _path(name: str) -> str:
    return f"/{protocol.SERVICE}/{name}"
