"""A model whose second half takes as long, and as much memory, as its input says."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

#: The last value of an input that asks for something; others, such as random ones, do not.
MARK = 42.0


class Wait(nn.Module):
    """Sleeps for the first value, in seconds; has as many megabytes for a while as the second one says."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 7] == MARK:
            time.sleep(float(x[0, 0]))
            torch.ones(int(x[0, 1]) << 18)
        return x + 1


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.wait, self.tail = nn.Identity(), Wait(), nn.Linear(8, 4)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.wait(self.head(x)))
        return out


def asking(seconds: float = 0.0, megabytes: float = 0.0, rows: int = 1) -> Tensor:
    """An input that takes that long, and that much."""
    x = torch.randn(rows, 8)
    x[0, 0], x[0, 1], x[0, 7] = seconds, megabytes, MARK
    return x
