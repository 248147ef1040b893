"""A model in which nothing is computed, so that only what crosses counts."""

from __future__ import annotations

from torch import Tensor, nn

from microtome import zoo
from microtome.zoo import Resolved


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].clone()


class Funnel(nn.Sequential):
    """All of the input crosses at `"0"`, and one number comes back."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), First())


FUNNEL = "benchmarks.remote.models:Funnel"


def build(name: str, inputs: str) -> Resolved:
    """The same on both sides."""
    return zoo.resolve(name, inputs=inputs)
