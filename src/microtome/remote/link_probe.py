"""Measure the link to a server."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from microtome.results.link import LinkMeasurement

if TYPE_CHECKING:
    from microtome.remote.connection import Connection

_PINGS = 9
#: Bytes of a message that speed is measured with: at first, by how much they grow, and at most.
_FIRST, _GROWTH, _MOST = 16 << 10, 4, 8 << 20
#: Seconds that such a message must take to tell something.
_LONG_S = 0.04


def probe(connection: Connection, timeout: float = 30.0, most: int = _MOST) -> LinkMeasurement:
    """Measure the way to a server.

    Args:
        timeout: Seconds that one message may take.
        most: Bytes of the longest message, if the server takes as many.
    """
    most = min(most, connection.max_part or most)
    pings = [_took(connection, 0, 0, timeout) for _ in range(_PINGS + 1)][1:]  # the first opens the connection
    least = min(pings)
    up = _speed(lambda nbytes: _took(connection, nbytes, 0, timeout), least, most)
    down = _speed(lambda nbytes: _took(connection, 0, nbytes, timeout), least, most)
    return LinkMeasurement(least, median(pings) - least, up, down)


def _took(connection: Connection, up: int, down: int, timeout: float) -> float:
    from microtome.remote import protocol

    request = protocol.EchoRequest(payload=bytes(up), reply_bytes=down)
    start = perf_counter()
    connection.ask("Echo", request, timeout)
    return perf_counter() - start


def _speed(took: Callable[[int], float], rtt_s: float, most: int) -> float:
    """Bytes a second. Links let the first bytes after a pause pass faster, so the last of several messages counts."""
    nbytes = _FIRST
    while (spent := took(nbytes) - rtt_s) < _LONG_S and nbytes * _GROWTH <= most:
        nbytes *= _GROWTH
    again = min(took(nbytes) - rtt_s for _ in range(1 if spent > 1.0 else 2))
    return nbytes / max(again, 1e-6)
