"""Functions of torch that are shown whole, whatever operators they are made of on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from microtome.engine.structure import tensors_in

Function = Callable[..., Any]
RunWhole = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]


class Whole:
    """One run of a function that is shown whole. Its autograd nodes have sequence numbers in [start, end)."""

    __slots__ = ("end", "function", "start")

    def __init__(self, function: Function, start: int) -> None:
        self.function = function
        self.start = start
        self.end = start


class FunctionMode(TorchFunctionMode):
    """Has chosen functions run by somebody who tells of them, and notes which function runs.

    Attributes:
        function: The function of torch that the code called and that runs now.
    """

    def __init__(self, whole: Collection[Function], run_whole: RunWhole) -> None:
        super().__init__()
        self._whole = whole
        self._run_whole = run_whole
        self.function: Function | None = None

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.function = func
        try:
            if func in self._whole:
                return self._run_whole(func, args, kwargs or {})
            if func is F.multi_head_attention_forward:
                with self:
                    return _transparent_attention(*args, **(kwargs or {}))
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.function = None


def run_standing(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on tensors that stand in for others: one node in the graph, which keeps inputs and outputs.

    What else its kernels keep, and how many nodes they make, depends on the device.
    """

    def compute() -> Any:
        output = function(*args, **kwargs)
        return _laid_out(output, inputs[0]) if function is F.scaled_dot_product_attention else output

    inputs = list(tensors_in((args, kwargs)))
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return compute()
    return _Link.apply(compute, *inputs)


def _laid_out(output: Tensor, query: Tensor) -> Tensor:
    """What attention returns, in the layout that fused kernels give it: that of the query."""
    order = sorted(range(output.dim()), key=query.stride, reverse=True)
    back = [order.index(dim) for dim in range(output.dim())]
    return output.permute(order).contiguous().permute(back)


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Any], *inputs: Tensor) -> Any:
        outputs = compute()
        ctx.count = len(inputs)
        ctx.save_for_backward(*inputs, *tensors_in(outputs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs = zip(ctx.saved_tensors[: ctx.count], ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.empty_like(tensor) if needed else None for tensor, needed in inputs)


def is_stand_in(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    if tensor.is_meta:
        return True
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    from torch._subclasses.fake_tensor import FakeTensor  # slow to import, seldom needed

    return isinstance(tensor, FakeTensor)


def _transparent(function: Any) -> Any:
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


_transparent_attention = _transparent(F.multi_head_attention_forward)

plain = torch._C.DisableTorchFunction
