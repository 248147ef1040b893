"""Spreads of repeated measurements, and the environment."""

from __future__ import annotations

import torch

from microtome.devices.machine import environment
from microtome.devices.statistics import spreads


def test_the_median_its_quarters_and_its_outliers() -> None:
    # 1 to 9 and 1000: quarters at 3.25 and 7.75, so that everything above 7.75 + 1.5 * 4.5 = 14.5 lies outside.
    (spread,) = spreads(torch.tensor([*range(1, 10), 1000.0])[:, None])
    assert (spread.median, spread.q1, spread.q3, spread.count, spread.outliers) == (5.5, 3.25, 7.75, 10, 1)
    assert spread.low <= spread.median <= spread.high < 1000


def test_samples_that_are_all_the_same_have_no_spread() -> None:
    (spread,) = spreads(torch.full((5, 1), 2.0))
    assert (spread.low, spread.median, spread.high, spread.outliers) == (2.0, 2.0, 2.0, 0)


def test_the_same_samples_give_the_same_interval_and_leave_the_random_state() -> None:
    samples = torch.rand(30, 2, generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    assert spreads(samples) == spreads(samples)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_environment_names_the_machine() -> None:
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["threads"] == str(torch.get_num_threads())
    assert all(found.values())
