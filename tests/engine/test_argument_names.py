"""Names of arguments, from the signature of `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.engine.argument_names import describe_arguments, named_arguments


class Net(nn.Module):
    """A model whose `forward` is that of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def with_forward(forward: Callable[..., Any]) -> nn.Module:
    return type("Net", (Net,), {"forward": forward})()


CASES: list[tuple[Callable[..., Any], mt.Inputs, list[str]]] = [
    (lambda self, x, mask=None: x, mt.Inputs(1), ["x"]),
    (lambda self, x, mask=None: x, mt.Inputs(1, mask=2), ["x", "mask"]),
    (lambda self, x, *more: x, mt.Inputs(1, 2, 3), ["x", "more[0]", "more[1]"]),
    (lambda self, x, /, **more: x, mt.Inputs(1, y=2), ["x", "y"]),
    (lambda self, x, *, y: x, mt.Inputs(1, 2), ["x", "args[1]"]),  # more than it takes: the model raises
    (lambda self, x, y: x, mt.Inputs(1, x=2), ["args[0]", "x"]),  # x twice
    (lambda self, layer: layer, mt.Inputs(1), ["args[0]"]),  # the output of self.layer is named so
]


@pytest.mark.parametrize(("forward", "inputs", "names"), CASES)
def test_arguments_have_the_names_of_parameters(
    forward: Callable[..., Any], inputs: mt.Inputs, names: list[str]
) -> None:
    named = named_arguments(with_forward(forward), inputs)
    assert list(named) == names
    assert list(named.values()) == [*inputs.args, *inputs.kwargs.values()]


def test_a_forward_of_the_instance_is_no_method() -> None:
    model = Net()
    model.forward = lambda image: image
    assert list(named_arguments(model, mt.Inputs(1))) == ["image"]


def test_a_forward_without_a_signature_has_no_names() -> None:
    model = with_forward(property(lambda self: len))  # type: ignore[arg-type]
    assert list(named_arguments(model, mt.Inputs(1))) == ["args[0]"]


def test_arguments_are_described_by_shape_and_dtype() -> None:
    model = with_forward(lambda self, x, ids, flag=True: x)
    inputs = mt.Inputs(torch.ones(1, 3), torch.zeros(4, dtype=torch.int64), flag=False)
    assert describe_arguments(model, inputs) == "x 1x3, ids 4:int64, flag False"
    assert describe_arguments(model, mt.Inputs([torch.ones(2), None], 1)) == "x [2, None], ids 1"
    assert describe_arguments(model, mt.Inputs()) == "no arguments"


def test_values_that_cross_a_cut_have_the_names_of_parameters() -> None:
    def forward(self: Any, image: Tensor) -> Any:
        return self.layer(image) + image

    model = with_forward(forward)
    cuts = mt.cuts(model, "4x2")
    assert [value.name for value in cuts["layer"].live] == ["image", "layer"]
    assert str(cuts).startswith("Net on image 4x2: 1 cut\n")
    head, tail = mt.split(model, "4x2", at="layer")
    x = torch.randn(4, 2)
    assert list(head(x).tensors) == ["image", "layer"]
    assert tail(head(x)).equal(model(x))


def test_a_description_names_arguments_as_submodules_are_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, layer: torch.Tensor) -> torch.Tensor:
            return self.layer(layer)

    assert describe_arguments(Net(), mt.Inputs(torch.ones(2, 3))) == "layer 2x3"
