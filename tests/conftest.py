from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
import tqdm  # type: ignore[import-untyped]
from hypothesis import HealthCheck, settings

# pytest-xdist sets the width of its own terminal for its workers; tables are tested at the width that a pipe has.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COLUMNS", None)

# A shell without job control starts what runs in the background with SIGINT ignored, which processes of tests inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on the load of the machine, so no test has a deadline.
settings.register_profile("microtome", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("microtome"), max_examples=25)  # for `make test`
settings.load_profile("microtome")

# Its thread would outlive the test that shows a progress bar, and what is restored depends on there being others.
tqdm.tqdm.monitor_interval = 0

TESTS = Path(__file__).parent
#: Files of which every test is marked `integration`: sweeps over models, actions or cuts.
SWEEPS = """
    engine/test_arguments.py engine/test_signals.py engine/test_laws.py files/test_corruption.py plan/test_plan.py
    profile/test_conventions.py profile/test_energy.py profile/test_laws.py profile/test_utilization.py
    profile/test_measurement.py profile/test_modes.py profile/test_published.py report/test_page_browser.py
    split/test_addresses.py split/test_aliases.py split/test_random_replay.py split/test_checkpoint.py
    split/test_hash_seeds.py
    split/test_objects.py split/test_random_models.py split/test_reads.py split/test_stages.py split/test_state.py
    split/test_zoo.py trace/test_caches.py trace/test_gradients.py track/test_tracker.py
"""
_SWEEPS = {TESTS / name for name in SWEEPS.split()}


def pytest_itemcollected(item: pytest.Item) -> None:
    if " at 0x" in item.nodeid:  # pytest-xdist compares the ids of its processes
        raise pytest.UsageError(f"expected the same id in every process, got an address: {item.nodeid}. Pass ids=")
    if item.path in _SWEEPS:
        item.add_marker("integration")


def pytest_collection_finish() -> None:
    """Exclude what is imported by now from garbage collection, which took a third of the time of the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
