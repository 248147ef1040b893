"""Python modules that a model refers to: they are neither state of the model nor searched for tensors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt


class Lazy(ModuleType):
    """A module of a class of its own, as packages have that import their names lazily."""


class Net(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.library = library

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


@pytest.mark.parametrize("library", [torch.nn.functional, mt, Lazy("lazy")], ids=lambda module: module.__name__)
def test_a_model_with_a_python_module_is_traced_and_cut(library: ModuleType) -> None:
    model, x = Net(library), torch.randn(2, 3)
    names = set(vars(library))
    assert mt.profile(model, x).total.macs == 2 * 2 * 3 * 3  # two layers, two samples
    head, tail = mt.split(model, x, at="a")
    assert tail(head(x)).equal(model(x))
    assert model.library is library
    assert names <= set(vars(library))


def test_a_model_whose_code_refers_to_microtome_is_cut() -> None:
    library = mt

    class Refers(Net):
        def forward(self, x: Tensor) -> Any:
            assert library.__version__
            return super().forward(x)

    model, x = Refers(None), torch.randn(2, 3)
    head, tail = mt.split(model, x, at="a")
    assert tail(head(x)).equal(model(x))
