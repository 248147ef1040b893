"""Classes, functions and formats that the tail takes from its example equal the head's, or the run is refused."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus

import microtome as mt
from microtome.errors import BadInputs, NoMatch
from microtome.split.analysis.structure_spec import flatten, qualified_name


class Mode(enum.Enum):
    SUM = "sum"
    MEAN = "mean"


class Held:
    def __init__(self, held: Any) -> None:
        self.held = held


class Chooses(nn.Module):
    """Returns a value that depends on the size of the batch beside its output."""

    def __init__(self, small: Any, large: Any, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.values, self.wrap, self.linear = (small, large), wrap, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.linear(x), self.wrap(self.values[len(x) > 2])


class Net(nn.Module):
    def __init__(self, small: Any, large: Any, wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b = Chooses(small, large, wrap), nn.Linear(4, 4)
        self.large, self.unwrap = large, unwrap

    def forward(self, x: Tensor) -> Tensor:
        y, value = self.a(x)
        return self.b(y * (2 if self.unwrap(value) is self.large else 1))


PAIRS = {
    "dtype": (torch.float16, torch.bfloat16),
    "layout": (torch.strided, torch.sparse_coo),
    "memory format": (torch.contiguous_format, torch.channels_last),
    "enum": (Mode.SUM, Mode.MEAN),
    "class": (int, float),
    "function": (relu, softplus),
    "function of one name": (torch.sin, math.sin),
    "builtin": (torch.sin, torch.cos),
}
WRAPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda value: value, lambda held: held),
    "list": (lambda value: [value], lambda held: held[0]),
    "dict": (lambda value: {"k": value}, lambda held: held["k"]),
    "key": (lambda value: {value: 1}, lambda held: next(iter(held))),
    "record": (Held, lambda held: held.held),
}
#: An object that holds a function is no record.
CASES = [
    (pair, wrap)
    for pair in PAIRS
    for wrap in WRAPS
    if wrap != "record" or not callable(PAIRS[pair][0]) or pair == "class"
]


@pytest.mark.parametrize(("pair", "wrap"), CASES)
def test_another_fixed_value_than_on_the_example_is_refused(pair: str, wrap: str) -> None:
    model = Net(*PAIRS[pair], *WRAPS[wrap]).eval()
    with torch.no_grad():
        head, tail = mt.split(copy.deepcopy(model), torch.rand(2, 4), at="a")
        for rows in (1, 2):
            x = torch.rand(rows, 4)
            assert tail(mt.Boundary.from_bytes(head(x).to_bytes())).equal(model(x))
        with pytest.raises(BadInputs, match=r"output of 'a': expected .*, as on the example, got"):
            head(torch.rand(3, 4))


def test_another_key_than_on_the_example_is_refused() -> None:
    model = Net(1, "1", *WRAPS["key"]).eval()
    head, _ = mt.split(model, torch.rand(2, 4), at="a")
    with pytest.raises(
        BadInputs, match=r"expected .*\(tensor, \{1: value\}\), as on .*, got .*\(tensor, \{'1': value\}\)"
    ):
        head(torch.rand(3, 4))


def _scale(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


class _Local:
    def method(self) -> None: ...


@pytest.mark.parametrize(
    "value",
    [lambda x: x, _scale(2), _Local().method, [].append, nn.ReLU(), type("Made", (), {})],
    ids=["lambda", "closure", "bound method", "builtin method", "module", "class without a name"],
)
def test_values_without_a_name_that_others_find_are_refused(value: Any) -> None:
    assert qualified_name(value) is None
    with pytest.raises(NoMatch, match=r"'a' runs in the head, and it returns a .*, which is no tensor, number"):
        mt.split(Net(value, value, *WRAPS["list"]), torch.rand(2, 4), at="a")


class Pair(tuple[int, int]):
    scale: int


class Table(dict[str, int]):
    scale: int


@pytest.mark.parametrize("base", [Pair((1, 2)), Table(a=1)], ids=["tuple", "dict"])
def test_containers_with_attributes_are_refused(base: Any) -> None:
    scaled = copy.copy(base)
    scaled.scale = 3
    with pytest.raises(NoMatch, match=r"it returns a (Pair|Table) with the attribute 'scale', which is no tensor"):
        mt.split(Net(scaled, scaled, *WRAPS["list"]), torch.rand(2, 4), at="a")
    head, _ = mt.split(Net(base, scaled, *WRAPS["itself"]), torch.rand(2, 4), at="a")
    with pytest.raises(BadInputs, match=r"output of 'a': expected .*, as on the example, got NoneType"):
        head(torch.rand(3, 4))


class Synced(dict[str, int]):
    """Keeps attributes equal to its items, as `ModelOutput` of transformers does."""

    def __init__(self, **items: int) -> None:
        super().__init__()
        for key, item in items.items():
            self[key] = item

    def __setitem__(self, key: str, item: int) -> None:
        super().__setitem__(key, item)
        setattr(self, key, item)


def test_a_dict_whose_attributes_are_its_items_crosses() -> None:
    assert flatten(Synced(scale=3))[0].unsupported is None
    stale = Table(scale=3)  # a copy with another item would keep the attribute
    stale.scale = stale["scale"]
    assert flatten(stale)[0].unsupported == "Table with the attribute 'scale'"


class Applies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return self.b(function(self.a(x)))


def test_a_function_among_the_inputs_is_that_of_the_example_or_refused() -> None:
    model, x = Applies().eval(), torch.rand(2, 4)
    with torch.no_grad():
        head, tail = mt.split(model, (x, torch.sin), at="a")
        assert tail(mt.Boundary.from_bytes(head(x, torch.sin).to_bytes())).equal(model(x, torch.sin))
        with pytest.raises(BadInputs, match=r"expected .*tensor, torch.sin.*, got .*tensor, torch.cos"):
            head(x, torch.cos)
    for function in (lambda y: y * 2, nn.ReLU()):
        with pytest.raises(NoMatch, match=r"the model is given a (function .*<lambda>|ReLU), which cannot be sent"):
            mt.split(model, (x, function), at="a")
