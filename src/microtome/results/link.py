"""The link between two devices, as specified or as measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from microtome.errors import BadQuery
from microtome.units import parse_rate, parse_seconds, rate, seconds


@dataclass(frozen=True, init=False)
class Link:
    """The bandwidth and the delay of a link, the same both ways.

    Attributes:
        bytes_per_s: The bandwidth, one way.
        rtt_s: Seconds of a round trip of a short message: half of it is the delay of any message.
        jitter_s: Seconds that a message may be late.
        joules_per_byte: Joules of the first device's radio for a byte, sent or received; None: unknown.

    >>> link = Link("20Mbps", rtt="15ms")
    >>> link.seconds(25_000)                        # half of 15 ms, and 10 ms for 200,000 bits
    0.0175
    >>> link
    Link('20 Mbps', rtt='15 ms')
    """

    bytes_per_s: float
    rtt_s: float
    jitter_s: float
    joules_per_byte: float | None

    def __init__(
        self,
        bandwidth: float | str,
        rtt: float | str = 0.0,
        jitter: float | str = 0.0,
        joules_per_byte: float | None = None,
    ) -> None:
        """Take strings such as `"20Mbps"` and `"15ms"`; numbers are bits per second, and seconds.

        Small integers, such as `Link(20, rtt=15)`, are more likely meant in other units, and are refused.
        """
        if isinstance(bandwidth, int) and 0 < bandwidth < 1000:
            raise BadQuery(f"expected a bandwidth with its unit, such as '{bandwidth}Mbps', got {bandwidth}")
        for name, time in (("rtt", rtt), ("jitter", jitter)):
            if isinstance(time, int) and time > 0:
                raise BadQuery(
                    f"expected {name} with its unit, such as '{time}ms', or in seconds as a float, got {time}"
                )
        if joules_per_byte is not None and not 0 <= joules_per_byte < float("inf"):
            raise BadQuery(f"expected joules_per_byte of 0 or more, got {joules_per_byte!r}")
        object.__setattr__(self, "bytes_per_s", parse_rate(bandwidth))
        object.__setattr__(self, "rtt_s", parse_seconds(rtt))
        object.__setattr__(self, "jitter_s", parse_seconds(jitter))
        object.__setattr__(self, "joules_per_byte", joules_per_byte)

    def seconds(self, nbytes: float) -> float:
        """Return the time of a message one way, without jitter."""
        return self.rtt_s / 2 + nbytes / self.bytes_per_s

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Link:
        return cls(8 * data["bytes_per_s"], data["rtt_s"], data["jitter_s"], data["joules_per_byte"])

    def __repr__(self) -> str:
        parts = [repr(rate(self.bytes_per_s)), f"rtt={seconds(self.rtt_s)!r}"]
        parts += [f"jitter={seconds(self.jitter_s)!r}"] if self.jitter_s else []
        parts += [f"joules_per_byte={self.joules_per_byte:g}"] if self.joules_per_byte is not None else []
        return f"Link({', '.join(parts)})"


class LinkMeasurement(NamedTuple):
    """The measured bandwidth and delay of a link.

    Attributes:
        rtt_s: Seconds of a round trip of a short message, the least of several.
        jitter_s: The median of those, less the least.
        up_bytes_per_s: The bandwidth to the server; `down_bytes_per_s` from it.
    """

    rtt_s: float
    jitter_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float

    @property
    def link(self) -> Link:
        """The link for a plan, with the bandwidth to the server: requests are long and replies short."""
        return Link(8 * self.up_bytes_per_s, rtt=self.rtt_s, jitter=self.jitter_s)
