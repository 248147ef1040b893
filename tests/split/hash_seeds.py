"""Models that call modules in the order of a set, run by `test_hash_seeds.py` in two processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.split_zoo.models import build, entries, mixed
from benchmarks.split_zoo.seeds import Built, run_side

NAMES = ("ash", "birch", "cedar")
#: Of those that go over a set of kinds of layers, and one that runs a module several times.
ZOO = ("gemma3_text", "modernbert", "albert")


class Spec:
    """A record."""

    def __init__(self, name: str) -> None:
        self.name = name


class Slow:
    """Holds something that cannot be compared between processes."""

    def __init__(self, name: str) -> None:
        self.run = partial(torch.mul, other=1.0 + NAMES.index(name))


class Kind(Enum):
    ASH = 1
    BIRCH = 2
    CEDAR = 3


#: For each kind of value, what makes one of a name.
VALUES: dict[str, Callable[[str], Any]] = {
    "int": NAMES.index,
    "float": lambda name: 1.5 + NAMES.index(name),
    "str": str,
    "device_name": lambda name: ("cpu", "cuda", "meta")[NAMES.index(name)],
    "complex": lambda name: complex(0, NAMES.index(name)),
    "bytes": str.encode,
    "slice": lambda name: slice(NAMES.index(name), 9),
    "range": lambda name: range(NAMES.index(name), 9),
    "numpy_int": lambda name: np.int64(NAMES.index(name)),
    "numpy_array": lambda name: np.array([NAMES.index(name), 1]),
    "enum": lambda name: Kind[name.upper()],
    "function": lambda name: (torch.sin, torch.cos, torch.tanh)[NAMES.index(name)],
    "lambda": lambda name: lambda x: x * NAMES.index(name),
    "class": lambda name: (nn.ReLU, nn.Tanh, nn.Sigmoid)[NAMES.index(name)],
    "record": Spec,
    "object": Slow,
    "dict": lambda name: {"name": [name]},
    "set": lambda name: {name, "oak"},
}


def number(value: Any) -> float:
    """A number that differs between the values of a kind."""
    if isinstance(value, Slow):
        return float(value.run.keywords["other"])
    if isinstance(value, slice | range):
        return 1.0 + value.start
    if isinstance(value, Enum):
        return float(value.value)
    if callable(value):
        known: tuple[Any, ...] = (torch.sin, torch.cos, torch.tanh, nn.ReLU, nn.Tanh, nn.Sigmoid)
        return 1.0 + known.index(value) if value in known else 2.0 + float(value(1.0))
    if isinstance(value, complex | int | float | np.integer):
        return 1.0 + abs(complex(value))
    if isinstance(value, np.ndarray):
        return 1.0 + float(value[0])
    text = str(value.decode() if isinstance(value, bytes) else vars(value) if isinstance(value, Spec) else value)
    return 1.0 + sum(at for at, name in enumerate((*NAMES, "cpu", "cuda", "meta")) if name in text)


class Scaled(nn.Module):
    """Returns another output for each name that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, name: Any = "ash", kind: str = "") -> Tensor:
        factor = number(name) if kind else 1 + NAMES.index(name)
        y: Tensor = self.linear(x) * factor
        return y


class Times(nn.Module):
    """A leaf that is called with a number."""

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x * factor


