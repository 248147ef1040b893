"""Composite operators: functions of torch reported as one operator, whatever kernels they run on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from microtome.engine.op_mode import signature
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.signals import signal_safe
from microtome.engine.torch_internals import DisableTorchFunction, disable_current_modes, fake_tensor_types

Function = Callable[..., Any]


class CompositeOp:
    """One run of a composite operator. Its autograd nodes have sequence numbers in [start, end)."""

    __slots__ = ("end", "function", "start")

    def __init__(self, function: Function, start: int) -> None:
        self.function = function
        self.start = start
        self.end = start


def run_on_meta(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on meta or fake tensors, as one autograd node that saves inputs and outputs.

    Which tensors its kernels save, and how many nodes they create, depends on the device. So do the kernels themselves:
    shapes are computed on meta tensors, which every function supports.
    """
    inputs = list(tensors_in((args, kwargs)))
    compute = partial(empty_output, function, args, kwargs)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return compute()
    return _OpaqueFunction.apply(compute, *inputs)


_ATTENTION = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
#: Outputs of functions on meta tensors, by signature.
_cache: dict[Any, Any] = {}
_MAX_CACHED = 10_000


def empty_output(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """New tensors like the output of a function, without values."""
    device = next(tensors_in((args, kwargs))).device
    return map_tensors(partial(_empty, device), meta_output(function, args, kwargs))


def meta_output(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of a function as meta tensors."""
    try:
        tensors: list[Tensor] = []
        key = (function, signature(args, tensors), signature(tuple(kwargs.items()), tensors))
        output = _cache.get(key)
    except TypeError:  # an argument that is unhashable
        return _compute_on_meta(function, args, kwargs)
    if output is None:
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        output = _cache[key] = _compute_on_meta(function, args, kwargs)
    return output


def _compute_on_meta(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with disable_current_modes(), torch.no_grad():
        meta_args, meta_kwargs = map_tensors(partial(_empty, "meta"), (args, kwargs))
        output = function(*meta_args, **meta_kwargs)
        if function in _ATTENTION:
            return _in_query_layout(output, next(tensors_in((meta_args, meta_kwargs))))
        return output


def _empty(device: str | torch.device, like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _in_query_layout(output: Tensor, query: Tensor) -> Tensor:
    """Lay out the output of attention as fused kernels do: like the query."""
    order = sorted(range(output.dim()), key=query.stride, reverse=True)
    inverse = [order.index(dim) for dim in range(output.dim())]
    return output.permute(order).contiguous().permute(inverse)


class _OpaqueFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Any], *inputs: Tensor) -> Any:
        outputs = compute()
        ctx.count = len(inputs)
        ctx.save_for_backward(*inputs, *tensors_in(outputs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs, needed = ctx.saved_tensors[: ctx.count], ctx.needs_input_grad[1:]
        differentiable = [tensor for tensor, is_needed in zip(inputs, needed, strict=True) if is_needed]
        output_grads = [grad for grad in grads if grad is not None]
        # Again a node of the graph, since a backward may be differentiated too.
        input_grads = iter(
            _OpaqueFunction.apply(lambda: tuple(map(torch.empty_like, differentiable)), *inputs, *output_grads)
        )
        return None, *(next(input_grads) if is_needed else None for is_needed in needed)


def is_meta_or_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    if tensor.is_meta:
        return True
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    return isinstance(tensor, fake_tensor_types()[0])


@signal_safe
def suspend_tracing(device: torch.device) -> Iterator[None]:
    """Compute something that is not part of the run: unobserved, without a graph, without autocast."""
    with ExitStack() as stack:
        stack.enter_context(disable_current_modes())
        stack.enter_context(DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
