"""A compiled model is split as Python runs it, also if its compiled code computes other last bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import microtome as mt

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def inexact(graph: fx.GraphModule, _: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Compile to code whose numbers differ in their last bits, as those of inductor do."""
    return lambda *args: tuple(value * (1 + 2**-20) for value in graph(*args))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x.flatten(1))
        return output


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), Head()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.pool(self.norm(self.conv(x)).relu()))
        return output


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def wrapped(model: Net) -> Any:
    return torch.compile(model, backend=inexact)


def in_place(model: Net) -> Any:
    model.compile(backend=inexact)
    return model


def layer_in_place(model: Net) -> Any:
    model.head.compile(backend=inexact)
    return model


def method(model: Net) -> Any:
    model.forward = torch.compile(model.forward, backend=inexact)  # type: ignore[method-assign]
    return model


@torch.no_grad()
@pytest.mark.parametrize("compiled_as", [wrapped, in_place, layer_in_place, method])
def test_the_stages_of_a_compiled_model_are_bit_equal_to_it_uncompiled(compiled_as: Callable[..., Any]) -> None:
    whole = net()(X)
    compiled = compiled_as(net())
    assert not compiled(X).equal(whole)  # the backend does change the last bits
    stages = mt.split(compiled, X, at="norm")
    assert stages.verified == "bit-equal"
    assert stages(X).equal(whole)
    assert stages.try_codec("raw").largest == 0
    assert not compiled(X).equal(whole)  # and the model runs compiled afterwards
