"""Which arguments are one tensor may differ between the example and a run; a copy of inputs keeps it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.engine.pytree import clone_tensors, tensor_occurrences
from microtome.errors import BadBoundary, Unsupported
from tests.split.test_stages import same


class Both(nn.Module):
    """Two arguments that meet before, at and after the cuts, and a call that returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.both, self.pair, self.last = nn.Bilinear(4, 4, 3), Pair(), nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b = self.pair(self.first(x), y)
        c, d = self.pair(x, self.second(y))
        e, f = self.pair(x, y)
        return self.last(self.both(a, b) + self.both(c, d) + self.both(e, f)), x - y, f


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y


class Attention(nn.Module):
    """Takes another path, which rounds otherwise, where query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 8)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        q = self.norm(q) + q
        return self.last(self.attention(q, k, k, need_weights=False)[0]) + q + k


def transformer() -> nn.Module:
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "both": (Both, (2, 4)),
    "attention": (Attention, (1, 3, 8)),
    "transformer": (transformer, (1, 3, 8)),
}


def runs(shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    x, y = torch.randn(shape), torch.randn(shape)
    return [(x, x), (x, y), (y, y), (y, x)]


@pytest.mark.parametrize(("name", "example"), [*product(MODELS, (0, 1))])
def test_any_run_is_exact_whichever_arguments_are_one_tensor(name: str, example: int) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, given = build().eval(), runs(shape)
    with torch.no_grad():
        cuts = mt.cuts(model, given[example])
        assert len(cuts) >= 3
        for cut in cuts:
            head, tail = mt.split(model, given[example], at=cut)
            for pair in given:
                boundary = head(*pair)
                assert same(tail(boundary), model(*pair)), cut.at
                assert same(tail(mt.Boundary.from_bytes(boundary.to_bytes())), model(*pair)), cut.at


def test_one_tensor_at_two_places_crosses_once() -> None:
    model, x = Both().eval(), torch.randn(2, 4)
    head, _ = mt.split(model, (x, x), at="first")
    assert list(head(x, x).tensors) == ["x", "first"]
    assert head(x, x).nbytes == mt.cuts(model, (x, x))["first"].nbytes == 64
    assert head(x, torch.randn(2, 4)).nbytes == 96


def test_saved_stages_know_that_arguments_are_one_tensor(tmp_path: Path) -> None:
    model, x = Both().eval(), torch.randn(2, 4)
    stages = mt.split(model, (x, x), at="both#0")
    stages.save(tmp_path)
    head, tail = (mt.load_stage(Both, tmp_path, index) for index in (0, 1))
    for pair in runs((2, 4)):
        assert same(tail(stages[0](*pair)), model(*pair))
        assert same(stages[1](head(*pair)), model(*pair))


class Writes(nn.Module):
    """The answer depends on whether the arguments are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.add, self.last = nn.Linear(4, 4), Add(), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.first(y)
        self.add(x)
        return self.last(z) * x + y


