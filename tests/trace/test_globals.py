"""Law: what a forward writes to globals and class attributes is undone, also after an attempt that failed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo  # the first run on meta tensors imports it, and it replaces functions of torch
from torch import Tensor, nn

import microtome as mt
from tests.engine import quiet
from tests.engine.test_laws import assert_same, snapshot

COUNT = 0
SCALE: float  # assigned by the first run
CACHE: dict[str, Any] = {}
NOISES: list[Tensor] = []


class Style(nn.Module):
    """As some published generators do, it keeps noise of the first run in a global, and reads values."""

    latest: ClassVar[Tensor | None] = None
    shapes: ClassVar[list[Any]] = []

    def __init__(self, *, reads: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        global COUNT, SCALE
        COUNT += 1
        SCALE = 2.0
        y = _scaled(self.layer(x))
        type(self).latest = y
        self.shapes.append(y.shape)
        quiet.Quiet.meanwhile.append(int)
        if self.reads and x.sum() < 0:
            y = y + 1
        return y + NOISES[0]


def _scaled(y: Tensor) -> Tensor:
    if not NOISES:
        NOISES.append(torch.zeros_like(y))
    CACHE["last"] = y
    return y * SCALE


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("fake", [None, True, False])
def test_globals_and_class_attributes_are_as_found(fake: bool | None, reads: bool) -> None:
    model = Style(reads=reads)
    before = snapshot(model)
    if fake and reads:
        with pytest.raises(mt.MicrotomeError, match="cannot be traced without computing"):
            mt.trace(model, torch.ones(2, 4), fake=True)
    else:
        assert mt.trace(model, torch.ones(2, 4), fake=fake).how.tensor_mode == (
            "real" if reads or fake is False else "fake" if fake else "meta"
        )
    assert_same(before, snapshot(model))
    assert (COUNT, CACHE, NOISES, "SCALE" in globals()) == (0, {}, [], False)
    assert (Style.latest, Style.shapes) == (None, [])


def test_a_failed_attempt_leaves_nothing_to_the_next_one() -> None:
    """Noise of shape (2, 4) on meta tensors would meet real ones, and then inputs of another batch."""
    model = Style()
    for batch in (2, 3):
        assert mt.profile(model, torch.ones(batch, 4)).total.macs == batch * 16


def test_globals_that_the_code_does_not_refer_to_are_left_alone() -> None:
    class Tells(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            log()
            return x + 1

    lines: list[str] = []
    log = lambda: lines.append("ran")  # noqa: E731
    mt.trace(Tells(), torch.ones(1))
    assert lines == ["ran"]  # a closure is no global: see the limits


class Making(OrderedDict[str, Any]):
    """Gives a new instance of the class that it holds, as the table of activations of transformers does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


MAKING = Making(relu=nn.ReLU, gelu=nn.GELU)


@pytest.mark.parametrize("fake", [None, True, False])
def test_a_dict_with_default_values_has_its_original_items_afterwards(fake: bool | None) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = MAKING["relu"](x)
            return out

    mt.trace(Net(), torch.ones(2), fake=fake)
    assert list(OrderedDict.items(MAKING)) == [("relu", nn.ReLU), ("gelu", nn.GELU)]


@pytest.mark.parametrize("action", [mt.trace, lambda model, x: mt.split(model, x, at="0")], ids=["trace", "split"])
def test_the_order_of_a_models_ordered_dict_is_kept(action: Any) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.recent = OrderedDict(a=1, b=2)
    model.recent.move_to_end("a")
    action(model, torch.ones(2, 4))
    assert list(model.recent) == ["b", "a"]
