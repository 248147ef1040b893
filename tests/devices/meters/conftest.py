from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.devices.fake_nvml import FakeNvml, install_fake_nvml


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time of `time.perf_counter`, which only the test advances."""
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    yield now
    monkeypatch.undo()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return install_fake_nvml(monkeypatch)
