"""The distribution of repeated measurements: median, quartiles, and the interval of the median."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity, in its own unit.

    Attributes:
        q1: The first quartile; `q3` is the third.
        low: With `high`, the 95 % bootstrap interval of the median.
        count: The number of samples.
        outliers: The number of samples more than 1.5 times q3 - q1 outside the quartiles. They are kept.
        method: The method of the measurement.
    """

    median: float
    q1: float
    q3: float
    low: float
    high: float
    count: int
    outliers: int
    method: str = ""
