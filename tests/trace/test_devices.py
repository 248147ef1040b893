"""Code that reads the device of a tensor takes the same branch on substitute tensors as in a real run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.engine.meta_tensors import simulated_device

#: Ways to ask whether a tensor is on the CPU.
QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "type": lambda x: x.device.type == "cpu",
    "device": lambda x: x.device == torch.device("cpu"),
    "name": lambda x: str(x.device) == "cpu",
    "one of several": lambda x: x.device in (torch.device("cuda:0"), torch.device("cpu")),
    "kept": lambda x: (lambda device: device.type)(x.device) == "cpu",
    "copied": lambda x: torch.device(x.device).type == "cpu",
    "is_cpu": lambda x: x.is_cpu,
    "is_cuda": lambda x: not x.is_cuda and x.is_cpu,
    "another tensor's": lambda x: x.device == torch.ones(1).device,
    "get_device": lambda x: x.get_device() == -1 and torch.get_device(x) == -1 and x.is_cpu,
    "made there": lambda x: torch.zeros(2, device=x.device).device.type == "cpu",
}


class Branch(nn.Module):
    """Runs one layer on a CPU, and another elsewhere; makes tensors where its input is."""

    def __init__(self, asks: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.asks = asks
        self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 400)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device
        x = x + torch.arange(4, device=device) + torch.ones(4).to(device) + x.new_ones(4, device=device)
        y: Tensor = self.small(x) if self.asks(x) else self.large(x)
        return y


@pytest.mark.parametrize("asks", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("grad", [True, False])
def test_counts_do_not_depend_on_the_mode_where_code_asks_for_the_device(
    asks: Callable[[Tensor], Any], grad: bool
) -> None:
    model, x = Branch(asks), torch.ones(2, 4)
    with torch.set_grad_enabled(grad):
        found = [mt.trace(model, x, fake=fake) for fake in (None, True, False)]
        assert [one.how.tensor_mode for one in found] == ["meta", "fake", "real"]
        flops = [[(op.name, op.flops) for op in one.ops if op.name != "aten._to_copy.default"] for one in found]
        assert flops[0] == flops[1] == flops[2]
        assert [call.path for call in found[0].calls] == ["", "small"]
        assert [cut.at for cut in mt.cuts(model, x)] == ["small"]


class Strict(nn.Module):
    """Raises on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu:
            raise ValueError("expected a GPU")
        return x


def test_after_a_trace_that_raises_tensors_are_on_the_device_that_they_are_on() -> None:
    with pytest.raises(ValueError, match="expected a GPU"):
        mt.trace(Strict(), torch.ones(2))
    assert simulated_device() is None
    assert torch.ones(1, device="meta").device.type == "meta"


def test_a_model_on_meta_is_on_meta() -> None:
    with torch.device("meta"):
        model, x = Branch(lambda x: not x.is_meta), torch.ones(2, 4)
    assert [call.path for call in mt.trace(model, x).calls] == ["", "large"]
