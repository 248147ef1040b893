"""Marks for the tests that only `make test-all` runs, and the number of examples of a property in either."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings


def slow(*values: Any) -> list[Any]:
    """Values that only `make test-all` runs: long proofs of what the values beside them test quickly."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def examples(count: int) -> int:
    """So many examples of a property in `make test-all`, and as few as the profile of `make test` has in proportion."""
    return max(count * settings().max_examples // 100, 1)
