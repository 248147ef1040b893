"""Snapshots of state objects that are read by a layout found before equal those of a new walk."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from microtome.split.state.contents import changed_paths, group_paths, parts_at
from microtome.split.state.snapshot import StateSnapshot, changed_parts, digest_of, digest_of_snapshots


class Layer:
    def __init__(self) -> None:
        self.keys = torch.zeros(1, 2)
        self.is_initialized = False
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.sizes = (1, 2)


class Cache:
    def __init__(self, layers: int = 3) -> None:
        self.layers = [Layer() for _ in range(layers)]
        self.by_name: dict[Any, Any] = {"a": torch.zeros(1, dtype=torch.int64), 1: [1, 2.5]}
        self.layer_class = Layer
        self.length = 0


def _reorder(cache: Cache) -> None:
    cache.by_name["a"] = cache.by_name.pop("a", None)


MUTATIONS: list[Callable[[Cache], object]] = [
    lambda cache: setattr(cache.layers[0], "keys", torch.zeros(1, 3)),
    lambda cache: None if cache.layers[-1].keys is None else cache.layers[-1].keys.add_(1),
    lambda cache: setattr(cache.layers[0], "is_initialized", not cache.layers[0].is_initialized),
    lambda cache: setattr(cache, "length", cache.length + 1000),
    lambda cache: setattr(cache, "length", type(cache.length)(str(cache.length))),  # an equal number
    lambda cache: cache.layers.append(Layer()),
    lambda cache: cache.layers.pop() if len(cache.layers) > 1 else None,
    lambda cache: cache.layers.__setitem__(0, Layer()),
    lambda cache: setattr(cache, "layers", list(cache.layers)),
    lambda cache: cache.by_name.__setitem__("b", 1),
    lambda cache: cache.by_name.pop("b", None),
    _reorder,
    lambda cache: cache.by_name.update({True: cache.by_name.pop(1, None)}),  # True is the same key as 1
    lambda cache: setattr(cache.layers[0], "__dict__", dict(vars(cache.layers[0]))),
    lambda cache: setattr(cache.layers[0], "keys", None),
    lambda cache: setattr(cache.layers[0], "sizes", (3,)),
    lambda cache: setattr(cache.layers[0], "dtype", torch.float16),
    lambda cache: setattr(cache, "layer_class", Cache),
    lambda cache: cache.by_name.__setitem__(1, None),
    lambda cache: setattr(cache, "more", Layer()),
    lambda cache: setattr(cache, "length", -0.0 if str(cache.length) == "0.0" else 0.0),
]


def parts_of(snapshot: StateSnapshot) -> list[tuple[Any, int, Any]]:
    return [(path, id(part.value), part.version) for path, part in snapshot.items()]


@given(st.lists(st.lists(st.sampled_from(MUTATIONS), max_size=3), min_size=1, max_size=6))
def test_reading_again_equals_a_new_walk(steps: list[list[Callable[[Cache], object]]]) -> None:
    cache = Cache()
    last = StateSnapshot.of(cache)
    for mutations in steps:
        for mutate in mutations:
            mutate(cache)
        snapshot, fresh = StateSnapshot.of(cache, last), StateSnapshot.of(cache)
        assert parts_of(snapshot) == parts_of(fresh)
        assert digest_of_snapshots([snapshot]) == digest_of([cache])
        naive = {path for path, part in fresh.items() if path not in last or not last[path].is_same(part)}
        assert set(changed_parts(last, snapshot)) == naive
        assert set(changed_paths(last, snapshot)) == naive | {path for path in last if path not in fresh}
        last = snapshot


def test_the_layout_is_found_once() -> None:
    cache = Cache()
    first = StateSnapshot.of(cache)
    cache.layers[1].keys = torch.ones(1, 7)
    second = StateSnapshot.of(cache, first)
    assert second.layout is first.layout
    cache.layers.append(Layer())
    assert StateSnapshot.of(cache, second).layout is not first.layout


@pytest.mark.parametrize("position", range(len(MUTATIONS)))
def test_a_digest_tells_states_apart_but_for_values_and_equal_numbers(position: int) -> None:
    cache = Cache()
    before, names = digest_of([cache]), repr(vars(cache)) + repr([vars(layer) for layer in cache.layers])
    MUTATIONS[position](cache)
    changed = names != repr(vars(cache)) + repr([vars(layer) for layer in cache.layers])
    unknown = {1, 7, 8, 13}  # values of tensors, and which objects hold them
    assert (digest_of([cache]) == before) is (position in unknown or not changed)


def test_a_tensor_in_another_place_has_another_digest() -> None:
    one, other = Cache(), Cache()
    one.layers[0].keys = None  # type: ignore[assignment]
    other.layers[1].keys = None  # type: ignore[assignment]
    assert digest_of([one]) != digest_of([other])


@pytest.mark.parametrize("others", [([], None), (torch.device("cpu"), 5), ([1], [2]), ({1: 0}, {"1": 0}), (int, "int")])
def test_parts_that_change_places_have_another_digest(others: tuple[Any, Any]) -> None:
    states = [Cache(1), Cache(1)]
    for state, (first, second) in zip(states, (others, others[::-1]), strict=True):
        vars(state).update(first=first, second=second)
    assert digest_of(states[:1]) != digest_of(states[1:])


def test_inference_tensors_may_always_have_been_written_to() -> None:
    cache = Cache(1)
    with torch.inference_mode():
        cache.layers[0].keys = torch.zeros(1, 2)
    first = StateSnapshot.of(cache)
    assert list(changed_parts(first, StateSnapshot.of(cache, first))) == [("layers", 0, "keys")]


def test_parts_at_paths_are_read_by_their_holders() -> None:
    cache = Cache()
    paths = [("layers", 1, "keys"), ("layers", 1, "dtype"), ("by_name", (1,), 0), ("length",), ("layers", 9, "keys")]
    groups = group_paths(paths)
    assert [len(steps) for _, steps in groups] == [2, 1, 1, 1]
    before = parts_at(cache, groups)
    assert before.values[0] is cache.layers[1].keys
    assert before.values[1:4] == [torch.float32, 1, 0]
    cache.layers[1].keys = torch.zeros(1, 3)
    del cache.length
    changes = parts_at(cache, groups).describe_changes(paths, before)
    assert list(changes) == [("layers", 1, "keys"), ("length",)]
    assert [(change.path, change.item.kind) for change in changes.values()] == [
        (["layers", 1, "keys"], "placeholder"),
        (["length"], "removed"),
    ]


def test_random_mutations_of_many_layers_are_all_found() -> None:
    dice = random.Random(0)
    cache = Cache(16)
    last = StateSnapshot.of(cache)
    for _ in range(50):
        chosen = dice.sample(range(16), 5)
        for index in chosen:
            cache.layers[index].keys = torch.zeros(1, dice.randrange(1, 9))
        snapshot = StateSnapshot.of(cache, last)
        assert sorted(changed_parts(last, snapshot)) == sorted(("layers", index, "keys") for index in chosen)
        last = snapshot
