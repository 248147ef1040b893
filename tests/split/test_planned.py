"""Cutting where a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery
from microtome.results.plan import Candidate


def test_auto_cuts_where_the_plan_says(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-unet")
    profile = mt.profile(model, x, measure="time", repeat=3)
    profile.to_json(tmp_path / "here.json")
    cuts = mt.cuts(model, x)
    plan = mt.plan(cuts, edge=tmp_path / "here.json", cloud=profile, link=mt.Link("1Gbps"), strategy=_at_the_pool)
    with torch.no_grad():
        for stages in (mt.split(model, x, at="auto", plan=plan), mt.split(model, x, at=plan)):
            assert stages.at == ("pool#0",)
            assert stages.verified == "bit-equal"


def test_auto_needs_a_plan() -> None:
    model, x = zoo.build("tiny-unet")
    with pytest.raises(BadQuery, match="pass a plan, at=mt.plan"):
        mt.split(model, x, at="auto")


def _at_the_pool(candidates: Sequence[Candidate]) -> Candidate:
    return next(one for one in candidates if one.at == ("pool#0",))


def test_a_plan_without_a_cut_names_the_device_that_runs_the_model() -> None:
    model, x = zoo.build("tiny-unet")
    profile = mt.profile(model, x, measure="time", repeat=3)
    plan = mt.plan(mt.cuts(model, x), edge=profile, cloud=profile, link=mt.Link("8bps"))
    with pytest.raises(BadQuery, match=r"expected a plan that cuts the model, got one that runs all of it on edge"):
        mt.split(model, x, at=plan)
