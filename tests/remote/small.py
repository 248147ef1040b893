"""A small model, and an example for it."""

from __future__ import annotations

from torch import Tensor, nn

from microtome import zoo


def small(name: str = "tiny-resnet") -> tuple[nn.Module, Tensor]:
    model, x = zoo.build(name)
    assert isinstance(x, Tensor)
    return model.eval(), x
