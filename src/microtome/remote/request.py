"""Records of requests: in flight, and finished."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from microtome.inputs import Inputs
from microtome.results.requests import RequestRecord
from microtome.split.boundary import Boundary

if TYPE_CHECKING:
    from microtome.remote.connection import Pending
    from microtome.remote.replies import Expected


@dataclass
class RequestJob:
    """A request on its way.

    Attributes:
        ends: When its deadline is; None: it has none.
        boundary: The values that cross; None: none do.
        expected: Bounds and checks of the reply.
        began: When it was sent.
    """

    given: Inputs
    sent: RequestRecord
    ends: float | None
    boundary: Boundary | None = None
    pending: Pending | None = None
    expected: Expected | None = None
    began: float = 0.0
