"""What the words mean: MACs, FLOPs and MAdds as microtome counts them, and as other tools do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from microtome.errors import NoMatch
from microtome.flops.conventions import ptflops, torchstat
from microtome.flops.fused import WHOLE
from microtome.flops.registry import NOTHING, OpCost, first, op_name, registered, work_by, work_of


class ConventionCost(NamedTuple):
    """What a convention counts; None for a quantity that it does not have."""

    macs: int | None = 0
    flops: int | None = 0
    madds: int | None = 0
    read_bytes: int | None = None
    write_bytes: int | None = None


#: From the function of torch that was called, the operator, its arguments and output; None where it is not known.
OpRule = Callable[[Any, Any, tuple[Any, ...], dict[str, Any], Any], ConventionCost | None]
WorkRule = Callable[[OpCost], ConventionCost]
ModuleRule = Callable[[nn.Module, tuple[Any, ...], Any], ConventionCost]

_ZERO = ConventionCost()


@dataclass(frozen=True)
class Convention:
    """How a run is counted.

    Attributes:
        op: What an operator costs.
        whole: What a function shown whole costs, from the work that it does.
        module: What a module costs as such, if anything.
        has_backward: Whether the convention says what a backward costs.
        has_madds: Whether it counts multiplications and additions apart.
    """

    name: str
    op: OpRule
    whole: WorkRule
    module: ModuleRule | None = None
    has_backward: bool = False
    has_madds: bool = True

    def of_whole(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> tuple[ConventionCost | None, ConventionCost | None]:
        """The cost of a function shown whole, and of its backward; None where it is not known."""
        both = (registered(function) or WHOLE[function].forward, WHOLE[function].backward)
        works = [work_by(formula, function, args, kwargs, first(out)) for formula in both]
        forward, backward = (None if work is None else self.whole(work) for work in works)
        return forward, backward


def convention(name: str) -> Convention:
    """The convention of this name."""
    if not isinstance(name, str) or name not in CONVENTIONS:
        raise NoMatch(f"there is no convention {name!r}: write one of {', '.join(map(repr, CONVENTIONS))}")
    return CONVENTIONS[name]


# -- microtome: FLOPs are twice the MACs, and all other operations -----------------------------------------------------


def _of_work(work: OpCost) -> ConventionCost:
    return ConventionCost(work.macs, work.flops, work.madds)


def _microtome(_: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> ConventionCost | None:
    work = work_of(func, args, kwargs, out)
    return _ZERO if work is NOTHING else None if work is None else _of_work(work)


# -- torchvision: MACs of products and convolutions, biases left out, called FLOPs -------------------------------------


def _products_alone(work: OpCost) -> ConventionCost:
    return ConventionCost(work.macs, work.macs, 2 * work.macs - work.sums)


def _torchvision(_: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> ConventionCost | None:
    work = work_of(func, args, kwargs, out)
    return None if work is None else _products_alone(work)


# -- fvcore: MACs of products and convolutions, norms, interpolation and the last pooling; called FLOPs ----------------


def _fvcore(function: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> ConventionCost:
    name = op_name(func)
    count = 0
    if name in ("mm", "addmm", "bmm", "convolution"):
        work = work_of(func, args, kwargs, out)
        count = 0 if work is None else work.macs
    elif name in ("native_batch_norm", "cudnn_batch_norm"):
        affine = args[1] is not None
        count = args[0].numel() * ((4 if args[5] else 1) + affine)
    elif name in ("native_layer_norm", "native_group_norm"):
        count = args[0].numel() * (4 + any(isinstance(item, Tensor) for item in args[1:4]))
    elif name in _FVCORE_OUTPUTS:
        count = out.numel() * _FVCORE_OUTPUTS[name]
    elif function is F.adaptive_avg_pool2d and name in ("mean", "_adaptive_avg_pool2d"):
        count = args[0].numel()
    return ConventionCost(flops=count)


_FVCORE_OUTPUTS = {"upsample_nearest2d": 1, "upsample_bilinear2d": 4, "grid_sampler_2d": 4, "cudnn_grid_sampler": 4}


# -- ptflops and torchstat: by module ----------------------------------------------------------------------------------


def _ptflops(function: Any, func: Any, args: tuple[Any, ...], _: dict[str, Any], out: Any) -> ConventionCost:
    return ConventionCost(flops=ptflops.of_function(function, func, args, out))


def _ptflops_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> ConventionCost:
    return ConventionCost(flops=ptflops.of_module(module, args, output))


def _nothing(*_: Any) -> ConventionCost:
    return _ZERO


def _macs_alone(work: OpCost) -> ConventionCost:
    return ConventionCost(macs=work.macs)


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


def _of_known(rule: OpRule) -> OpRule:
    """A rule for FLOPs. MACs are the same in all conventions, and what nobody knows the cost of is listed in all."""

    def known(
        function: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> ConventionCost | None:
        work = work_of(func, args, kwargs, out)
        cost = None if work is None else rule(function, func, args, kwargs, out)
        return None if work is None or cost is None else cost._replace(macs=work.macs)

    return known


CONVENTIONS = {
    convention.name: convention
    for convention in (
        Convention("microtome", _microtome, _of_work, has_backward=True),
        Convention("torchvision", _torchvision, _products_alone, has_backward=True),
        Convention("fvcore", _of_known(_fvcore), _macs_alone, has_madds=False),
        Convention("ptflops", _of_known(_ptflops), _macs_alone, _ptflops_module, has_madds=False),
        Convention("torchstat", _of_known(_nothing), _macs_alone, _torchstat_module),
    )
}