class Several(nn.Module):
    """Calls modules in the order of a set; `how` makes one output of all."""

    def __init__(self, how: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.how = how
        self.each = nn.ModuleDict({name: nn.Linear(4, 4) for name in NAMES})

    def forward(self, x: Tensor, *, is_leaf: bool = False) -> Any:
        if is_leaf:
            return self.how([x * (1.5 + NAMES.index(name)) for name in set(NAMES)])
        return self.how([self.each[name](x) for name in set(NAMES)])


class SetNet(nn.Module):
    """Runs `body(self, x)`, which goes over `self.names` in some order."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.names = set(NAMES)
        self.one, self.last = Scaled(), nn.Linear(4, 4)
        self.each = nn.ModuleDict({name: Scaled() for name in NAMES})
        self.both = Pair()
        self.times, self.listed, self.stacked = Times(), Several(list), Several(torch.stack)
        self.tables = {name: torch.tensor([2.0 + at]) for at, name in enumerate(NAMES)}
        self.weights = dict(zip(NAMES, (2.0, 3.0, 5.0), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Pair(nn.Module):
    """Returns a dict, in the order of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {name: y * (1 + NAMES.index(name)) for name in set(NAMES)}


def _joined(net: Any, found: dict[str, Tensor]) -> Tensor:
    y: Tensor = net.last(found["ash"] - 2 * found["birch"] + 7 * found["cedar"])
    return y


def by_name(net: Any, x: Tensor) -> Tensor:
    return _joined(net, {name: net.one(x, name) for name in net.names})


def by_keyword(net: Any, x: Tensor) -> Tensor:
    return _joined(net, {name: net.one(x=x, name=name) for name in net.names})


def by_module(net: Any, x: Tensor) -> Tensor:
    return _joined(net, {name: net.each[name](x, name) for name in net.names})


def by_tensor(net: Any, x: Tensor) -> Tensor:
    given = {name: net.each[name](x) for name in NAMES}
    return _joined(net, {name: net.one(given[name]) for name in net.names})


def by_factor(net: Any, x: Tensor) -> Tensor:
    return _joined(net, {name: net.one(x * net.weights[name]) for name in net.names})


def by_column(net: Any, x: Tensor) -> Tensor:
    return _joined(net, {name: net.one(x.roll(NAMES.index(name), 1)) for name in net.names})


def by_chain(net: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = net.one(x).relu()
    return x + net.last(x)


def first_alone(net: Any, x: Tensor) -> Tensor:
    return _joined(net, {name: net.one(x, name) for name in net.names} | {"ash": net.one(x, "cedar")})


def in_a_dict(net: Any, x: Tensor) -> Tensor:
    return _joined(net, net.both(x))


def with_a_dict(net: Any, x: Tensor) -> Tensor:
    return net.both(x)["birch"] + _joined(net, {name: net.each[name](x, name) for name in net.names})


def _by_argument(kind: str) -> Callable[[Any, Tensor], Tensor]:
    def body(net: Any, x: Tensor) -> Tensor:
        return _joined(net, {name: net.one(x, VALUES[kind](name), kind) for name in net.names})

    body.__name__ = f"argument_{kind}"
    return body


#: For each kind of place, what the one module is given for a name.
PLACES: dict[str, Callable[[Any, Tensor, str], Tensor]] = {
    "attribute": lambda net, x, name: x * net.tables[name],
    "made": lambda net, x, name: x * torch.tensor([net.weights[name]]),
    "full": lambda net, x, name: x * torch.full((1,), net.weights[name]),
    "from_numpy": lambda net, x, name: x * torch.from_numpy(np.array([net.weights[name]], dtype=np.float32)),
    "leaf_float": lambda net, x, name: net.times(x, net.weights[name]),
    "leaf_int": lambda net, x, name: net.times(x, int(net.weights[name])),
    "list_index": lambda net, x, name: x[:, [NAMES.index(name), 0, 1, 2]],
    "tensor_index": lambda net, x, name: x[:, torch.tensor([NAMES.index(name), 0, 1, 2])],
    "select": lambda net, x, name: torch.stack([x, 2 * x, 3 * x])[NAMES.index(name)],
    "repeated": lambda net, x, name: torch.stack([2 * x if one == name else x for one in NAMES])[0],
    "position": lambda net, x, name: _with(x, 2 * x, NAMES.index(name)),
    "data": lambda net, x, name: _with_data(x, x * net.tables[name]),
    "in_place": lambda net, x, name: x.clone().index_fill_(1, torch.tensor([NAMES.index(name)]), 0.0),
}


def _with(x: Tensor, y: Tensor, at: int) -> Tensor:
    """The same two tensors, in another order for each index."""
    mixed = torch.cat([y if one == at else x for one in range(3)], 1)
    return mixed[:, :4] - 3 * mixed[:, 4:8] + 5 * mixed[:, 8:]


def _with_data(x: Tensor, data: Tensor) -> Tensor:
    y = x.clone()
    y.data = data
    return y


def _by_place(place: str) -> Callable[[Any, Tensor], Tensor]:
    def body(net: Any, x: Tensor) -> Tensor:
        return _joined(net, {name: net.one(PLACES[place](net, x, name)) for name in net.names})

    body.__name__ = f"place_{place}"
    return body


def by_listed_outputs(net: Any, x: Tensor) -> Tensor:
    return _joined(net, dict(zip(net.names, net.listed(x), strict=True)))


def by_listed_products(net: Any, x: Tensor) -> Tensor:
    return _joined(net, dict(zip(net.names, net.listed(x, is_leaf=True), strict=True)))


def by_stacked_outputs(net: Any, x: Tensor) -> Tensor:
    return _joined(net, dict(zip(net.names, net.stacked(x), strict=True)))


#: One for each kind of argument and each kind of place, and for outputs whose order is that of a set.
GENERATED = (
    *map(_by_argument, VALUES),
    *map(_by_place, PLACES),
    by_listed_outputs,
    by_listed_products,
    by_stacked_outputs,
)

BODIES = (by_name, by_keyword, by_module, by_tensor, by_factor, by_column, by_chain, first_alone, in_a_dict, with_a_dict)  # fmt: skip  # noqa: E501


def models(kind: str) -> dict[str, Callable[[], Built]]:
    def toy(body: Callable[[Any, Tensor], Tensor]) -> Callable[[], Built]:
        def make() -> Built:
            torch.manual_seed(0)
            return SetNet(body), [torch.rand(2, 4), torch.rand(2, 4), torch.rand(3, 4)]

        return make

    def real(name: str) -> Callable[[], Built]:
        def make() -> Built:
            with mixed():
                return build({str(entry): entry for entry in entries()}[f"transformers:{name}"])

        return make

    bodies = {"toys": BODIES, "generated": GENERATED}.get(kind)
    return {name: real(name) for name in ZOO} if bodies is None else {body.__name__: toy(body) for body in bodies}


if __name__ == "__main__":
    run_side(models(sys.argv[3]), sys.argv[1], sys.argv[2], 6 if sys.argv[3] == "zoo" else None)
