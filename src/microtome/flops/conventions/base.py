"""The interface of conventions: what counts as a MAC, a FLOP and a MAdd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from microtome.flops.registry import OpCost


class ConventionCost(NamedTuple):
    """The quantities of a convention; None for one that it does not have."""

    macs: int | None = 0
    flops: int | None = 0
    madds: int | None = 0
    read_bytes: int | None = None
    write_bytes: int | None = None


#: Counts an operator, from the function of torch that was called, the operator, its arguments, output and cost.
OpCounter = Callable[[Any, Any, tuple[Any, ...], Any, OpCost], int]
#: Prices a module as such, from its arguments and output.
ModulePrice = Callable[[nn.Module, tuple[Any, ...], Any], ConventionCost]


def _own_count(cost: OpCost, count: int) -> ConventionCost:
    """Price by the convention's own count; MACs are the same in all conventions."""
    return ConventionCost(cost.macs, count)


@dataclass(frozen=True)
class Convention:
    """A way to count a run.

    Attributes:
        price: Prices an operator from its cost, and from the result of `count_op`, which is 0 if it has none.
        count_op: The convention's own formula of operators. It needs their arguments, and so runs with the model.
        counted_ops: The names of operators that `count_op` may count.
        price_module: Prices a module as such, if the convention does.
        has_backward: Whether the convention covers a backward.
        has_madds: Whether it counts multiplications and additions separately.
    """

    name: str
    price: Callable[[OpCost, int], ConventionCost] = _own_count
    count_op: OpCounter | None = None
    counted_ops: frozenset[str] = frozenset()
    price_module: ModulePrice | None = None
    has_backward: bool = False
    has_madds: bool = True
