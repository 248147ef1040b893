"""Forward what crosses the end of a stage to the next server, so that it does not travel through the client."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from math import inf
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from microtome.endpoints import explain_endpoint
from microtome.errors import BadQuery, MicrotomeError, NoMatch, RemoteError, describe_error
from microtome.remote import protocol
from microtome.remote.admission import ForwardBudget
from microtome.remote.connection import Connection
from microtome.remote.error_kinds import Late, TooLarge
from microtome.remote.handshake import handshake
from microtome.remote.inference_backend import InferenceBackend
from microtome.remote.logs import MAX_ID_CHARS
from microtome.remote.message import Message
from microtome.remote.security import Security
from microtome.remote.server_pool import ServerPool
from microtome.remote.tls_files import TlsFile, read_pair
from microtome.results.metrics import advise
from microtome.split.boundary.boundary import Boundary
from microtome.units import size

if TYPE_CHECKING:
    from microtome.remote.worker import QueuedRequest

log = logging.getLogger("microtome.remote")

#: Seconds for the handshake with a server: at first, and when it is back; and for which a message is sent again after a
#: broken stream.
_HANDSHAKE_S, _CHECK_S, _RESEND_FOR_S = 5.0, 2.0, 2.0


class ForwardOptions(NamedTuple):
    """The servers to which a server may forward requests, and the TLS and token to connect with."""

    addresses: tuple[str, ...] = ()
    security: Security = Security()

    @classmethod
    def parse(
        cls,
        forward: str | Sequence[str],
        *,
        token: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
    ) -> Self:
        """Check the option `forward` of a server, and those whose names begin with `forward_`."""
        if not isinstance(forward, str | list | tuple):
            raise BadQuery(f"expected forward= as the address of a server or a list of them, got {forward!r:.200}")
        addresses = (forward,) if isinstance(forward, str) else tuple(forward)
        for address in addresses:
            if error := explain_endpoint(address):
                raise BadQuery(f"forward: {error}")
        if not addresses and (token or ca or cert or key):
            option = next(name for name, value in _named(token=token, ca=ca, cert=cert, key=key).items() if value)
            raise BadQuery(f"expected {advise('forward=', '--forward')} with {option}, got no server to forward to")
        if ca is not None:
            TlsFile("forward_ca", ca).read("certificate")
        if (cert is None) != (key is None):
            both = advise("forward_cert= and forward_key=", "--forward-cert and --forward-key")
            raise BadQuery(f"expected both {both}, got one without the other")
        if cert is not None and key is not None:
            read_pair(TlsFile("forward_cert", cert), TlsFile("forward_key", key))
        return cls(addresses, Security(ca=ca, cert=cert, key=key, token=token))


def _named(**values: str | None) -> dict[str, str | None]:
    """Return the values of options by the name of the option."""
    return {
        advise(f"forward_{name}=", f"--forward-{'token-file' if name == 'token' else name}"): value
        for name, value in values.items()
    }


class Forwarder:
    """The servers to which this one sends boundaries, and the requests that wait for their replies.

    Attributes:
        addresses: The servers that the operator allows: a client cannot make this server connect to others.
        budget: The bytes of boundaries on their way, until their requests are answered.
    """

    def __init__(self, served: InferenceBackend, options: ForwardOptions, max_reply: int, max_bytes: int) -> None:
        """Connect to a server when the first request for it comes.

        Args:
            max_reply: The most bytes of a reply.
            max_bytes: The most bytes of boundaries on their way.
        """
        self.addresses = options.addresses
        self._handshake = partial(handshake, model=served, any_torch=True)
        self._max_reply = max_reply
        self.budget = ForwardBudget(max_bytes)
        self._connections = {address: Connection(address, options.security) for address in options.addresses}
        self._numbers = count()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="microtome-forward")

    def check(self, request: QueuedRequest) -> None:
        """Raise if a request cannot be forwarded, before it is computed; the client then sends the boundary itself.

        Raises:
            NoMatch: This server forwards to none of the next servers.
            RemoteError: None of them can be used, as far as is known.
            Late: Too many boundaries are on their way.
        """
        reasons = [self._connections[address].down_reason for address in self._next_servers(request)]
        if None not in reasons:
            raise RemoteError(reasons[0] or "", "UNREACHABLE")
        if not self.budget.has_room():
            raise Late("too many boundaries wait for the next servers: send this one through the client")

    def _next_servers(self, request: QueuedRequest) -> list[str]:
        """Return the servers of the next stage to which this one forwards."""
        servers = [address for address in dict.fromkeys(request.next_hops[0].servers) if address in self.addresses]
        if not servers:
            named = ", ".join(request.next_hops[0].servers)
            raise NoMatch(f"this server does not forward to {named!r:.200}: allow it with --forward")
        return servers

    def send(
        self,
        request: QueuedRequest,
        boundary: Boundary,
        batch: int,
        answer: Callable[[bytes], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Send the boundary to the next server, without waiting for it.

        Args:
            batch: The number of requests that were computed together.
            answer: Called with the message of the reply; `fail`: with the error if there is none.
        """
        servers = self._next_servers(request)
        self.budget.add(boundary.nbytes)
        request.mark_forwarded(boundary.nbytes)
        header = protocol.Request(
            id=f"{request.id[:MAX_ID_CHARS]}/{next(self._numbers)}",  # the requests of all clients share a stream
            codec=request.next_hops[0].codec or request.codec,
            stage=request.stage.following.to_message(),
            forward=request.next_hops[1:],
        )
        left_s = request.deadline - perf_counter()
        deadline = None if left_s == inf else monotonic() + left_s
        message = Message(header, deadline=deadline, reply_bytes=self._max_reply)
        message.reply.add_done_callback(partial(self._on_reply, request, message, servers, batch, answer, fail))
        self._sender.submit(self._send, request, message, boundary, servers)

    def _send(self, request: QueuedRequest, message: Message, boundary: Boundary, servers: list[str]) -> None:
        start = perf_counter()
        try:
            pool = self._connect(servers)
            message.encode(boundary, request.codec)
            request.timing["encode_s"] = perf_counter() - start
            limit = min(connection.hello.max_message for connection in pool.ready)
            if message.nbytes > limit:
                raise TooLarge(f"{pool.address} accepts {size(limit)}, got a boundary of {size(message.nbytes)}")
            message.retry_until = min(monotonic() + _RESEND_FOR_S, message.deadline or inf)
            pool.submit(message)
        except BaseException as error:  # noqa: BLE001  the client is told
            message.reply.set_exception(error)

    def _connect(self, addresses: list[str]) -> ServerPool:
        """Return the connections to the servers of a stage; the first time, after a handshake with each.

        One that fails is left out until it is back, so that no other request waits for it in this thread.
        """
        pool = ServerPool([self._connections[address] for address in addresses])
        for connection in pool.connections:
            if connection.hello is None and connection.down_reason is None:
                try:
                    self._handshake(connection, timeout=_HANDSHAKE_S)
                except RemoteError as error:
                    connection.down_reason = str(error)
                    log.warning("left out until it is back: %s", error, extra={"server": connection.address})
                connection.watch(partial(self._handshake, timeout=_CHECK_S))
        if not pool.ready:
            raise RemoteError(pool.down_reason or "", "UNREACHABLE")
        return pool

    def _on_reply(
        self,
        request: QueuedRequest,
        message: Message,
        servers: list[str],
        batch: int,
        answer: Callable[[bytes], None],
        fail: Callable[[BaseException], None],
        future: Future[Any],
    ) -> None:
        if (error := future.exception()) is not None:
            extra = {"request": request.id[:MAX_ID_CHARS], "servers": servers}
            log.warning("the next server did not answer", extra=extra)
            reason = str(error) if isinstance(error, MicrotomeError) else describe_error(error)
            fail(error if isinstance(error, RemoteError) else RemoteError(reason, "UNREACHABLE"))
            return
        reply = future.result()
        assert message.connection is not None
        reply.timing.server = message.connection.address
        timing = protocol.Timing(**request.timing, batch=batch)
        header = protocol.Reply(id=request.id, timing=timing, forwarded=[reply.timing, *reply.forwarded])
        answer(protocol.with_payload(header, reply.output))

    def close(self) -> None:
        self._sender.shutdown(wait=True, cancel_futures=True)
        for connection in self._connections.values():
            connection.close()
