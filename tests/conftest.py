from __future__ import annotations

import os

import pytest
import tqdm  # type: ignore[import-untyped]
from hypothesis import HealthCheck, settings

# pytest-xdist sets the width of its own terminal for its workers; tables are tested at the width that a pipe has.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COLUMNS", None)

# How long an example takes depends on what else the machine does.
settings.register_profile("microtome", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("microtome")

# Its thread would outlive the test that shows a progress bar, and what is restored depends on there being others.
tqdm.tqdm.monitor_interval = 0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
