from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.engine import Session


class Nested(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output + 1


def nest(depth: int) -> nn.Module:
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(depth):
        model = Nested(model)
    return model.eval()


X = torch.ones(1, 4)


@pytest.fixture(autouse=True)
def default_limit() -> Iterator[None]:
    """Python's default limit, whatever an earlier test has set: compiling with inductor raises it for good."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


VERBS: dict[str, Callable[[nn.Module], object]] = {
    "trace": lambda model: mt.trace(model, X),
    "trace of a real run": lambda model: mt.trace(model, X, fake=False),
    "profile": lambda model: mt.profile(model, X),
    "cuts": lambda model: mt.cuts(model, X),
    "split": lambda model: mt.split(model, X, at="inner.inner"),
    "extract": lambda model: mt.extract(model, X, "inner"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_runs_as_deep_as_without_a_session(verb: str) -> None:
    model = nest(220)
    model(X)
    before = sys.getrecursionlimit()
    VERBS[verb](model)
    assert sys.getrecursionlimit() == before


def test_a_model_that_is_too_deep_raises_an_error_that_says_so() -> None:
    model, before = nest(700), sys.getrecursionlimit()
    with pytest.raises(RecursionError) as raised, Session(model):
        model(X)
    assert sys.getrecursionlimit() == before
    assert "modules are nested" in "".join(raised.value.__notes__)
    assert "sys.setrecursionlimit" in "".join(raised.value.__notes__)


def test_the_limit_is_restored_after_the_last_session_unless_it_was_set_meanwhile() -> None:
    model, before = nest(1), sys.getrecursionlimit()
    with Session(model):
        inside = sys.getrecursionlimit()
        with Session(model):
            assert sys.getrecursionlimit() == inside
        assert sys.getrecursionlimit() == inside > before
    assert sys.getrecursionlimit() == before
    try:
        with Session(model):
            sys.setrecursionlimit(inside + 1)
        assert sys.getrecursionlimit() == inside + 1
    finally:
        sys.setrecursionlimit(before)
