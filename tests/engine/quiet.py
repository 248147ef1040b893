"""A model whose code refers to no source of random numbers, and a moment in its forward at which others may run."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn


class Quiet(nn.Module):
    meanwhile: ClassVar[list[Callable[[], object]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for run in self.meanwhile:
            run()
        z: Tensor = self.second(y)
        return z


class Noisy(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))
