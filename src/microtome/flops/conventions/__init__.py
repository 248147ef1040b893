"""Conventions: MACs, FLOPs and MAdds as microtome counts them, and as other tools do. Each tool has a file."""

from __future__ import annotations

from functools import cache
from typing import Any

from microtome.errors import NoMatch
from microtome.flops.conventions import fvcore, ptflops, torchstat
from microtome.flops.conventions.base import Convention, ConventionCost, OpCounter
from microtome.flops.registry import op_name

CONVENTIONS = {
    convention.name: convention
    for convention in (
        # FLOPs are twice the MACs, and all other operations.
        Convention("microtome", lambda cost, _: ConventionCost(cost.macs, cost.flops, cost.madds), has_backward=True),
        # MACs of products and convolutions, biases left out, called FLOPs.
        Convention(
            "torchvision",
            lambda cost, _: ConventionCost(cost.macs, cost.macs, 2 * cost.macs - cost.sums),
            has_backward=True,
        ),
        fvcore.CONVENTION,
        ptflops.CONVENTION,
        torchstat.CONVENTION,
    )
}


def find_convention(name: str) -> Convention:
    """Return the convention of this name."""
    if not isinstance(name, str) or name not in CONVENTIONS:
        raise NoMatch(f"expected a convention of {', '.join(map(repr, CONVENTIONS))}, got {name!r}")
    return CONVENTIONS[name]


@cache
def counters_of(func: Any) -> dict[str, OpCounter]:
    """Return the formulas that conventions have of their own for an operator, by convention."""
    counting = (convention for convention in CONVENTIONS.values() if op_name(func) in convention.counted_ops)
    return {convention.name: convention.count_op for convention in counting if convention.count_op is not None}
