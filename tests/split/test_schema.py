"""The facts of a boundary are converted to JSON and back without loss, and refused whatever is changed in them."""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microtome.errors import MicrotomeError
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import BoundaryRecord
from tests.split.test_size_bounds import MODELS, halves

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    7,
    2**40,
    2**62,
    1e30,
    float("nan"),
    "",
    "x",
    "sent",
    [],
    {},
    [[]],
    [-1],
    {"kind": "repeat"},
]


@cache
def example(name: str) -> tuple[Any, Boundary]:
    with torch.no_grad():
        _, x, head, tail = halves(name)
        return tail, head(x)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from paths(item, (*path, key))


@pytest.mark.parametrize("name", MODELS)
def test_facts_are_restored_from_json(name: str) -> None:
    facts = example(name)[1].facts
    record = BoundaryRecord.from_facts(json.loads(json.dumps(facts)))
    assert record.to_facts() == facts
    assert BoundaryRecord.from_facts({**facts, "layer": 3}) == record  # others may add facts


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_changed_facts_are_an_error_or_run(data: st.DataObject) -> None:
    tail, boundary = example(data.draw(st.sampled_from(sorted(MODELS))))
    facts = copy.deepcopy(boundary.facts)
    path = data.draw(st.sampled_from(list(paths(facts))))
    holder = facts
    for key in path[:-1]:
        holder = holder[key]
    if data.draw(st.booleans()):
        holder[path[-1]] = data.draw(st.sampled_from(ODD))
    else:
        del holder[path[-1]]
    bytes_ = Boundary(boundary.at, boundary.fingerprint, dict(boundary.tensors), facts).to_bytes()
    try:
        with torch.no_grad():
            tail(Boundary.from_bytes(bytes_, limit="8MB"))
    except MicrotomeError:
        pass
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if "microtome/split" in traceback.extract_tb(error.__traceback__)[-1].filename:  # not the model's own code
            raise


@pytest.mark.parametrize("name", MODELS)
def test_boundaries_of_one_header_share_no_facts(name: str) -> None:
    tail, boundary = example(name)
    own = boundary.facts
    cases: list[dict[str, Any]] = [own, own | {"further": [1, {"a": [2]}]}, {"plain": [{"a": []}], "b": {}}]
    for facts in cases:
        data = Boundary(boundary.at, boundary.fingerprint, boundary.tensors, facts).to_bytes()
        changed, other = Boundary.from_bytes(data), Boundary.from_bytes(data)
        assert changed.facts == facts
        containers = [value for value in changed.facts.values() if isinstance(value, dict | list)]
        for container in (*containers, changed.facts):
            container.clear()
        assert other.facts == Boundary.from_bytes(data).facts == facts
        with pytest.raises(MicrotomeError, match="facts"):
            tail(changed)
        if "schema" in facts:
            tail(Boundary.from_bytes(data))
