"""A model whose second half waits for a gate, and takes as much memory, as its input says."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

#: The last value of an input that asks for something; others, such as random ones, do not.
MARK = 42.0


class Gate:
    """What asks for it is not computed, in whatever process, until it is opened."""

    def __init__(self) -> None:
        self.number = random.randrange(1, 1 << 24)  # a float32 holds it
        self.close()

    def close(self) -> None:
        _file(self.number).touch()

    def open(self) -> None:
        _file(self.number).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()


def _file(number: int) -> Path:
    return Path(tempfile.gettempdir()) / f"microtome-gate-{number}"


class Wait(nn.Module):
    """Waits for the gate of the first value; has as many megabytes for a while as the second one says."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 7] == MARK:
            while x[0, 0] and _file(int(x[0, 0])).exists():
                time.sleep(0.005)
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


def asking(gate: Gate | None = None, megabytes: float = 0.0, rows: int = 1) -> Tensor:
    """An input that waits for that, and takes that much."""
    x = torch.randn(rows, 8)
    x[0, 0], x[0, 1], x[0, 7] = 0 if gate is None else gate.number, megabytes, MARK
    return x
