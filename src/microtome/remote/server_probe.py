"""Probe a server: the bandwidth and latency of the link to it, and the profile of the model on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

from microtome.errors import BadFile, RemoteError
from microtome.remote import protocol
from microtome.remote.connection import Connection
from microtome.results.base import parse
from microtome.results.link import LinkMeasurement
from microtome.results.profile import Profile
from microtome.units import size

_PINGS = 9
#: Bytes of the messages that bandwidth is measured with: the first, the factor between two, and the longest.
_FIRST_BYTES, _GROWTH, _MAX_BYTES = 16 << 10, 4, 8 << 20
#: Seconds from which the duration of a message is precise enough.
_MIN_DURATION_S = 0.04
#: The most bytes of a profile: in all beside its calls, and for each call. And what a message takes beside it.
_PROFILE_BYTES, _PROFILE_CALL_BYTES, _ENVELOPE_BYTES = 64 << 10, 16 << 10, 16


def measure_link(connection: Connection, timeout: float = 30.0, max_bytes: int = _MAX_BYTES) -> LinkMeasurement:
    """Measure the link to a server.

    Args:
        timeout: Seconds that one message may take.
        max_bytes: Bytes of the longest message, if the server accepts as many.
    """

    def round_trip_s(up: int, down: int) -> float:
        request = protocol.EchoRequest(payload=bytes(up), reply_bytes=down)
        start = perf_counter()
        connection.call("Echo", request, timeout)
        return perf_counter() - start

    max_bytes = min(max_bytes, connection.max_part or max_bytes)
    pings = [round_trip_s(0, 0) for _ in range(_PINGS + 1)][1:]  # the first opens the connection
    rtt_s = min(pings)
    up = _bandwidth(lambda nbytes: round_trip_s(nbytes, 0), pings, max_bytes)
    down = _bandwidth(lambda nbytes: round_trip_s(0, nbytes), pings, max_bytes)
    return LinkMeasurement(rtt_s, median(pings) - rtt_s, up, down)


def _bandwidth(round_trip_s: Callable[[int], float], pings: Sequence[float], max_bytes: int) -> float:
    """Measure bytes per second. Links pass the first bytes after a pause faster, so the last of several counts.

    Of messages so short that pings differ by as much as they take, medians are compared, and their duration is at least
    the spread of pings.
    """
    nbytes, rtt_s = _FIRST_BYTES, min(pings)
    while (spent_s := round_trip_s(nbytes) - rtt_s) < _MIN_DURATION_S and nbytes * _GROWTH <= max_bytes:
        nbytes *= _GROWTH
    if spent_s < _MIN_DURATION_S:
        spread_s = median(pings) - rtt_s
        return nbytes / max(median(round_trip_s(nbytes) for _ in pings) - median(pings), spread_s, 1e-6)
    return nbytes / max(min(round_trip_s(nbytes) for _ in range(1 if spent_s > 1.0 else 2)) - rtt_s, 1e-6)


def fetch_profile(connection: Connection, calls: int, timeout: float) -> Profile:
    """Fetch the profile of the model on the server's device.

    Args:
        calls: The number of calls of the model, which bounds the length of the profile.

    Raises:
        RemoteError: If there is none, or it is too long.
        BadFile: If the reply is not a profile.
    """
    limit = min(_PROFILE_BYTES + _PROFILE_CALL_BYTES * calls, protocol.MAX_MESSAGE_BYTES - _ENVELOPE_BYTES)
    expected = f"expected a profile of at most {size(limit)} for the {calls} calls of the model"
    try:
        reply = connection.call("Profile", protocol.ProfileRequest(), timeout, limit + _ENVELOPE_BYTES)
    except RemoteError as error:
        if error.kind != "TOO_LARGE":
            raise
        raise RemoteError(f"{error}: {expected}", "TOO_LARGE") from error
    if len(reply.json) > limit:
        raise RemoteError(f"{connection.address}: {expected}, got {size(len(reply.json))}", "TOO_LARGE")
    source = f"the profile from {connection.address}"
    result = parse(reply.json, source)
    if not isinstance(result, Profile):
        raise BadFile(f"{source} is a {type(result).__name__}, expected a Profile")
    return result
