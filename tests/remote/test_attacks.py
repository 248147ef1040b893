"""A few seconds of every attack: memory stays in its bounds and a well-behaved client gets correct answers.

`make soak` runs them longer and bounds how long that client waits, which a busy machine must not fail a test by.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.remote.attack.__main__ import attacks
from tests.remote.attack.harness import Outcome, run_limited

ATTACKS = attacks()


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_neither_memory_nor_answers(name: str) -> None:
    ATTACKS[name](2.0).check()


def test_more_memory_than_allowed_and_lost_answers_are_noticed() -> None:
    fine = Outcome("a", tried=1, held=1, peak_mb=700.0, rest_mb=300.0, budget_mb=128.0, p99_s=0.1, answers=1)
    fine.check()
    with pytest.raises(AssertionError, match="at most 428 MB more, got 429 MB"):
        replace(fine, peak_mb=729.0).check()
    with pytest.raises(AssertionError, match="got no answer"):
        replace(fine, answers=0).check()
    with pytest.raises(AssertionError, match="lost"):
        replace(fine, faults=("lost",)).check()


@pytest.mark.slow
def test_what_runs_in_a_limited_process_is_measured_and_bounded() -> None:
    took = run_limited("tests.remote.test_attacks:take", 200)
    assert (took.result, took.fault) == (200, None)
    assert 190 < took.peak_mb - took.rest_mb < 300
    failed = run_limited("tests.remote.test_attacks:take", 2000, most=500_000_000)
    assert failed.fault is not None
    assert "MemoryError" in failed.fault


def take(megabytes: int) -> int:
    """Hold that much for a moment."""
    return len(bytearray(b"x") * (megabytes * 1_000_000)) // 1_000_000
