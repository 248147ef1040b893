"""A model that computes nothing, so that only the transfer is measured."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from microtome import zoo
from microtome.zoo import Resolved


class Source(nn.Module):
    """Returns a thousand precomputed numbers per input element."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.randn(1, most))

    def forward(self, x: Tensor) -> Tensor:
        numbers: Tensor = self.numbers[:, : 1000 * x.shape[1]]  # type: ignore[index]
        return numbers


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].clone()


class Funnel(nn.Sequential):
    """Sends as many numbers across the cut at `"0"` as the input requests, and returns one."""

    def __init__(self) -> None:
        super().__init__(Source(2_500_000), First())


FUNNEL = "benchmarks.remote.models:Funnel"


def build(name: str, inputs: str) -> Resolved:
    """Build the same model on both sides."""
    return zoo.resolve(name, inputs=inputs)
