from __future__ import annotations

import pytest

from microtome.profile import timing
from tests.profile.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which calls are timed."""
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter_ns", clock)
    monkeypatch.setattr(timing, "_stamp_cost", lambda: 0.0)
    return clock
