"""The way of a request over the servers of several stages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any

from microtome.addresses import INPUT
from microtome.errors import RemoteError
from microtome.remote import protocol
from microtome.remote.error_kinds import TRANSIENT
from microtome.remote.message import Message
from microtome.remote.request import RemoteRequest, Route
from microtome.remote.server_pool import ServerPool
from microtome.remote.stage_ref import StageRef
from microtome.units import size

log = logging.getLogger("microtome.remote")

#: Kinds of errors after which a request is sent again without forwarding: a server may have been restarted with others
#: to forward to.
_WITHOUT_FORWARDING = TRANSIENT | {"NO_CUT"}
#: Kinds of these that other requests would meet as well; and seconds for which these are not forwarded either. The
#: others are of one request, such as its deadline, or too many requests that wait for the next server.
_BREAKS_FORWARDING, _FORWARD_AGAIN_S = frozenset({"UNREACHABLE", "DRAINING", "NO_CUT"}), 5.0


class Chain:
    """The servers of the stages that do not run here, in order.

    A server replies with what crosses the end of its stage, which is sent to the next one; or it sends that itself, if
    it is allowed to. The last reply is that of the request.

    Attributes:
        pools: The servers of each stage.
    """

    def __init__(self, pools: Sequence[ServerPool]) -> None:
        self.pools = tuple(pools)
        self._paused_until: dict[int, float] = {}  # by the stage whose servers could not forward, times of `monotonic`

    @property
    def address(self) -> str:
        return " → ".join(pool.address for pool in self.pools)

    @property
    def down_reason(self) -> str | None:
        """Why a stage has no server; None: each has one."""
        return next((pool.down_reason for pool in self.pools if pool.down_reason is not None), None)

    def is_idle(self) -> bool:
        """Whether no request waits for a reply."""
        return all(pool.is_idle() for pool in self.pools)

    def ends_here(self, route: Route) -> bool:
        """Whether this device runs the last stage, after the servers."""
        return route.at is not None and route.first_stage + len(self.pools) == len(route.cuts)

    def submit(self, request: RemoteRequest, retry_until: float, reply_bytes: Sequence[int]) -> None:
        """Send the boundary of a request to the first server.

        Args:
            retry_until: Until when it is sent again after a broken stream.
            reply_bytes: The most bytes of the reply of each server.

        Raises:
            RemoteError: The server does not accept so many bytes.
        """
        chained = _ChainRequest(self, request, retry_until, reply_bytes)
        assert request.boundary is not None
        with request.timed("encode_s"):
            message = chained.make_message(0)
            message.encode(request.boundary, request.route.codec)
        chained.check_size(0, max(message.nbytes, request.boundary.nbytes))  # encoded, and decoded
        request.mark_sent(is_alone=self.is_idle())
        chained.send(message, 0)

    def may_forward(self, hop: int) -> bool:
        """Whether the servers of a stage may be asked to forward: none of them has failed to just now."""
        return monotonic() >= self._paused_until.get(hop, 0.0)

    def pause_forwarding(self, hop: int) -> None:
        """Send what crosses the end of a stage through this client for a while."""
        self._paused_until[hop] = monotonic() + _FORWARD_AGAIN_S

    def cancel(self, request: RemoteRequest) -> None:
        """Stop waiting for a request."""
        request.is_cancelled = True
        if request.message is not None:
            for pool in self.pools:
                pool.cancel(request.message)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


class _ChainRequest:
    """The state of one request in a chain. It advances in the threads of the connections to the servers."""

    def __init__(self, chain: Chain, request: RemoteRequest, retry_until: float, reply_bytes: Sequence[int]) -> None:
        self._chain = chain
        self._pools = chain.pools
        self._request = request
        self._retry_until = retry_until
        self._reply_bytes = reply_bytes
        self._may_forward = True
        self._forwards: dict[int, int] = {}  # the number of stages for which a message to each is forwarded

    def make_message(self, hop: int) -> Message:
        """Return a message to the servers of one stage, without a boundary."""
        route = self._request.route
        if not route.later:  # one server, which runs everything after the cut
            return self._request.make_message(self._reply_bytes[0])
        stage = StageRef(route.cuts, route.first_stage + hop)
        self._forwards[hop] = self._num_forwards(hop)
        last = hop + self._forwards[hop]
        forward = [
            protocol.Hop(
                servers=[connection.address for connection in self._pools[later].ready],
                codec=route.reply_codec(later),
            )
            for later in range(hop + 1, last + 1)
        ]
        return self._request.make_message(self._reply_bytes[last], hop, stage=stage.to_message(), forward=forward)

    def _num_forwards(self, hop: int) -> int:
        """Return for how many stages a server forwards the request: to servers that each of those before it allows."""
        number = 0
        may_forward = self._may_forward and self._chain.may_forward(hop)
        while may_forward and hop + number + 1 < len(self._pools):
            pool, after = self._pools[hop + number], self._pools[hop + number + 1]
            addresses = {connection.address for connection in after.ready}
            if not all(addresses.intersection(connection.hello.forwards) for connection in pool.ready):
                break
            number += 1
        return number

    def check_size(self, hop: int, nbytes: int) -> None:
        """Raise if a server of a stage does not accept a boundary of so many bytes."""
        limit = min(connection.hello.max_message for connection in self._pools[hop].ready)
        if nbytes > limit:
            at = (self._request.route.at, *self._request.route.later)[hop]
            raise too_large(nbytes, at, self._pools[hop].address, limit)

    def send(self, message: Message, hop: int) -> None:
        message.retry_until = self._retry_until
        self._request.message = message
        message.reply.add_done_callback(partial(self._on_reply, message, hop))
        self._pools[hop].submit(message)

    def _on_reply(self, message: Message, hop: int, reply: Future[Any]) -> None:
        if self._request.is_cancelled:
            return
        try:
            self._advance(message, hop, reply)
        except BaseException as error:  # noqa: BLE001  raised where the output is waited for
            self._request.reply.set_exception(error)

    def _advance(self, message: Message, hop: int, future: Future[Any]) -> None:
        """Send what crosses the end of a stage to the servers of the next one, or end with the last reply."""
        request, forwards = self._request, self._forwards.get(hop, 0)
        error = future.exception()
        if isinstance(error, RemoteError) and error.kind in _WITHOUT_FORWARDING and forwards:
            log.warning("sending the boundaries of a chain through the client", extra={"reason": str(error)})
            self._may_forward = False
            if error.kind in _BREAKS_FORWARDING:
                self._chain.pause_forwarding(hop)
            again = self.make_message(hop)
            again.set_payload(message.payload)
            self.send(again, hop)
            return
        reply = future.result()
        if len(reply.forwarded) != forwards:
            server = self._pools[hop].address
            raise RemoteError(f"{server} forwarded a request {len(reply.forwarded)} times, not {forwards}", "UNKNOWN")
        request.add_reply(message, reply)
        after = hop + forwards + 1
        if after == len(self._pools):
            request.reply.set_result(reply)
            return
        request.payload, request.stage = reply.output, request.route.first_stage + after
        self.check_size(after, len(reply.output))
        following = self.make_message(after)
        following.set_payload(reply.output)
        self.send(following, after)


def too_large(nbytes: int, at: str | None, server: str, limit: int) -> RemoteError:
    """Return the error of a boundary that is larger than a server accepts."""
    return RemoteError(
        f"{size(nbytes)} cross at {at or INPUT!r}, and {server} accepts {size(limit)}: raise --max-message there, or "
        "cut elsewhere",
        "TOO_LARGE",
    )
