"""End calls and connections whose peer exceeds its time limits."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import sys
from collections.abc import Callable
from math import inf
from time import monotonic

import grpc

from microtome.remote.admission import CallLimiter, OpenCall, longest_stalled
from microtome.remote.health import Health
from microtome.remote.peers import Peers
from microtome.remote.service import Service

log = logging.getLogger("microtome.remote")

#: Seconds between two checks of the calls, and of the number of connections.
_CHECK_S, _TRIM_S = 0.1, 0.02
#: Seconds between two releases of memory to the system, after calls were evicted.
_FREE_S = 0.5
#: Seconds that a peer may take to send the message of a unary call, to send the next part of a request, and to read a
#: reply.
MESSAGE_S, PART_S, WRITE_S = 30.0, 30.0, 20.0
#: The rate below which a peer is slow. A reply may take the time that it needs at this rate; so may uploads in parts
#: and profiles, if other calls wait for the bytes that they hold.
SLOW_BYTES_PER_S = 256 << 10


class Watchdog:
    """Check the calls and connections of a server periodically."""

    def __init__(self, service: Service, health: Health, peers: Peers) -> None:
        self._service = service
        self._health = health
        self._peers = peers

    async def run(self) -> None:
        checked = freed = monotonic()
        evicted = 0
        while True:
            await asyncio.sleep(_TRIM_S)
            now = monotonic()
            try:
                closed = self._peers.trim(now)
                if closed:
                    log.warning("too many connections", extra={"closed": closed})
                if now - checked > _CHECK_S:
                    checked = now
                    self.check(now)
            except Exception:  # a dead watchdog would leave the time of peers unbounded
                log.exception("watchdog")
            if self._service.calls.evicted > evicted and now - freed > _FREE_S:
                freed, evicted = now, self._service.calls.evicted
                await asyncio.to_thread(_free)

    def check(self, now: float) -> None:
        """End the calls that are over a limit at a time of `monotonic`."""
        service = self._service
        service.sessions.expire()
        if service.training is not None:
            service.training.expire()
        for calls in (service.calls, self._health.checks, self._health.watches):
            for call in calls:
                self._check_call(calls, call, now)
        if service.replies.is_full and any(call.in_flight and call.write_in_progress is None for call in service.calls):
            self._end_stalled(lambda call: bool(call.is_stream or call.in_flight), now)
        if service.echoes.is_contended:
            self._end_stalled(lambda call: call.reply_pool is service.echoes, now)
        if service.profiles.is_contended:
            self._end_stalled(lambda call: call.reply_pool is service.profiles, now, SLOW_BYTES_PER_S)
        if service.uploads.is_contended:
            self._end_slowest_upload(now)

    def _check_call(self, calls: CallLimiter, call: OpenCall, now: float) -> None:
        write = call.write_in_progress
        if write is not None:
            if now - write.started > WRITE_S + write.nbytes / SLOW_BYTES_PER_S:
                self._disconnect(calls, call)
        elif call.upload is not None:
            if now - call.upload.last_part > PART_S:
                call.end(grpc.StatusCode.DEADLINE_EXCEEDED, f"expected the next part of a request in {PART_S:g} s")
        elif not call.is_stream and not call.has_received and now - call.last_read > MESSAGE_S:
            call.end(grpc.StatusCode.DEADLINE_EXCEEDED, f"expected a message in {MESSAGE_S:g} s")

    def _end_stalled(self, is_candidate: Callable[[OpenCall], bool], now: float, min_bytes_per_s: float = inf) -> None:
        """Disconnect the peer that has not read its reply for longest: others wait for the bytes that it holds."""
        stalled = longest_stalled(filter(is_candidate, self._service.calls), now, min_bytes_per_s)
        if stalled is not None:
            self._disconnect(self._service.calls, stalled)

    def _disconnect(self, calls: CallLimiter, call: OpenCall) -> None:
        calls.disconnect(call, "the reply was not read")
        log.warning("disconnected", extra={"peer": call.peer, "reason": "it does not read its replies"})

    def _end_slowest_upload(self, now: float) -> None:
        """End the slowest upload: other requests wait for the bytes that it holds."""
        rates = {
            call: call.upload.bytes_per_s(now)
            for call in self._service.calls
            if call.upload is not None and now - call.upload.started > 1.0
        }
        slowest = min(rates, key=lambda call: rates[call], default=None)
        if slowest is not None and rates[slowest] < SLOW_BYTES_PER_S:
            reason = f"expected a request in parts at {SLOW_BYTES_PER_S >> 10} KiB/s or more while others wait"
            slowest.end(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)


def _free() -> None:
    """Return the memory of evicted calls to the system: their frames may be cycles, and glibc keeps freed blocks."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
