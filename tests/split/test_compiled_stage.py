"""Compiled stages over many runs: modes, shapes, threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import microtome as mt
from microtome import zoo
from microtome.errors import MicrotomeError
from microtome.split.graph import compiled_stage


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Counter:
    """A compiler whose code counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: fx.GraphModule, _: Any) -> Any:
        def run(*tensors: Tensor) -> Any:
            self.runs += 1
            return graph(*tensors)

        return run


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)).eval()


def test_a_compiled_stage_refuses_another_mode_of_training() -> None:
    model, x = make_net(), torch.randn(2, 4)
    head, tail = mt.split(model, x, at="0")
    compiled, boundary = tail.compile(backend="eager"), head(x)
    model.train()
    with pytest.raises(MicrotomeError) as eager:
        tail(boundary)
    with pytest.raises(MicrotomeError, match="train") as error:
        compiled(boundary)
    assert str(error.value) == str(eager.value)
    with pytest.raises(MicrotomeError, match="train"):
        tail.graph()


def test_facts_of_the_oldest_shape_make_room_for_those_of_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_stage, "_MAX_SHAPES", 3)
    backend = Counter()
    head, _ = mt.split(make_net(), torch.randn(2, 4), at="0")
    compiled = head.compile(backend=backend)  # type: ignore[arg-type]
    for rows in (3, 4, 5, 6):
        compiled(torch.randn(rows, 4))
    backend.runs = 0
    for _ in range(3):
        compiled(torch.randn(6, 4))
    assert backend.runs == 3


def test_other_tensors_than_those_of_the_graph_are_an_error() -> None:
    head, _ = mt.split(make_net(), torch.randn(2, 4), at="0")
    compiled = head.compile(backend="eager")
    assert isinstance(compiled, compiled_stage.CompiledStage)
    compiled.graph_info = compiled.graph_info._replace(outputs=("other",))
    with pytest.raises(MicrotomeError, match="expected the tensors other to cross at '0', as on the example, got 0"):
        compiled(torch.randn(3, 4))


def test_threads_run_a_compiled_stage() -> None:
    model, x = zoo.build("tiny-resnet")
    head, tail = mt.split(model, x, at="layer1")
    first, last = head.compile(backend="eager"), tail.compile(backend="eager")

    def run(number: int) -> None:
        with torch.no_grad():
            for step in range(6):
                image = torch.randn(1 + (number + step) % 5, 3, 32, 32)
                assert last(first(image)).equal(model(image))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x.mul_(2)))
        return output


def test_a_model_that_writes_to_its_input_leaves_the_example_as_it_is() -> None:
    model, x = WritesInput().eval(), torch.ones(2, 4)
    head, tail = mt.split(model, x, at="first")
    before = x.clone()
    assert head.graph().meta["verified"] == tail.graph().meta["verified"] == "bit-equal"
    assert head.compile(backend="eager").verified == tail.compile(backend="eager").verified == "bit-equal"
    assert head.time(repeat=3) > 0
    assert x.equal(before)
    assert head.graph()(x)["first"].equal(head(before.clone()).tensors["first"])
