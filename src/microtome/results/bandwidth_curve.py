"""The best candidate for every bandwidth.

What a candidate takes at `x` seconds a byte is a line for the latency, `fixed + bytes * x`, and, for the slowest step
of a pipeline, the greater of a constant and a line through 0, `max(fixed, bytes * x)`. Walking from the slowest link to
the fastest, the next to win is the first whose curve crosses the winner's: nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from microtome.results.link import Link
from microtome.results.plan import Candidate, Objective, Span


class _Curve(NamedTuple):
    """The time of a candidate over the bandwidth: a fixed part, and the bytes that cross the link."""

    fixed: float
    nbytes: int
    candidate: Candidate


def spans(candidates: Sequence[Candidate], objective: Objective, link: Link) -> tuple[Span, ...]:
    """The bandwidths of each winner, in order."""
    if objective == "energy":  # a byte takes the same energy on a slow link
        return (Span(0.0, inf, min(candidates, key=lambda candidate: candidate.rank("energy"))),)
    make = _latency if objective == "latency" else _slowest
    curves = [make(candidate, link) for candidate in candidates]
    winner = min(curves, key=lambda curve: (curve.nbytes, curve.fixed))
    bandwidth = 0.0
    found: list[Span] = []
    while True:
        crossings = [(_crossing(winner, curve, objective), curve) for curve in curves]
        ahead = [(max(at, bandwidth), curve.fixed, curve) for at, curve in crossings if at is not None]
        if not ahead:
            return (*found, Span(bandwidth, inf, winner.candidate))
        at, _, beats = min(ahead, key=lambda one: one[:2])
        if at > bandwidth:
            found.append(Span(bandwidth, at, winner.candidate))
        winner, bandwidth = beats, at


def _latency(candidate: Candidate, link: Link) -> _Curve:
    """All steps, the links' without the time that depends on the bandwidth."""
    crossed = len(candidate.sent_bytes)
    busy = candidate.seconds("run", "encode", "decode")
    nbytes = sum(candidate.sent_bytes) + crossed * candidate.back_bytes
    return _Curve(busy + crossed * link.rtt_s, nbytes, candidate)


def _slowest(candidate: Candidate, link: Link) -> _Curve:
    """The slowest device, and the greater of what crosses and what comes back, since a link goes both ways at once."""
    devices = {step.where for step in candidate.steps}
    busy = max(candidate.seconds("run", "encode", "decode", where=where) for where in devices)
    crossing = max((*candidate.sent_bytes, candidate.back_bytes)) if candidate.sent_bytes else 0
    return _Curve(busy, crossing, candidate)


def _crossing(winner: _Curve, other: _Curve, objective: Objective) -> float | None:
    """The bandwidth from which on the other is better; None: it never is, on a link that is faster still.

    One that sends no more bytes and was not better on a slower link will not be; one that sends more can be.
    """
    if other.fixed >= winner.fixed or other.nbytes <= winner.nbytes:
        return None
    if objective == "latency":
        return (other.nbytes - winner.nbytes) / (winner.fixed - other.fixed)
    return other.nbytes / winner.fixed