class Add(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def test_an_alias_that_changes_the_answer_is_exact_or_refused() -> None:
    model = Writes().eval()
    with torch.no_grad():
        for first, second in product((0, 1), (0, 1)):
            for cut in mt.cuts(model, runs((2, 4))[first]):
                head, tail = mt.split(model, runs((2, 4))[first], at=cut)
                given = runs((2, 4))[second]
                whole = model(*clone_tensors(given))
                try:
                    output = tail(mt.Boundary.from_bytes(head(*clone_tensors(given)).to_bytes()))
                except Unsupported:
                    assert first != second
                else:
                    assert same(output, whole), (first, second, cut.at)


class Late(nn.Module):
    """Writes into one argument in the head, and reads both in the tail."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return self.last(self.first(y)) + x * y


def test_one_tensor_that_is_written_under_one_name_is_refused() -> None:
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    head, _ = mt.split(Late().eval(), (x, y), at="first")
    with torch.no_grad(), pytest.raises(Unsupported, match=r"expected 'x' and 'y' to be diff"):
        head(x, x)


class Overlap(nn.Module):
    """Changes its arguments in place, before, between or after the calls of `a` and `b`."""

    def __init__(self, before: str, between: str, after: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.writes = before, between, after

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before, between, after = self.writes
        self.write(before, x, y)
        z = self.a(x)
        self.write(between, x, y)
        z = self.b(z + x + y)
        self.write(after, x, y)
        return z + x + y

    def write(self, what: str, x: Tensor, y: Tensor) -> None:
        for name in what:
            {"x": x, "y": y}[name].mul_(2)


def overlaps(kind: str) -> tuple[Tensor, Tensor]:
    base = torch.rand(6, 4)
    pairs = {"same": (base[:3],) * 2, "apart": (base[:3].clone(), base[3:].clone())}
    return {**pairs, "disjoint": (base[:3], base[3:]), "overlapping": (base[:3], base[1:4])}[kind]


@pytest.mark.parametrize("example", ["same", "apart", "overlapping"])
@pytest.mark.parametrize("writes", [("x", "", ""), ("", "x", ""), ("", "", "y"), ("x", "y", ""), ("", "y", "x")])
def test_inputs_that_overlap_in_a_run_are_exact_or_refused(writes: tuple[str, str, str], example: str) -> None:
    model = Overlap(*writes).eval()
    with torch.no_grad():
        for cut in mt.cuts(model, overlaps(example)):
            try:
                head, tail = mt.split(model, overlaps(example), at=cut)
            except Unsupported:
                assert example == "overlapping"
                continue
            for kind in ("same", "apart", "disjoint", "overlapping"):
                given = overlaps(kind)
                whole = model(*clone_tensors(given))
                try:
                    output = tail(mt.Boundary.from_bytes(head(*clone_tensors(given)).to_bytes()))
                except Unsupported:
                    assert kind not in ("apart", example), cut.at
                else:
                    assert same(output, whole), (kind, cut.at)


def test_inputs_that_overlap_only_in_a_run_are_refused_with_the_reason() -> None:
    head, tail = mt.split(Overlap("", "x", "").eval(), overlaps("apart"), at="a")
    with torch.no_grad():
        boundary = head(*overlaps("overlapping"))
        with pytest.raises(Unsupported, match=r"expected 'x' to have memory of its own, got a tensor that over"):
            tail(boundary)


@pytest.mark.parametrize("repeats", [1, -1, 5, "0", 0.5, True])
def test_a_boundary_that_repeats_what_is_not_there_is_refused(repeats: Any) -> None:
    model, (x, y) = Both().eval(), (torch.randn(2, 4), torch.randn(2, 4))
    head, tail = mt.split(model, (x, y), at="first")
    boundary = head(x, y)
    boundary.facts["inputs"]["tensors"][1] = {"kind": "repeat", "position": repeats}
    with pytest.raises(BadBoundary, match=r"invalid boundary facts: facts.inputs.tensors\[1\]"):
        tail(boundary)


def test_a_boundary_that_names_an_argument_that_is_not_there_is_refused() -> None:
    model, (x, y) = Both().eval(), (torch.randn(2, 4), torch.randn(2, 4))
    head, tail = mt.split(model, (x, x), at="pair#2")
    boundary = head(x, y)
    assert boundary.facts["calls"][-1]["outputs"] == [{"kind": "argument", "position": position} for position in (0, 1)]
    boundary.facts["calls"][-1]["outputs"][1]["position"] = 7
    with pytest.raises(BadBoundary, match=r"expected one of 2 arguments of 'pair#2', got position 7"):
        tail(boundary)


def test_copies_share_what_the_originals_share() -> None:
    x = torch.randn(4, 6)
    copied = clone_tensors({"a": x, "b": [x, x[1:], x.t()], "c": torch.ones(2)})
    a, b, c, d, e = tensor_occurrences(copied)
    assert a is b
    assert a is not x
    a.add_(1)
    assert torch.equal(c, a[1:])
    assert torch.equal(d, a.t())
    assert torch.equal(e, torch.ones(2))
    assert not torch.equal(a, x)
