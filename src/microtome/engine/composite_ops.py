"""Functions of torch that are shown whole, whatever operators they are made of on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from microtome.engine import integer_values, placement
from microtome.engine.op_mode import signature
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.signals import deliver_signals, pending_signals, signal_safe
from microtome.engine.torch_internals import (
    DisableTorchFunction,
    disable_current_modes,
    fake_tensor_types,
    is_autocast_enabled,
    pack_padded_sequence,
    pad_packed_sequence,
)

Function = Callable[..., Any]
#: Functions that read the values of a tensor without an operator, and the position of that argument.
READS: dict[Function, int] = {
    Tensor.tolist: 0,
    Tensor.numpy: 0,
    Tensor.__array__: 0,
    pack_padded_sequence: 1,
    pad_packed_sequence: 1,
}
NotifyRead = Callable[[Tensor], None]
RunComposite = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]


class CompositeOp:
    """One run of a function that is shown whole. Its autograd nodes have sequence numbers in [start, end)."""

    __slots__ = ("end", "function", "start")

    def __init__(self, function: Function, start: int) -> None:
        self.function = function
        self.start = start
        self.end = start


class FunctionMode(TorchFunctionMode):
    """Has chosen functions run by somebody who tells of them, tells of reads, and notes which function runs.

    Attributes:
        function: The function of torch that the code called and that runs now.
        autocast: Whether it was called under autocast, which operators below cannot tell.
    """

    def __init__(self, composite: Collection[Function], run_composite: RunComposite, notify_read: NotifyRead) -> None:
        super().__init__()
        self._notify_read = notify_read
        self._composite = composite
        self._run_composite = run_composite
        self.function: Function | None = None
        self.autocast = False
        self._placement = placement.current()

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if pending_signals:
            deliver_signals()
        self.function = func
        self.autocast = is_autocast_enabled()
        try:
            if self._placement is not None:
                answer = self._placement.query(func, args)
                if answer is not NotImplemented:
                    return answer
                args, kwargs = self._placement.redirect_to_meta(args, kwargs or {})
            if func in self._composite:
                return self._run_composite(func, args, kwargs or {})
            if func in READS and len(args) > READS[func] and isinstance(args[READS[func]], Tensor):
                self._notify_read(args[READS[func]])
            if func is F.multi_head_attention_forward:
                with self:
                    return _attention_without_torch_function(*args, **(kwargs or {}))
            if func in _INDEXING and args[0].is_meta:
                args = (args[0], integer_values.tensorize_index(args[1]), *args[2:])
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.function = None


_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


def run_on_meta(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on tensors that stand in for others: one node in the graph, which keeps inputs and outputs.

    What else its kernels keep, and how many nodes they make, depends on the device. So do the kernels: shapes are
    computed on meta tensors, where all functions have one that works.
    """
    inputs = list(tensors_in((args, kwargs)))

    def compute() -> Any:
        return map_tensors(partial(_empty, inputs[0].device), meta_output(function, args, kwargs))

    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return compute()
    return _OpaqueFunction.apply(compute, *inputs)


_ATTENTION = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
#: What functions gave on meta tensors, by their signatures.
_memo: dict[Any, Any] = {}
_MEMO_LIMIT = 10_000


def meta_output(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the output of a function as meta tensors."""
    try:
        tensors: list[Tensor] = []
        key = (function, signature(args, tensors), signature(tuple(kwargs.items()), tensors))
        known = _memo.get(key)
    except TypeError:  # an argument that cannot be a key
        return _compute_on_meta(function, args, kwargs)
    if known is None:
        if len(_memo) >= _MEMO_LIMIT:
            _memo.clear()
        known = _memo[key] = _compute_on_meta(function, args, kwargs)
    return known


def _compute_on_meta(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with disable_current_modes(), torch.no_grad():
        meta_args, meta_kwargs = map_tensors(partial(_empty, "meta"), (args, kwargs))
        output = function(*meta_args, **meta_kwargs)
        if function in _ATTENTION:
            return _in_query_layout(output, next(tensors_in((meta_args, meta_kwargs))))  # the query
        return output


def _empty(device: str | torch.device, like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _in_query_layout(output: Tensor, query: Tensor) -> Tensor:
    """Return the output of attention in the layout of fused kernels: that of the query."""
    order = sorted(range(output.dim()), key=query.stride, reverse=True)
    back = [order.index(dim) for dim in range(output.dim())]
    return output.permute(order).contiguous().permute(back)


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
        wanted = [tensor for tensor, asked in zip(inputs, needed, strict=True) if asked]
        given = [grad for grad in grads if grad is not None]
        # It links too, since a backward may have one of its own.
        made = iter(_OpaqueFunction.apply(lambda: tuple(map(torch.empty_like, wanted)), *inputs, *given))
        return None, *(next(made) if asked else None for asked in needed)


def is_meta_or_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    if tensor.is_meta:
        return True
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    return isinstance(tensor, fake_tensor_types()[0])


def _without_torch_function(function: Any) -> Any:
    """A function of torch.nn.functional as it is but for its first step, which would hand it to the mode again.

    While a mode handles a function, what runs inside it is not shown to the mode: attention inside the function of
    `MultiheadAttention` would not be seen.
    """

    def handled(*_: Any) -> bool:
        return False

    skipped = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**function.__globals__, **dict.fromkeys(skipped, handled)}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_attention_without_torch_function = _without_torch_function(F.multi_head_attention_forward)

plain = DisableTorchFunction


@signal_safe
def suspend_tracing(device: torch.device) -> Iterator[None]:
    """Compute what is no part of the run: no session sees it, no graph holds it, no autocast changes its dtype."""
    with ExitStack() as stack:
        stack.enter_context(disable_current_modes())
        stack.enter_context(plain())
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
