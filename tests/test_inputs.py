"""Arguments of models, from all forms of inputs."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from microtome import Inputs
from microtome.errors import BadInputs

T = torch.ones(2)
Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        (T, (T,), {}),
        ((T, None, 3), (T, None, 3), {}),
        ((), (), {}),
        ({"x": T, "deep": {"y": [None]}}, (), {"x": T, "deep": {"y": [None]}}),
        (Inputs(1, b=2), (1,), {"b": 2}),
        ([T, T], ([T, T],), {}),
        (Pair(T, T), (Pair(T, T),), {}),
        (None, (None,), {}),
    ],
)
def test_inputs_become_arguments(given: Any, args: Any, kwargs: Any) -> None:
    found = Inputs.of(given)
    assert (str(found.args), str(found.kwargs)) == (str(args), str(kwargs))


def test_a_text_of_shapes_becomes_tensors() -> None:
    found = Inputs.of("1x3x8x8:bfloat16, 5, ids=2x7:int64,mask=2x7:bool , z=3:complex64")
    first, second = found.args
    assert (first.shape, first.dtype, second.shape, second.dtype) == ((1, 3, 8, 8), torch.bfloat16, (5,), torch.float32)
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.kwargs.items()} == {
        "ids": ((2, 7), torch.int64),
        "mask": ((2, 7), torch.bool),
        "z": ((3,), torch.complex64),
    }
    assert repr(found).startswith("Inputs(1x3x8x8:bfloat16, 5:float32, ids=2x7:int64")


def test_a_text_gives_the_same_tensors_each_time_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    assert torch.equal(Inputs.of("4x4").args[0], Inputs.of("4x4").args[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_integers_are_indices_that_every_embedding_has() -> None:
    assert Inputs.of("2x3:int64").run(nn.Embedding(1, 4)).shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("1x3x", "cannot read '1x3x' in the inputs '1x3x': write a shape"),
        ("", "cannot read ''"),
        ("1x3, ", "cannot read '' in the inputs '1x3, '"),
        ("1x-3", "cannot read '1x-3'"),
        ("2:int65", "expected a dtype of torch, .*, got 'int65'"),
        ("2:nn", "expected a dtype of torch, .*, got 'nn'"),
        ("a=1, a=2", "the input 'a' appears twice"),
        ("a=1, 2", "expected positional inputs before named ones, got '2'"),
        ({1: T}, "names of arguments as keys"),
    ],
)
def test_invalid_inputs_raise(given: Any, message: str) -> None:
    with pytest.raises(BadInputs, match=message):
        Inputs.of(given)


def test_a_string_of_shapes_beyond_the_memory_raises() -> None:
    with pytest.raises(BadInputs, match="not enough memory for an input of 1000000x1000000x1000: pass torch.empty"):
        Inputs.of("1000000x1000000x1000")


def test_inputs_move_to_a_device_and_represent_nested_values() -> None:
    inputs = Inputs([torch.ones(2), None], mask={"a": torch.ones(3, dtype=torch.bool)}).to("meta")
    assert repr(inputs) == "Inputs([2:float32, None], mask={'a': 3:bool})"
    assert inputs.args[0][0].is_meta
    assert inputs.kwargs["mask"]["a"].is_meta


class Crops(NamedTuple):
    first: Tensor
    second: Any


@dataclass(frozen=True)
class Example:
    image: Tensor
    crops: Crops
    label: str = "cat"


def test_tensors_in_named_tuples_dataclasses_and_dicts_move_to_a_device() -> None:
    example = Example(torch.ones(1), Crops(torch.ones(2), OrderedDict(third=torch.ones(3))))
    (moved,) = Inputs(example).to("meta").args
    assert type(moved) is Example
    assert type(moved.crops) is Crops
    assert type(moved.crops.second) is OrderedDict
    assert all(tensor.is_meta for tensor in (moved.image, moved.crops.first, moved.crops.second["third"]))
    assert moved.label == "cat"
    assert not example.image.is_meta
