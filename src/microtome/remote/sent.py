"""Records of requests: in flight, and finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from microtome.inputs import Inputs
from microtome.split.boundary import Boundary

if TYPE_CHECKING:
    from microtome.remote.connection import Pending
    from microtome.remote.replies import Expected


@dataclass
class Sent:
    """A record of a finished request.

    Attributes:
        at: The cut; None: all of it ran here. `""`: the inputs were sent.
        where: `"cloud"` or `"edge"`: where it ended; `"nowhere"`: it failed.
        head_s: Seconds of each part; `wire_s` is what neither side can account for.
        tail_s: Of the tail, wherever it ran.
        sent_bytes: With the envelope.
        attempts: How often it was sent.
        reason: Why it ended on the edge though it was sent, or was to be; or why it failed.
        alone: Whether no other request of this client was on its way.
    """

    at: str | None
    codec: str = "raw"
    where: str = "cloud"
    head_s: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    server_decode_s: float = 0.0
    queue_s: float = 0.0
    tail_s: float = 0.0
    server_encode_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    attempts: int = 0
    reason: str | None = None
    alone: bool = False
    began: float = field(default_factory=perf_counter, repr=False)


@dataclass
class Job:
    """A request on its way.

    Attributes:
        ends: When its deadline is; None: it has none.
        boundary: The values that cross; None: none do.
        expected: Bounds and checks of the reply.
        began: When it was sent.
    """

    given: Inputs
    sent: Sent
    ends: float | None
    boundary: Boundary | None = None
    pending: Pending | None = None
    expected: Expected | None = None
    began: float = 0.0
