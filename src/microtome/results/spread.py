"""The distribution of repeated measurements: median, quartiles, and the interval of the median."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity, in its own unit.

    Attributes:
        median: The middle.
        q1: A quarter of the samples is below.
        q3: A quarter is above.
        low: With `high`, the 95 % interval of the median, by drawing the samples again.
        count: How many samples there are.
        outliers: How many lie more than one and a half times q3 - q1 outside of those. They are kept.
        method: How it was measured.
    """

    median: float
    q1: float
    q3: float
    low: float
    high: float
    count: int
    outliers: int
    method: str = ""
