"""Law: after any action, every leaf that the model's forward reaches has the gradient, value and flags that it had."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.profile import utilization
from tests.marks import slow

GLOBAL = torch.ones(4, requires_grad=True)
HIDDEN = {"w": [torch.ones(4, requires_grad=True)]}


@pytest.fixture(autouse=True)
def sample_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample the load for as long as the passes take, not for a second."""
    monkeypatch.setattr(utilization, "_MIN_S", 0.0)


ACTIONS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "trace": partial(mt.trace, backward=True),
    "fake": partial(mt.trace, backward=True, fake=True),
    "real": partial(mt.trace, backward=True, fake=False),
    "profile": partial(mt.profile, backward=True),
    "time": partial(mt.profile, backward=True, measure=("time", "memory", "load"), repeat=3, warmup=1, budget_s=1),
    "cuts": mt.cuts,
    "split": partial(mt.split, at="layer"),
    "extract": lambda model, x: mt.extract(model, x, "layer"),
}


class Slotted:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = torch.ones(4, requires_grad=True)


class Holder:
    def __init__(self) -> None:
        self.inside = {"weight": torch.ones(4, requires_grad=True)}


class Base(nn.Module):
    on_class: ClassVar[Tensor] = torch.ones(4, requires_grad=True)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.attribute = torch.ones(4, requires_grad=True)
        self.listed = [torch.ones(4, requires_grad=True)]
        self.named = {"a": (torch.ones(4, requires_grad=True),)}
        self.twice = [self.layer.bias]
        self.hidden = [nn.Linear(4, 4)]
        self.held, self.slotted = Holder(), Slotted()


class Attribute(Base):
    def leaf(self) -> Tensor:
        return self.attribute


class Listed(Base):
    def leaf(self) -> Tensor:
        return self.listed[0]


class Named(Base):
    def leaf(self) -> Tensor:
        return self.named["a"][0]


class Twice(Base):
    def leaf(self) -> Tensor:
        return self.twice[0]


class Hidden(Base):
    def leaf(self) -> Tensor:
        return self.hidden[0].bias


class Held(Base):
    def leaf(self) -> Tensor:
        return self.held.inside["weight"]


class InSlot(Base):
    def leaf(self) -> Tensor:
        return self.slotted.weight


class OnClass(Base):
    def leaf(self) -> Tensor:
        return self.on_class


class Global(Base):
    def leaf(self) -> Tensor:
        return GLOBAL


class InGlobal(Base):
    def leaf(self) -> Tensor:
        return HIDDEN["w"][0]


class Closure(Base):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.ones(4, requires_grad=True)
        self.get = lambda: weight

    def leaf(self) -> Tensor:
        return self.get()


KINDS = (Attribute, Listed, Named, Twice, Hidden, Held, InSlot, OnClass, Global, InGlobal, Closure)


def multiply(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.layer(x * model.leaf())
    return y


def return_it(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return model.layer(x), model.leaf()


@pytest.mark.parametrize("grad", [None, 3.0])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("use", [multiply, *slow(return_it)])
@pytest.mark.parametrize("kind", KINDS)
def test_leaves_have_the_gradients_that_they_had(kind: type[Base], use: Any, action: str, grad: float | None) -> None:
    model = type(kind.__name__, (kind,), {"forward": use})()
    leaf: Tensor = model.leaf()
    leaf.grad = before = None if grad is None else torch.full_like(leaf, grad)
    value = leaf.detach().clone()
    with suppress(mt.MicrotomeError):  # whether it can be done is another question
        ACTIONS[action](model, torch.ones(2, 4))
    assert leaf.grad is before
    assert before is None or before.tolist() == [grad] * 4
    assert (type(leaf.detach()), leaf.requires_grad, leaf.is_leaf) == (Tensor, True, True)
    assert leaf.detach().equal(value)
    leaf.grad = None


def test_an_optimizer_steps_as_before_after_a_profile() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [torch.ones(4, requires_grad=True)]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scales[0]

    model = Scales()
    optimizer = torch.optim.SGD(model.scales, lr=0.5)
    mt.profile(model, torch.ones(2, 4), backward=True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert model.scales[0].tolist() == [0] * 4  # 1 - 0.5 x 2


@pytest.mark.parametrize("fake", [None, True, False])
def test_a_leaf_whose_flag_a_forward_changes_has_it_again(fake: bool | None) -> None:
    class Freezes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [torch.ones(4, requires_grad=True), torch.ones(4)]

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scales[0] * self.scales[1].requires_grad_()
            self.scales[0].requires_grad_(False)
            return y

    model = Freezes()
    mt.trace(model, torch.ones(2, 4), fake=fake)
    assert [scale.requires_grad for scale in model.scales] == [True, False]


COUNTS = torch.zeros(2, 4)


@pytest.mark.parametrize("fake", [None, False])
def test_a_tensor_that_no_module_holds_has_its_values_again(fake: bool | None) -> None:
    rows = list(torch.ones(3, 4).unbind())

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            COUNTS[0].add_(1)
            COUNTS.mul_(2)
            rows[1] += 1
            return x + COUNTS[0] + rows[1]

    assert mt.trace(Writes(), torch.ones(4), fake=fake).how.tensor_mode == "real"
    assert COUNTS.sum() == 0
    assert torch.stack(rows).eq(1).all()


class WritesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.add_(1)
        return x * self.weight


def test_measuring_restores_a_parameter_that_the_forward_writes_to() -> None:
    model = WritesParameter()
    mt.profile(model, torch.ones(3), measure="time")
    assert model.weight.tolist() == [1, 1, 1]
