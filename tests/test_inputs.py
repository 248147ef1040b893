"""Arguments of models, from all forms of inputs."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import microtome
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


class Encoding(UserDict[str, Any]):
    """A mapping that is not a dict, as the `BatchEncoding` of transformers."""


@pytest.mark.parametrize(
    ("given", "described"),
    [
        ((1, 3, 8, 8), "1x3x8x8:float16"),
        ([1, 3, 8, 8], "1x3x8x8:float16"),
        (torch.Size([2, 4]), "2x4:float16"),
        ([(1, 3), (2, 4)], "1x3:float16, 2x4:float16"),
        (((1, 3), torch.Size([2, 4])), "1x3:float16, 2x4:float16"),
        ([(1, 3), "1x77:int64"], "1x3:float16, 1x77:int64"),
        ({"x": (1, 3), "ids": "1x77:int64"}, "x=1x3:float16, ids=1x77:int64"),
        ("1x3", "1x3:float16"),
        ("1x3:float32", "1x3:float32"),
        (Encoding(x=T), "x=2:float32"),
        (np.zeros((2, 3)), "2x3:float16"),
        ((np.zeros(3, np.int64), T), "3:int64, 2:float32"),
        ({"x": np.zeros(3, bool)}, "x=3:bool"),
        (np.broadcast_to(np.float32(1), (2, 2)), "2x2:float16"),  # read-only
        (np.ones(2, ">i4")[::-1], "2:int32"),
        ((T, (2, 3)), "2:float32, (2, 3)"),  # not all are shapes
        ({"size": (2, 3), "x": T}, "size=(2, 3), x=2:float32"),
        (("hello",), "'hello'"),
        ((True, 2), "True, 2"),
        (Inputs(2, 3), "2, 3"),
        (Inputs(np.zeros(1)), "array([0.])"),
    ],
    ids=str,
)
def test_shapes_arrays_and_mappings_become_arguments(given: Any, described: str) -> None:
    found = Inputs.of(given, nn.Linear(2, 2).half())
    assert repr(found) == f"Inputs({described})"


def test_tensors_from_shapes_are_on_the_device_of_the_model() -> None:
    model = nn.Linear(2, 2, device="meta")
    assert [Inputs.of(given, model).args[0].device.type for given in ("1x2", (1, 2), np.zeros((1, 2)))] == ["meta"] * 3


def test_inputs_of_a_bfloat16_model_need_no_dtype() -> None:
    assert Inputs.of("3x2", model := nn.Linear(2, 2).bfloat16()).run(model).dtype == torch.bfloat16


def test_an_array_is_copied() -> None:
    array = np.ones(3, np.float32)
    tensor = Inputs.of(array).args[0]
    tensor.zero_()
    assert array.sum() == 3


TAKEN = "were taken for shapes: the model ran on Inputs("
FOR_TOKENS = "'1x128:int64' is for token ids"


def _notes_of(model: nn.Module, given: Any) -> str:
    with pytest.raises((RuntimeError, KeyError, TypeError)) as caught:
        Inputs.of(given, model).run(model)
    return "".join(getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("given", [(1, 4), [(1, 4)], {"input": (1, 4)}])
def test_an_error_of_the_model_names_numbers_that_were_taken_for_shapes(given: Any) -> None:
    assert TAKEN in _notes_of(nn.Linear(3, 3), given)
    assert TAKEN not in _notes_of(nn.Linear(3, 3), "1x4")
    assert TAKEN not in _notes_of(nn.Linear(3, 3), {"input": "1x4"})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_error_about_integers_says_how_to_write_their_dtype(device: str) -> None:
    model = nn.Embedding(2, 2, device=device)
    with pytest.raises(RuntimeError, match="Long, Int") as caught:
        microtome.profile(model, "1x4")
    assert FOR_TOKENS in "".join(caught.value.__notes__)
    assert FOR_TOKENS not in _notes_of(nn.Linear(3, 3), "1x4")
    assert FOR_TOKENS not in _notes_of(nn.Linear(4, 3), "1x4:int64")


class Swallows(nn.Module):
    def forward(self, input_ids: Tensor | None = None, mask: Tensor | None = None, **others: Any) -> Tensor:
        if input_ids is None:
            raise KeyError("expected input_ids")
        return input_ids


@pytest.mark.parametrize(
    ("model", "name", "note"),
    [
        (nn.Linear(2, 2), "inpt", "forward of Linear has no parameter 'inpt': did you mean 'input'?"),
        (Swallows(), "input_id", "forward of Swallows has no parameter 'input_id': did you mean 'input_ids'?"),
        (Swallows(), "x", "forward of Swallows has no parameter 'x': it has input_ids, mask"),
    ],
)
def test_an_error_of_the_model_names_a_keyword_that_forward_does_not_have(
    model: nn.Module, name: str, note: str
) -> None:
    assert _notes_of(model, {name: torch.ones(1, 2)}) == note


def test_keywords_of_a_model_that_takes_a_dict_say_how_to_pass_one() -> None:
    class Two(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["a"] + batch["b"]

    with pytest.raises(TypeError) as caught:
        Inputs(a=torch.ones(1), b=torch.ones(1)).run(Two())
    note = "has no parameter 'a': it has batch. If it takes a dict as its one argument: pass mt.Inputs({…}); on the "
    assert note in caught.value.__notes__[0]


class Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)

    def forward(self, input_ids: Tensor | None = None, embeds: Tensor | None = None, **others: Any) -> Tensor:
        if embeds is not None:
            raise IndexError("too many rows")
        y: Tensor = self.embed(input_ids)
        return y


@pytest.mark.parametrize(
    "given",
    [
        Inputs(input_ids=torch.tensor([9]), return_dict=True),
        Inputs(torch.tensor([9]), mask=torch.ones(1)),
        Inputs(embeds=torch.ones(1, 2), return_dict=True),
    ],
    ids=repr,
)
def test_an_error_about_something_else_has_no_note_on_a_keyword_that_forward_swallows(given: Inputs) -> None:
    with pytest.raises(IndexError) as caught:
        given.run(Overflows())
    assert caught.value.__notes__ == [f"The model ran on {given!r}."]


@pytest.mark.parametrize("value", [False, None, 3, 0.5, "text", [1], {"a": 1}])
def test_an_error_of_the_model_is_raised_if_other_values_were_added_to_inputs_of_shapes(value: Any) -> None:
    shapes = Inputs.of("input_id=1x2:int64")
    with pytest.raises(KeyError, match="expected input_ids") as caught:
        shapes.with_arguments((), {**shapes.kwargs, "use_cache": value}).run(Swallows())
    assert "no parameter 'input_id': did you mean 'input_ids'?" in "".join(caught.value.__notes__)


def test_an_error_of_the_model_has_the_shapes_of_the_inputs_that_were_passed() -> None:
    with pytest.raises(RuntimeError) as caught:
        Inputs.of(torch.ones(3, 4)).run(nn.Linear(3, 3))
    assert caught.value.__notes__ == ["The model ran on Inputs(3x4:float32)."]


def test_a_batch_encoding_of_transformers_is_a_mapping() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.zeros(1, 3, dtype=torch.int64)})
    assert repr(Inputs.of(encoding)) == "Inputs(input_ids=1x3:int64)"


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
        ((1, -3), r"expected sizes of 0 or more in the shape of an input, got \(1, -3\)"),
        (["1x3", "a=1x3"], "expected one shape in each string of a list or dict of inputs, got 'a=1x3'"),
        (np.array(["text"]), "expected an array of numbers, got <U4"),
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


def test_a_model_without_required_arguments_runs_on_none() -> None:
    class Optional(nn.Module):
        def forward(self, x: Tensor | None = None) -> Tensor:
            return torch.ones(2) if x is None else x

    assert microtome.profile(Optional(), None).total.output_bytes == 2 * 4
