"""The cuts and the stage that a user names."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import nn

from microtome.errors import BadQuery
from microtome.results.cuts import Cut, Cuts


def choose_cuts(cuts: Cuts, at: Any) -> list[Cut]:
    """The cuts that a user names, in the order in which they are run."""
    planned = getattr(at, "at", at) if not isinstance(at, Cut | nn.Module) else at
    if planned is None and at is not None:
        raise BadQuery("the plan does not cut the model: it runs best in one place")
    wanted = [planned] if isinstance(planned, str | Cut) or not isinstance(planned, Iterable) else list(planned)
    if not wanted or not all(isinstance(one, str | Cut) for one in wanted):
        raise BadQuery(
            f"say where to cut: an address such as 'layer2.0.conv1', several, or a plan of mt.plan; got {at!r:.80}"
        )
    if "auto" in wanted:
        raise BadQuery("at='auto' needs to know the devices and the link: give a plan, plan=mt.plan(mt.cuts(…), …)")
    if "" in wanted:
        raise BadQuery("the exit of the model itself is no cut: nothing would be left for the tail")
    found = sorted((_cut(cuts, one) for one in wanted), key=lambda cut: cut.index)
    for one, other in pairwise(found):
        if one is other:
            raise BadQuery(f"the cut at {one.at!r} is named twice")
    return found


def _cut(cuts: Cuts, one: Any) -> Cut:
    return cuts[one.at if isinstance(one, Cut) else one]


def stage_index(load: str | int, count: int) -> int:
    """The index of the stage that a user names."""
    index = {"head": 0, "tail": count - 1}.get(load, load) if isinstance(load, str) else load
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise BadQuery(f"load is 'head', 'tail' or the index of one of {count} stages, got {load!r}")
    return index
