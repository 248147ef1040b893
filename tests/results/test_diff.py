"""Limits of a comparison, and profiles in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import microtome as mt
from microtome.errors import BadQuery


@pytest.fixture(scope="module")
def profiles() -> tuple[mt.Profile, mt.Profile]:
    small, large = (mt.profile(nn.Sequential(nn.Linear(4, width)), "1x4") for width in (100, 190))
    return small, large


@pytest.mark.parametrize(("limit", "is_over"), [("89%", True), (0.89, True), ("90%", False), ("900%", False)])
def test_a_limit_is_a_percentage_or_a_fraction(
    profiles: tuple[mt.Profile, mt.Profile], limit: Any, is_over: bool
) -> None:
    # 4 * 190 MACs are 90 % more than 4 * 100.
    assert bool(profiles[0].diff(profiles[1]).over({"macs": limit})) == is_over


@pytest.mark.parametrize(
    ("name", "quantity"),
    [
        *[("MACs", "macs"), ("peak", "memory"), ("peak_bytes", "memory"), ("Peak memory", "memory")],
        *[("peak KiB", "memory"), ("output bytes", "output"), ("output_bytes", "output")],
    ],
)
def test_metrics_have_the_names_that_tables_have(
    profiles: tuple[mt.Profile, mt.Profile], name: str, quantity: str
) -> None:
    grown = profiles[0].diff(profiles[1])
    assert grown[name] == grown[quantity]
    assert [change.quantity for change in grown.over({name: 0.0})] == [quantity]


@pytest.mark.parametrize("limit", [5, 1, 1.0, -0.1, float("nan"), "5", "x%", "-5%", "nan%", "inf%", None])
def test_a_limit_that_may_be_meant_otherwise_is_refused(profiles: tuple[mt.Profile, mt.Profile], limit: Any) -> None:
    with pytest.raises(BadQuery, match="expected a limit of macs such as '5%', or a fraction below 1, got"):
        profiles[0].diff(profiles[1]).over({"macs": limit})


def test_a_profile_is_compared_with_one_in_a_file(profiles: tuple[mt.Profile, mt.Profile], tmp_path: Path) -> None:
    profiles[1].to_json(tmp_path / "large.json")
    assert profiles[0].diff(tmp_path / "large.json") == profiles[0].diff(profiles[1])
    with pytest.raises(BadQuery, match="expected a profile to compare with, or a file of one, got a int"):
        profiles[0].diff(5)  # type: ignore[arg-type]
