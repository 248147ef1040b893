"""Models that call modules in the order of a set, run by `test_hash_seeds.py` in two processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.split_zoo.models import build, entries, mixed
from benchmarks.split_zoo.seeds import Built, run_side

NAMES = ("ash", "birch", "cedar")
#: Of those that go over a set of kinds of layers, and one that runs a module several times.
ZOO = ("gemma3_text", "modernbert", "albert")


class Scaled(nn.Module):
    """Returns another output for each name that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, name: str = "ash") -> Tensor:
        y: Tensor = self.linear(x) * (1 + NAMES.index(name))
        return y


class SetNet(nn.Module):
    """Runs `body(self, x)`, which goes over `self.names` in some order."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.names = set(NAMES)
        self.one, self.last = Scaled(), nn.Linear(4, 4)
        self.each = nn.ModuleDict({name: Scaled() for name in NAMES})
        self.both = Pair()
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

    return {body.__name__: toy(body) for body in BODIES} if kind == "toys" else {name: real(name) for name in ZOO}


if __name__ == "__main__":
    run_side(models(sys.argv[3]), sys.argv[1], sys.argv[2], None if sys.argv[3] == "toys" else 6)
