"""The connection to one server: unary calls, and a stream of requests that is reopened when it breaks.

Each request is answered at most once.
"""

from __future__ import annotations

import logging
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from time import monotonic, perf_counter, sleep
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from microtome.endpoints import SCHEMES, explain_endpoint
from microtome.errors import BadQuery, RemoteError
from microtome.remote import protocol
from microtome.remote.error_kinds import TRANSIENT, from_message, from_rpc, is_connection_refused
from microtome.remote.message import Message
from microtome.remote.protocol import DEFAULT_REPLY_BYTES, MAX_MESSAGE_BYTES, METHODS
from microtome.remote.security import Security, is_loopback
from microtome.results.metrics import advise
from microtome.units import size

log = logging.getLogger("microtome.remote")

#: Seconds before a broken stream is opened again: at first, and at most.
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.02, 1.0
#: Seconds between the attempts of a unary call.
_RETRY_INTERVAL_S = 0.1
#: Seconds of refused connections after which a first call fails: nothing listens there, or it would have started.
_REFUSED_S = 1.0
#: Bytes and seconds of sending from which the bandwidth can be computed: buffers accept the first bytes at once.
_MIN_SENT_BYTES, _MIN_SENDING_S = 4 << 20, 0.2
#: The most bytes of the reply to Hello: a few strings, and the addresses of all cuts.
_MAX_HELLO_BYTES = 4 << 20


