"""The costs of the operators and module calls of a trace, from which any convention prices it without another run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from microtome.flops.conventions import counters_of
from microtome.flops.conventions.base import Convention, ConventionCost
from microtome.flops.registry import NOTHING, OpCost
from microtome.results.trace import Trace


@dataclass
class TraceCosts:
    """Costs of the operators of a run, independent of a convention.

    Attributes:
        ops: The cost of each operator; None where no formula is known.
        counts: The non-zero counts of operators by conventions with formulas of their own, by name and index.
        calls: The module, and the shapes and dtypes of the arguments and outputs of each call, by index: of tensors,
            and of those directly inside a tuple or list; None for anything else.
    """

    ops: list[OpCost | None] = field(default_factory=list)
    counts: dict[str, dict[int, int]] = field(default_factory=dict)
    calls: dict[int, tuple[nn.Module, tuple[Any, ...], Any]] = field(default_factory=dict)

    def count(self, index: int, function: Any, func: Any, args: tuple[Any, ...], out: Any, cost: OpCost) -> None:
        """Count an operator by the conventions with formulas of their own."""
        for name, counter in counters_of(func).items():
            if number := counter(function, func, args, out, cost):
                self.counts.setdefault(name, {})[index] = number

    def add_call(self, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Record the shapes and dtypes of a call's arguments and output."""
        self.calls[index] = module, tuple([_spec(value) for value in args]), _output_spec(output)

    def price_ops(self, trace: Trace, convention: Convention) -> list[ConventionCost | None]:
        """Price each operator; None if there is no formula, or the convention has none for a backward."""
        counts = self.counts.get(convention.name, {})
        free = convention.price(NOTHING, 0)
        priced: list[ConventionCost | None] = []
        for op, cost in zip(trace.ops, self.ops, strict=True):
            if cost is None or (op.phase != "forward" and not convention.has_backward):
                priced.append(None)
            elif cost is NOTHING and op.index not in counts:  # such as a view
                priced.append(free)
            else:
                priced.append(convention.price(cost, counts.get(op.index, 0)))
        return priced

    def price_calls(self, convention: Convention) -> dict[int, ConventionCost]:
        """Price the modules themselves, by the index of the call, if the convention prices modules."""
        price = convention.price_module
        if price is None:
            return {}
        return {
            index: price(module, tuple(map(_tensor, args)), _tensor(output))
            for index, (module, args, output) in self.calls.items()
        }


def _spec(value: Any) -> Any:
    """Return the shape and dtype of a tensor; None for anything else."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) and not value.is_nested else None


def _output_spec(output: Any) -> Any:
    return [_spec(value) for value in output] if isinstance(output, tuple | list) else _spec(output)


def _tensor(spec: Any) -> Any:
    if spec is None:
        return None
    if isinstance(spec, list):
        return tuple(map(_tensor, spec))
    shape, dtype = spec
    return torch.empty(shape, dtype=dtype, device="meta")
