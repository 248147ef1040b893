"""A fake clock that a model advances, so that measured times are exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Clock:
    """Nanoseconds that pass when somebody adds them."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Takes(nn.Module):
    """A layer that squares, whose forward takes so many nanoseconds and its backward twice as many."""

    def __init__(self, clock: Clock, nanoseconds: int) -> None:
        super().__init__()
        self.clock, self.nanoseconds = clock, nanoseconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.nanoseconds
        out: Tensor = _Square.apply(x, self.clock, 2 * self.nanoseconds)
        return out


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, backward: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.clock, ctx.backward_ns = clock, backward
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.now += ctx.backward_ns
        return 2 * ctx.saved_tensors[0] * grads[0], None, None
