"""The tensors inside structures."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from microtome.engine.pytree import map_tensors, named_tensors, tensors_in
from microtome.errors import Unsupported

ONE, TWO = torch.ones(1), torch.full((1,), 2.0)


@dataclass
class Pair:
    first: Any
    second: Any = None


class Both(NamedTuple):
    left: Any
    right: Any


def loops() -> list[Any]:
    listed: list[Any] = [ONE]
    listed.append(listed)
    mapped: dict[str, Any] = {"x": ONE}
    mapped["self"] = [mapped]
    pair = Pair(ONE)
    pair.second = (pair,)
    return [listed, mapped, pair]


@pytest.mark.parametrize("at", range(3))
def test_a_structure_that_holds_itself_has_its_tensors_and_cannot_be_copied(at: int) -> None:
    value = loops()[at]
    assert [tensor is ONE for tensor in tensors_in(value)] == [True]
    kind = type(value).__name__
    with pytest.raises(Unsupported, match=f"a {kind} contains itself, so it cannot be copied or named"):
        map_tensors(lambda tensor: tensor, value)
    with pytest.raises(Unsupported, match=f"a {kind} contains itself"):
        list(named_tensors(value))


def test_a_shared_item_is_no_cycle() -> None:
    part = [ONE]
    assert map_tensors(float, (part, part, {"x": part})) == ([1.0], [1.0], {"x": [1.0]})
    assert [place for place, _ in named_tensors((part, part))] == ["[0][0]", "[1][0]"]


def test_places_depend_on_the_structure_alone() -> None:
    assert [place for place, _ in named_tensors(ONE)] == [""]
    assert [place for place, _ in named_tensors((ONE, None))] == ["[0]"]
    assert [place for place, _ in named_tensors((ONE, TWO))] == ["[0]", "[1]"]
    value = OrderedDict(a=Pair(ONE, {2: TWO}), b=Both(ONE, "text"), c=Pair)
    assert [place for place, _ in named_tensors(value)] == ["[a][first]", "[a][second][2]", "[b][0]"]
    assert list(named_tensors({ONE})) == []


def test_structures_keep_their_kinds() -> None:
    value = OrderedDict(a=Pair(ONE), b=Both(TWO, 3), c=[True, "x", None, {1, 2}])
    assert map_tensors(float, value) == OrderedDict(a=Pair(1.0), b=Both(2.0, 3), c=[True, "x", None, {1, 2}])
    assert map_tensors(float, [ONE, "x"], other=str.upper) == [1.0, "X"]


class Record:
    def __init__(self, held: object) -> None:
        self.held = held


class Rows(list[object]):
    def __init__(self, *, like: object) -> None:
        super().__init__([like])
        self.like = like


class Marked(tuple[object, ...]):
    __slots__ = ()

    def __new__(cls, *, only: object) -> Marked:
        return super().__new__(cls, (only,))


def test_classes_with_constructors_of_their_own_keep_their_kinds() -> None:
    record, rows, marked = map_tensors(float, (Record(ONE), Rows(like=ONE), Marked(only=TWO)))
    assert (type(record), record.held) == (Record, 1.0)
    assert (type(rows), [*rows]) == (Rows, [1.0])
    assert (type(marked), [*marked]) == (Marked, [2.0])


def test_tensors_of_a_dataclass_are_mapped_in_the_order_in_which_they_are_found() -> None:
    @dataclass
    class Scores:
        total: Any
        at: Any

    value = Scores(torch.ones(1), {"z": torch.ones(2), "a": torch.ones(3)})
    seen: list[Any] = []
    map_tensors(seen.append, value)
    assert [id(one) for one in seen] == [id(one) for one in tensors_in(value)]


def test_struct_sequences_of_torch_keep_their_kinds() -> None:
    found = map_tensors(lambda tensor: tensor + 1, torch.max(torch.tensor([[1.0, 3.0]]), 1))
    assert type(found) is torch.return_types.max
    assert (found.values.item(), found.indices.item()) == (4, 2)
