"""Conventions: MACs, FLOPs and MAdds as microtome counts them, and as other tools do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from microtome.errors import NoMatch
from microtome.flops.conventions import ptflops, torchstat
from microtome.flops.registry import OpCost, op_name


class ConventionCost(NamedTuple):
    """The quantities of a convention; None for one that it does not have."""

    macs: int | None = 0
    flops: int | None = 0
    madds: int | None = 0
    read_bytes: int | None = None
    write_bytes: int | None = None


#: Counts an operator, from the function of torch that was called, the operator, its arguments, output and cost.
OpCounter = Callable[[Any, Any, tuple[Any, ...], Any, OpCost], int]
ModuleRule = Callable[[nn.Module, tuple[Any, ...], Any], ConventionCost]


@dataclass(frozen=True)
class Convention:
    """A way to count a run.

    Attributes:
        price: Prices an operator from its cost, and from the convention's own count, which is 0 if it has none.
        module: Prices a module as such, if the convention does.
        has_backward: Whether the convention covers a backward.
        has_madds: Whether it counts multiplications and additions separately.
    """

    name: str
    price: Callable[[OpCost, int], ConventionCost]
    module: ModuleRule | None = None
    has_backward: bool = False
    has_madds: bool = True


def convention(name: str) -> Convention:
    """Return the convention of this name."""
    if not isinstance(name, str) or name not in CONVENTIONS:
        raise NoMatch(f"expected a convention of {', '.join(map(repr, CONVENTIONS))}, got {name!r}")
    return CONVENTIONS[name]


# -- microtome: FLOPs are twice the MACs, and all other operations -----------------------------------------------------


def _microtome(cost: OpCost, _: int) -> ConventionCost:
    return ConventionCost(cost.macs, cost.flops, cost.madds)


# -- torchvision: MACs of products and convolutions, biases left out, called FLOPs -------------------------------------


def _torchvision(cost: OpCost, _: int) -> ConventionCost:
    return ConventionCost(cost.macs, cost.macs, 2 * cost.macs - cost.sums)


# -- fvcore: MACs of products and convolutions, norms, interpolation and the last pooling; called FLOPs ----------------


def _count_fvcore(function: Any, func: Any, args: tuple[Any, ...], out: Any, cost: OpCost) -> int:
    name = op_name(func)
    if name in ("mm", "addmm", "bmm", "convolution"):
        return cost.macs
    if name in ("native_batch_norm", "cudnn_batch_norm"):
        affine = args[1] is not None
        return int(args[0].numel()) * ((4 if args[5] else 1) + affine)
    if name in ("native_layer_norm", "native_group_norm"):
        return int(args[0].numel()) * (4 + any(isinstance(item, Tensor) for item in args[1:4]))
    if name in _FVCORE_OUTPUTS:
        return int(out.numel()) * _FVCORE_OUTPUTS[name]
    if function is F.adaptive_avg_pool2d and name in ("mean", "_adaptive_avg_pool2d"):
        return int(args[0].numel())
    return 0


_FVCORE_OUTPUTS = {"upsample_nearest2d": 1, "upsample_bilinear2d": 4, "grid_sampler_2d": 4, "cudnn_grid_sampler": 4}
_FVCORE_NAMES = {
    "mm", "addmm", "bmm", "convolution", "native_batch_norm", "cudnn_batch_norm", "native_layer_norm",
    "native_group_norm", "mean", "_adaptive_avg_pool2d", *_FVCORE_OUTPUTS,
}  # fmt: skip


# -- ptflops and torchstat: by module ----------------------------------------------------------------------------------


def _count_ptflops(function: Any, func: Any, args: tuple[Any, ...], out: Any, _: OpCost) -> int:
    return ptflops.of_function(function, func, args, out)


def _own_count(cost: OpCost, count: int) -> ConventionCost:
    """Price by the convention's own count; MACs are the same in all conventions."""
    return ConventionCost(cost.macs, count)


def _ptflops_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> ConventionCost:
    return ConventionCost(flops=ptflops.of_module(module, args, output))


def _torchstat_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> ConventionCost:
    x, out = _first_tensor(args), _first_tensor(output)
    if next(module.children(), None) is not None or x is None or out is None:
        return ConventionCost(0, 0, 0, 0, 0)
    flops, madds = torchstat.flops(module, x, out) or 0, torchstat.madds(module, x, out) or 0
    read, written = torchstat.memory(module, x, out) or (0, 0)
    return ConventionCost(0, flops, madds, read * x.element_size(), written * x.element_size())


def _first_tensor(value: Any) -> Tensor | None:
    items = value if isinstance(value, tuple | list) else (value,)
    return next((item for item in items if isinstance(item, Tensor)), None)


CONVENTIONS = {
    convention.name: convention
    for convention in (
        Convention("microtome", _microtome, has_backward=True),
        Convention("torchvision", _torchvision, has_backward=True),
        Convention("fvcore", _own_count, has_madds=False),
        Convention("ptflops", _own_count, _ptflops_module, has_madds=False),
        Convention("torchstat", _own_count, _torchstat_module),
    )
}


@cache
def counters_of(func: Any) -> dict[str, OpCounter]:
    """Return the counters of an operator, of conventions with formulas of their own, by name.

    They need the operator's arguments, and so run with it.
    """
    name = op_name(func)
    counters: dict[str, OpCounter] = {}
    if name in _FVCORE_NAMES:
        counters["fvcore"] = _count_fvcore
    if name in ptflops.OPERATORS:
        counters["ptflops"] = _count_ptflops
    return counters
