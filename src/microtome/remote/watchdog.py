"""End calls and connections that wait for their peer longer than they may."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import sys
from math import inf
from time import monotonic

from microtome.remote.call_limiter import STUCK_S, CallLimiter, OpenCall
from microtome.remote.health import Health
from microtome.remote.optional_packages import grpc
from microtome.remote.peers import Peers
from microtome.remote.service import Service

log = logging.getLogger("microtome.remote")

#: Seconds between two looks at the calls, and at whether connections are to be counted.
_TICK_S, _TRIM_S = 0.1, 0.02
#: Seconds between two times that memory is given back, after calls were ended.
_FREE_S = 0.5
#: Seconds that a peer may take: for the message of a call that brings one, for the next part of a request, for a reply.
MESSAGE_S, PART_S, WRITE_S = 30.0, 30.0, 20.0
#: Bytes a second below which a peer is slow: replies may take as long as that needs, and where others wait for room,
#: requests in parts and profiles may not take longer.
SLOW = 256 << 10


class Watchdog:
    """Looks again and again at the calls of a server, and at its connections."""

    def __init__(self, service: Service, health: Health, peers: Peers) -> None:
        self._service = service
        self._health = health
        self._peers = peers

    async def run(self) -> None:
        looked = freed = monotonic()
        dropped = 0
        while True:
            await asyncio.sleep(_TRIM_S)
            now = monotonic()
            try:
                closed = self._peers.trim(now)
                if closed:
                    log.warning("too many connections", extra={"closed": closed})
                if now - looked > _TICK_S:
                    looked = now
                    self.look(now)
            except Exception:  # without it nothing would bound the time that peers take
                log.exception("watchdog")
            if self._service.calls.dropped > dropped and now - freed > _FREE_S:
                freed, dropped = now, self._service.calls.dropped
                await asyncio.to_thread(_free)

    def look(self, now: float) -> None:
        """End what waits too long at a time of `monotonic`."""
        service = self._service
        for calls in (service.calls, self._health.asking, self._health.watching):
            for call in calls:
                self._look_at(calls, call, now)
        if service.replies.is_full and any(call.requests and call.writing is None for call in service.calls):
            self._end_stuck([call for call in service.calls if call.is_stream or call.requests], now)
        if service.echoes.is_contended:
            self._end_stuck([call for call in service.calls if call.reply_pool is service.echoes], now)
        if service.profiles.is_contended:
            self._end_stuck([call for call in service.calls if call.reply_pool is service.profiles], now, SLOW)
        if service.uploads.is_contended:
            self._end_slow_upload(now)

    def _look_at(self, calls: CallLimiter, call: OpenCall, now: float) -> None:
        if call.writing is not None:
            began, nbytes = call.writing
            if now - began > WRITE_S + nbytes / SLOW:
                self._disconnect(calls, call)
        elif call.upload is not None:
            if now - call.upload.last > PART_S:
                call.end(grpc.StatusCode.DEADLINE_EXCEEDED, f"expected the next part of a request in {PART_S:g} s")
        elif not call.is_stream and not call.has_spoken and now - call.quiet_since > MESSAGE_S:
            call.end(grpc.StatusCode.DEADLINE_EXCEEDED, f"expected a message in {MESSAGE_S:g} s")

    def _end_stuck(self, calls: list[OpenCall], now: float, bytes_per_s: float = inf) -> None:
        """While others wait for room, disconnect the peer whose reply has been written longest.

        Args:
            bytes_per_s: The rate at which a peer must receive its reply, beyond the first `STUCK_S`.
        """
        stuck = [
            (call.writing[0], id(call), call)
            for call in calls
            if call.writing is not None and now - call.writing[0] > STUCK_S + call.writing[1] / bytes_per_s
        ]
        if stuck:
            self._disconnect(self._service.calls, min(stuck)[2])

    def _disconnect(self, calls: CallLimiter, call: OpenCall) -> None:
        calls.disconnect(call, "the reply was not taken")
        log.warning("disconnected", extra={"peer": call.peer, "reason": "it does not take its replies"})

    def _end_slow_upload(self, now: float) -> None:
        """End the slowest upload in parts while other requests wait for room."""
        slow = [
            (call.upload.rate(now), id(call), call)
            for call in self._service.calls
            if call.upload is not None and now - call.upload.began > 1.0 and call.upload.rate(now) < SLOW
        ]
        if slow:
            why = f"expected a request in parts at {SLOW >> 10} KiB/s or more while others wait"
            min(slow)[2].end(grpc.StatusCode.RESOURCE_EXHAUSTED, why)


def _free() -> None:
    """Return memory of ended calls to the system: their frames may be cycles, and glibc keeps what is freed."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