class Connection:
    """A connection to one server.

    Attributes:
        down_reason: Why no stream is open although requests wait for one; None: one is, or none was needed yet.
        hello: The server's reply to `Hello`; None: no handshake yet.
        max_part: The most bytes of a boundary that the server accepts in one message; None: any number.
        reconnects: How often the stream broke.
    """

    def __init__(self, address: str, security: Security | None = None) -> None:
        self.address = address
        self.down_reason: str | None = None
        self.hello: Any = None
        self.max_part: int | None = None
        self.reconnects = 0
        self._security = security or Security()
        self._metadata = self._security.metadata
        _check_address(address, self._security)
        self._channel = self._stream_channel = _open_channel(address, self._security)
        self._channel_bytes = self._reply_bytes = DEFAULT_REPLY_BYTES
        self._unary = {
            name: self._channel.unary_unary(method.path) for name, method in METHODS.items() if not method.is_stream
        }
        self._changed = threading.Condition()
        self._pending: dict[str, Message] = {}
        self._cancelled: set[str] = set()  # ids of this stream whose replies are dropped
        self._outgoing: SimpleQueue[Message | None] | None = None
        self._call: Any = None
        self._closed = False
        self._has_answered = False
        self._was_reached = False  # by a unary call
        self._sent_bytes, self._sending_s = 0, 0.0
        self._thread: threading.Thread | None = None
        self._check: Callable[[Connection], object] | None = None

    def call(self, name: str, request: Any, timeout: float, reply_bytes: int = DEFAULT_REPLY_BYTES) -> Any:
        """Call a unary method, again and again until the server can be reached.

        A first call fails early where nothing listens; a server that was reached before may be restarting.

        Args:
            reply_bytes: The most bytes of the reply, if that is more than every channel accepts.

        Raises:
            RemoteError: If there is no reply.
        """
        data = request.SerializeToString()
        if reply_bytes <= DEFAULT_REPLY_BYTES:
            return self._retry(self._unary[name], name, data, timeout, DEFAULT_REPLY_BYTES)
        reply_bytes = min(reply_bytes, MAX_MESSAGE_BYTES)
        with _open_channel(self.address, self._security, reply_bytes) as channel:
            return self._retry(channel.unary_unary(METHODS[name].path), name, data, timeout, reply_bytes)

    def _retry(self, method: Any, name: str, data: bytes, timeout: float, reply_bytes: int) -> Any:
        start = monotonic()
        while True:
            left = start + timeout - monotonic()
            try:
                reply = method(data, timeout=max(left, 0.001), metadata=self._metadata)
                self._was_reached = True
                return self._parse(name, reply)
            except grpc.RpcError as rpc_error:
                too_large = f"answers {name} with more than {size(reply_bytes)}"
                error = from_rpc(rpc_error, self.address, self._security, too_large)
                is_final = error.kind in ("REFUSED", "TOO_LARGE") or left < _RETRY_INTERVAL_S
                if not self._was_reached and is_connection_refused(rpc_error):
                    is_final |= monotonic() - start >= _REFUSED_S
                # Retry here: gRPC's own retries would lose the reason why the server cannot be reached.
                if is_final or rpc_error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise error from rpc_error
            except ValueError as error:  # raised by gRPC for a closed channel
                raise self._closed_error() from error
            sleep(_RETRY_INTERVAL_S)

    def _parse(self, name: str, reply: bytes) -> Any:
        if name == "Hello" and len(reply) > _MAX_HELLO_BYTES:
            limit = size(_MAX_HELLO_BYTES)
            raise RemoteError(f"{self.address} answers {size(len(reply))}, expected at most {limit}", "REFUSED")
        try:
            return METHODS[name].parse_reply(reply)
        except (DecodeError, UnicodeDecodeError) as error:
            raise RemoteError(f"{self.address} answers {name} with bytes that are not its reply", "REFUSED") from error

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, message: Message) -> None:
        """Send a message as soon as there is a stream, and again if the stream breaks before the reply."""
        with self._changed:
            if self._closed:
                raise self._closed_error()
            self._pending[message.id] = message
            if message.reply_bytes > self._reply_bytes:  # needs another stream, opened when this one has its replies
                self._reply_bytes = min(1 << (message.reply_bytes - 1).bit_length(), MAX_MESSAGE_BYTES)
                self._end_stream()
            outgoing = self._outgoing
            self._start()
        if outgoing is not None:  # without the lock, which the thread that sends takes next
            outgoing.put(message)

    def watch(self, check: Callable[[Connection], object]) -> None:
        """Whenever the server is back after it was down, call a check, which raises RemoteError to keep it down."""
        with self._changed:
            self._check = check
            if self.down_reason is not None:
                self._start()

    def _start(self) -> None:
        """Start the thread of the stream, or wake it up."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="microtome-client", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def is_idle(self) -> bool:
        """Whether no message waits for a reply."""
        return not self._pending

    def is_late(self) -> bool:
        """Whether the server has yet to answer a request that nobody waits for any more, or whose deadline has passed.

        A server that hangs does not break the stream: this is how it is noticed early.
        """
        with self._changed:
            oldest = next(iter(self._pending.values()), None)
            is_overdue = oldest is not None and oldest.deadline is not None and monotonic() > oldest.deadline
            return bool(self._cancelled) or is_overdue

    def pop_bandwidth(self) -> float | None:
        """Return the bytes per second while requests waited to be sent, since the last call; None: too few did."""
        nbytes, spent_s = self._sent_bytes, self._sending_s
        if nbytes < _MIN_SENT_BYTES or spent_s < _MIN_SENDING_S:
            return None
        self._sent_bytes, self._sending_s = 0, 0.0
        return nbytes / spent_s

    def cancel(self, message: Message) -> None:
        """Stop waiting for a reply: the message is not sent again, and its reply is dropped."""
        with self._changed:
            if self._pending.pop(message.id, None) is not None and self._call is not None:
                self._cancelled.add(message.id)

    def close(self) -> None:
        """Fail all requests in flight, and close the channels."""
        with self._changed:
            self._closed = True
            unanswered, self._pending = list(self._pending.values()), {}
            self._end_stream()
            if self._call is not None:
                self._call.cancel()
            self._changed.notify_all()
        for message in unanswered:
            message.fail(self._closed_error())
        if self._thread is not None:
            self._thread.join()
        self._stream_channel.close()
        self._channel.close()

    def _end_stream(self) -> None:
        """Send nothing more on the open stream."""
        if self._outgoing is not None:
            self._outgoing.put(None)
            self._outgoing = None

    # -- the stream, in a thread of its own ----------------------------------------------------------------------------

    def _run(self) -> None:
        """Keep a stream open while there are requests, with exponential backoff."""
        backoff_s = _MIN_BACKOFF_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._pending or self.down_reason)
                if self._closed:
                    return
                call = self._open_stream() if self._pending else None
            if call is None:  # the server is down and nothing waits for it: find out when it is back
                self._ping(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                continue
            error = self._read_replies(call)
            with self._changed:
                is_planned = self._outgoing is None and error.kind == "UNREACHABLE"
                self._end_stream()
                self._call = None
                self._cancelled.clear()
                if self._closed:
                    return
                if is_planned:
                    continue
                if self._has_answered:
                    backoff_s = _MIN_BACKOFF_S
                exhausted = self._remove_exhausted(error)
            for message in exhausted:  # without the lock: another connection may take the message
                message.fail(error)
            exhausted.clear()
            with self._changed:
                self._changed.wait_for(lambda: self._closed, backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _remove_exhausted(self, error: RemoteError) -> list[Message]:
        """Remove and return the messages that are not sent again after a broken stream."""
        self.down_reason = str(error)
        self.reconnects += 1
        is_final = error.kind in ("REFUSED", "TOO_LARGE")
        exhausted = [one for one in self._pending.values() if is_final or monotonic() > one.retry_until]
        for message in exhausted:
            del self._pending[message.id]
        log.warning("the stream broke", extra={"server": self.address, "reason": str(error)})
        return exhausted

    def _open_stream(self) -> Any:
        """Open a stream, and send all pending messages on it."""
        self._outgoing = outgoing = SimpleQueue[Message | None]()
        for message in self._pending.values():
            outgoing.put(message)
        if self._reply_bytes > self._channel_bytes:
            if self._stream_channel is not self._channel:
                self._stream_channel.close()
            self._channel_bytes = self._reply_bytes
            self._stream_channel = _open_channel(self.address, self._security, self._channel_bytes)
        method = METHODS["Stream"]
        stream = self._stream_channel.stream_stream(method.path, response_deserializer=method.parse_reply)
        self._call = stream(self._messages(outgoing), metadata=self._metadata)
        return self._call

    def _messages(self, outgoing: SimpleQueue[Message | None]) -> Iterator[bytes]:
        """Yield bytes to gRPC, which asks for the next ones when it has sent the last."""
        while (message := outgoing.get()) is not None:
            with self._changed:
                if outgoing is not self._outgoing:  # the stream broke meanwhile, and another one sends the message
                    return
                if message.id not in self._pending:  # cancelled: do not waste a slow link on it
                    self._cancelled.discard(message.id)
                    continue
                first, *others = message.parts(self.max_part)
                data, message_id = message.first_part(first), message.id
            del message, first  # keep neither alive while this generator is suspended
            start, nbytes = monotonic(), len(data) + sum(map(len, others))
            yield data
            del data
            for part in others:
                yield protocol.with_payload(protocol.Request(id=message_id), part)
            if not outgoing.empty():
                self._sent_bytes += nbytes
                self._sending_s += monotonic() - start

    def _ping(self, wait_s: float) -> None:
        """Clear `down_reason` if the server answers after `wait_s`, unless a request comes first."""
        with self._changed:
            if self._changed.wait_for(lambda: self._closed or self._pending, wait_s):
                return
            data = protocol.EchoRequest().SerializeToString()
            self._call = call = self._unary["Echo"].future(data, timeout=1.0, metadata=self._metadata)
        try:
            call.result()
            if self._check is not None:
                self._check(self)
            self.down_reason = None
        except (grpc.RpcError, grpc.FutureCancelledError):
            pass
        except RemoteError as error:
            if error.kind not in TRANSIENT and str(error) != self.down_reason:
                log.warning("not used: %s", error, extra={"server": self.address})
                self.down_reason = str(error)
        finally:
            with self._changed:
                self._call = None

    def _read_replies(self, call: Any) -> RemoteError:
        """Resolve messages until the stream ends, and return the reason why it did."""
        self._has_answered = False
        try:
            for reply in call:
                with self._changed:
                    message = self._pending.pop(reply.id, None)
                    if message is None and reply.id not in self._cancelled:
                        call.cancel()  # the id is corrupt, and the message that it belongs to would wait for ever
                        return RemoteError(f"{self.address} answered a request that was not sent", "UNREACHABLE")
                    self._cancelled.discard(reply.id)
                self._has_answered, self.down_reason = True, None
                if message is not None:
                    message.replied_at = perf_counter()
                    if reply.HasField("error"):
                        message.fail(from_message(reply.error, self.address))
                    else:
                        message.reply.set_result(reply)
                del message, reply  # keep neither alive while waiting for the next reply
        except grpc.RpcError as error:
            limit = f"answers with more than the {size(self._channel_bytes)} expected from the example"
            too_large = f"{limit}. Split the model on a larger example, or raise max_reply="
            return from_rpc(error, self.address, self._security, too_large)
        return RemoteError(f"{self.address} ended the stream: it is shutting down", "UNREACHABLE")

    def _closed_error(self) -> RemoteError:
        return RemoteError(f"the connection to {self.address} was closed", "UNREACHABLE")


def _check_address(address: str, security: Security) -> None:
    """Raise if this is not an address; warn if a token would be sent there in plain text."""
    if error := explain_endpoint(address):
        raise BadQuery(error)
    if security.token is not None and not security.is_encrypted and not _is_local(address):
        warnings.warn(
            f"the token is sent to {address} without TLS: anybody on the way can read and use it. Encrypt the "
            f"connection with {advise('tls=True or ca=', '--tls or --ca')}",
            RuntimeWarning,
            stacklevel=4,
        )


def _is_local(address: str) -> bool:
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    scheme = next((scheme for scheme in SCHEMES if address.startswith(scheme)), "")
    return is_loopback(address.removeprefix(scheme).removeprefix("///"))


def _open_channel(address: str, security: Security, reply_bytes: int = DEFAULT_REPLY_BYTES) -> grpc.Channel:
    """Open a channel that accepts replies of at most `reply_bytes`: the server is not trusted with our memory."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", reply_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: the limit applies to compressed bytes
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),  # a request may take long
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if security.server_name is not None:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    credentials = security.credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)
