"""A head and a tail in two processes, where sets of strings have different orders: exact or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from benchmarks.split_zoo.seeds import EXACT, in_two_processes
from microtome.errors import Unsupported
from tests.marks import slow
from tests.split.hash_seeds import BODIES, GENERATED, ZOO

#: Pairs under which `set(NAMES)` has different orders, in both ways round, and one under which it has the same.
SEEDS = [(0, 1), *slow((4, 5), (3, 3))]


@pytest.mark.parametrize("seeds", SEEDS)
def test_calls_in_another_order_are_matched_or_refused(seeds: tuple[int, int]) -> None:
    found = in_two_processes("tests.split.hash_seeds", seeds, "toys")
    assert list(found) == [body.__name__ for body in BODIES]
    for name, cuts in found.items():
        wrong = {at: what for at, what in cuts.items() if what != EXACT and not what.startswith("refused")}
        assert not wrong, name
        assert cuts["last"] == EXACT or name in ("in_a_dict", "with_a_dict"), (name, cuts["last"])
        if seeds[0] == seeds[1]:
            assert set(cuts.values()) == {EXACT}, name
        refused = [what for what in cuts.values() if what.startswith("refused")]
        assert [what for what in refused if "PYTHONHASHSEED" not in what] == [], name
    if seeds[0] != seeds[1]:
        assert any(what.startswith("refused") for what in found["by_name"].values())


#: Those of which a call returns tensors in the order of a set: refused after the loop, too.
REORDERED = {"by_listed_outputs", "by_listed_products", "by_stacked_outputs"}


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(0, 1), (4, 5), (3, 3)])
def test_calls_that_differ_in_any_kind_of_value_are_matched_or_refused(seeds: tuple[int, int]) -> None:
    found = in_two_processes("tests.split.hash_seeds", seeds, "generated")
    assert list(found) == [body.__name__ for body in GENERATED]
    for name, cuts in found.items():
        wrong = {at: what for at, what in cuts.items() if what != EXACT and not what.startswith("refused")}
        assert not wrong, name
        if seeds[0] == seeds[1]:
            assert set(cuts.values()) == {EXACT}, name
        elif name not in REORDERED:
            assert cuts["last"] == EXACT, (name, cuts["last"])
        refused = [what for what in cuts.values() if what.startswith("refused")]
        assert [what for what in refused if "PYTHONHASHSEED" not in what] == [], name


@pytest.mark.slow
def test_models_of_transformers_are_exact_with_other_hash_seeds() -> None:
    found = in_two_processes("tests.split.hash_seeds", (0, 1), "zoo")
    assert list(found) == list(ZOO)
    assert {what for cuts in found.values() for what in cuts.values()} == {EXACT}


class Columns(nn.Module):
    """Runs one module on each column, and reshapes by the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        columns = x.reshape(x.shape[0], 3, 4)
        y: Tensor = self.last(sum(self.one(columns[:, at]) * (at + 1) for at in range(3)))
        return y


@pytest.mark.parametrize("hash_seed", [None, "another"])
@pytest.mark.parametrize("batches", [(1, 2), (2, 1), (2, 3)])
def test_sides_may_be_split_on_examples_of_another_batch_size(batches: tuple[int, int], hash_seed: str | None) -> None:
    model, x = Columns().eval(), torch.rand(5, 12)
    with torch.no_grad():
        head, tail = (mt.split(model, torch.rand(batch, 12), at="one#2")[at] for at, batch in enumerate(batches))
        boundary = head(x)
        boundary.facts["hash_seed"] = hash_seed or boundary.facts["hash_seed"]
        assert tail(boundary).equal(model(x))


def test_a_call_whose_outputs_are_computed_otherwise_than_in_the_head_is_refused() -> None:
    x = torch.rand(2, 12)
    with torch.no_grad():
        head, tail = mt.split(Columns().eval(), x, at="one#2")
        boundary = head(x)
        boundary.facts["hash_seed"] = "another"
        for call in boundary.facts["calls"]:
            call["signature"]["output_flow"] = ["0" * 16]
        with pytest.raises(Unsupported, match=r"what 'one(#0)?' returns is computed in another way or order"):
            tail(boundary)


class Applied(nn.Module):
    """Applies a function that it is called with, and also returns a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, float]:
        return function(self.linear(x)), 1.5


class Lambdas(nn.Module):
    """Calls one module with two lambdas, which another process cannot tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = Applied(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        (a, p), (b, q) = self.one(x, lambda y: y * 2), self.one(x, lambda y: y * 3)
        y: Tensor = self.last(a * p - b * q)
        return y


def test_calls_that_nothing_tells_apart_are_taken_in_order_with_one_hash_seed_and_else_refused() -> None:
    model, x = Lambdas().eval(), torch.rand(2, 4)
    with torch.no_grad():
        head, tail = mt.split(model, x, at="last")
        boundary = head(x)
        assert tail(boundary).equal(model(x))
        boundary.facts["hash_seed"] = "another"
        refusal = r"'one#0' runs several times, and nothing says which of its calls in the head this is: "
        with pytest.raises(Unsupported, match=refusal):
            tail(boundary)


class Noisy(nn.Module):
    """Draws random numbers between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        y: Tensor = self.last(self.first(x + noise) - self.second(x) * noise)
        return y


def test_calls_in_another_order_around_random_numbers_are_refused() -> None:
    x = torch.rand(2, 4)
    with torch.no_grad():
        head, tail = mt.split(Noisy().eval(), x, at="last")
        boundary = head(x)
        boundary.facts["calls"][:2] = boundary.facts["calls"][1::-1]
        with pytest.raises(Unsupported, match=r"'first' runs in another order than in the head, and the model draws"):
            tail(boundary)
