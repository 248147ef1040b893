"""Law: inspecting the objects of users runs none of their properties, and never raises."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from benchmarks.split_zoo.models import build, entries, mixed
from microtome.engine.attributes import fields_of
from microtome.engine.pytree import children_of, map_tensors, tensors_in


class Refused(Exception):
    pass


@dataclass
class Config:
    """As configurations of transformers whose layers differ: reading a global value is an error."""

    size: int = 4
    width: int = 8
    offset: Tensor = field(default_factory=lambda: torch.ones(4))

    def __getattribute__(self, name: str) -> Any:
        if name == "width":
            raise Refused(name)
        return super().__getattribute__(name)


@dataclass
class Computed:
    size: int = 4
    half: int = field(init=False)

    @property  # type: ignore[no-redef]
    def half(self) -> int:  # noqa: F811
        raise Refused("half")

    @half.setter
    def half(self, value: int) -> None:
        """Keep nothing: it is computed."""


class Slotted:
    __slots__ = ("scale", "unset")

    def __init__(self) -> None:
        self.scale = 2.0

    def __getattr__(self, name: str) -> Any:
        raise Refused(name)


class Proxy:
    """As modules and clients that are loaded when they are first used."""

    def __getattr__(self, name: str) -> Any:
        raise Refused(name)

    def __call__(self, x: Tensor) -> Tensor:
        return x * 1.0


PROXY: Any = None


@pytest.fixture(autouse=True)
def _proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PROXY", Proxy())  # not before: pytest looks into modules as it collects


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = Config()
        self.computed = Computed()
        self.slotted = Slotted()

    @property
    def broken(self) -> Tensor:
        raise Refused("broken")

    def forward(self, x: Tensor, config: Config, computed: Computed) -> Tensor:
        y: Tensor = self.linear(x)
        return PROXY(y) + config.offset * self.slotted.scale + computed.size


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.second = Layer()

    def forward(self, x: Tensor, config: Config, computed: Computed) -> Tensor:
        y: Tensor = self.second(self.first(x, config, computed), config, computed)
        return y


def _inputs() -> mt.Inputs:
    return mt.Inputs(torch.randn(2, 4), Config(), Computed())


ACTIONS: dict[str, Any] = {
    "trace": lambda net, given, to: mt.trace(net, given),
    "trace fake": lambda net, given, to: mt.trace(net, given, fake=True),
    "trace real": lambda net, given, to: mt.trace(net, given, fake=False),
    "profile": lambda net, given, to: mt.profile(net, given, measure="time"),
    "extract": lambda net, given, to: mt.extract(net, given, "first"),
    "cuts": lambda net, given, to: mt.cuts(net, given),
    "split": lambda net, given, to: mt.split(net, given, at="first"),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_actions_run_no_code_of_the_objects_in_inputs(action: str, tmp_path: Path) -> None:
    net, given = Net(), _inputs()
    expected = given.run(net)
    ACTIONS[action](net, given, tmp_path)
    assert torch.equal(given.run(net), expected)


def test_a_configuration_whose_layers_differ_is_not_read() -> None:
    """That of gemma4_unified raises where a value that differs by layer is read of the whole."""
    entry = next(entry for entry in entries() if str(entry) == "transformers:gemma4_unified")
    with mixed():
        model, (inputs, *_) = build(entry)
    assert len(mt.cuts(model, inputs)) > 3


def test_a_recording_runs_no_code_of_the_objects_in_inputs(tmp_path: Path) -> None:
    net, given = Net(), _inputs()
    with mt.record(net, "first", to=tmp_path / "run"):
        given.run(net)
    assert len(mt.load(tmp_path / "run")["first"]) == 1


def test_fields_are_read_where_they_are_stored() -> None:
    config, computed = Config(), Computed(3)
    assert list(fields_of(config)) == ["size", "width", "offset"]
    assert fields_of(config)["width"] == 8
    assert fields_of(computed) == {"size": 3, "half": None}
    assert children_of(computed) == [3, None]
    assert list(tensors_in(config)) == [config.offset]


def test_a_copy_keeps_what_may_not_be_read() -> None:
    made = map_tensors(lambda tensor: tensor + 1, Config(size=5))
    assert fields_of(made)["width"] == 8
    assert (made.size, made.offset.tolist()) == (5, [2.0] * 4)


class Callback(partial[Tensor]):
    """A subclass of a class written in C, whose attributes are read-only."""


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.callback = nn.Linear(4, 4), Callback(torch.mul, torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.callback(self.linear(x))


def test_read_only_attributes_of_classes_written_in_c_are_left_alone() -> None:
    model, x = Calls(), torch.ones(1, 4)
    before = model.callback.func, model.callback.args
    assert mt.profile(model, x).total.macs == 16
    head, tail = mt.split(model, x, at="linear")
    assert torch.equal(tail(head(x)), model(x))
    assert (model.callback.func, model.callback.args) == before
