"""Code of a model that torch.compile compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from microtome.engine.compiled_code import runs_compiled_code

pytestmark = pytest.mark.filterwarnings("ignore")  # of dynamo


def compiled_module() -> nn.Module:
    model: Any = torch.compile(nn.Sequential(nn.ReLU()), backend="eager")
    return model


def compiled_child() -> nn.Module:
    return nn.Sequential(nn.ReLU(), compiled_module())


def compiled_in_place() -> nn.Module:
    child = nn.ReLU()
    child.compile(backend="eager")
    return nn.Sequential(child)


def compiled_forward() -> nn.Module:
    model = nn.ReLU()
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


class Method(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.twice(x)

    @torch.compile(backend="eager")
    def twice(self, x: Tensor) -> Tensor:
        return 2 * x


@torch.compile(backend="eager")
def twice(x: Tensor) -> Tensor:
    return 2 * x


class Function(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return twice(x)


class Disabled(nn.Module):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize(
    "build", [compiled_module, compiled_child, compiled_in_place, compiled_forward, Method, Function]
)
def test_compiled_modules_methods_and_functions_are_found(build: Callable[[], nn.Module]) -> None:
    model = build()
    model(torch.ones(2))
    assert runs_compiled_code(model)


@pytest.mark.parametrize("build", [nn.ReLU, Disabled])
def test_other_code_is_not_compiled(build: Callable[[], nn.Module]) -> None:
    twice(torch.ones(2))
    assert not runs_compiled_code(build())
