"""Sizes and conditions in the symbols of some tensors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sympy")

import torch  # noqa: F401  the tests run without it imported otherwise
from sympy import Eq, Symbol
from torch.utils._sympy.functions import FloorDiv, Mod

from microtome.engine.size_substitution import SizeSubstitution

S, T = (Symbol(name, integer=True, positive=True) for name in ("s1", "s2"))
D, E = (Symbol(name, integer=True, positive=True) for name in ("d0", "d1"))


@pytest.mark.parametrize(
    ("sizes", "condition", "expressed", "expected"),
    [
        ([FloorDiv(S, 4)], FloorDiv(S, 4) > 6, [D], [D > 6]),
        ([FloorDiv(S - 1, 4) + 1], FloorDiv(S - 1, 8) > 6, [D], [FloorDiv(D - 1, 2) > 6]),
        # The smallest of the four sizes that give d0 is 4 * d0.
        ([FloorDiv(S, 4)], S >= 8, [D], [4 * D >= 8]),
        ([S + 1], Eq(Mod(S, 8), 0), [D], [Eq(Mod(D + 7, 8), 0)]),
        ([S, FloorDiv(S, 8)], FloorDiv(S, 8) > 6, [S, FloorDiv(S, 8)], [FloorDiv(S, 8) > 6]),
        ([FloorDiv(S, 8) * FloorDiv(T, 8) + 1], FloorDiv(S, 8) * FloorDiv(T, 8) > 6, [D], [D - 1 > 6]),
        ([FloorDiv(S, 8) * FloorDiv(T, 8) + 1], Eq(FloorDiv(S, 8) * FloorDiv(T, 8) + 1, 17), [17], []),
        # Patches are merged, and odd sizes padded: a = s//4, (a + a % 2)//2.
        (
            [FloorDiv(FloorDiv(S, 4) + Mod(FloorDiv(S, 4), 2), 2)],
            FloorDiv(FloorDiv(S, 4) + Mod(FloorDiv(S, 4), 2), 2) > 7,
            [D],
            [D > 7],
        ),
    ],
)
def test_conditions_on_what_crosses(sizes: Any, condition: Any, expressed: Any, expected: Any) -> None:
    found = SizeSubstitution([sizes], [condition])
    assert found.shapes == [expressed]
    assert found.conditions == expected
    assert not found.hidden


def test_symbols_that_sizes_do_not_determine_are_hidden() -> None:
    assert SizeSubstitution([[FloorDiv(S, 4)]], [Eq(Mod(S, 4), 0)]).hidden == {S}
    # 25 gives 6, too.
    assert SizeSubstitution([[FloorDiv(S, 4)]], [Eq(Mod(S, 8), 0)], {S: 24}).hidden == {S}
    assert SizeSubstitution([[FloorDiv(S, 8) * FloorDiv(T, 8)]], [FloorDiv(S, 8) > 6]).hidden == {S}
    assert SizeSubstitution([[T]], [S > 4]).hidden == {S}


def test_sizes_that_only_a_symbol_of_one_gives_are_excluded() -> None:
    # s1 >= 2 makes s1 * s2 at least 4: whether it is 3 was never decided.
    assert SizeSubstitution([[S * T]]).conditions == [D >= 4]


def test_sizes_that_no_run_has_decide_nothing() -> None:
    # For 1, a size would be divided by zero; for -1, it has no remainder in torch.
    assert SizeSubstitution([[FloorDiv(S, FloorDiv(S, 8))]]).conditions == []
    size = FloorDiv(FloorDiv(S + 7, 5), 2)
    assert SizeSubstitution([[size]], [Eq(Mod(FloorDiv(S - 3, 4) - 1, 2), 0)], {S: 7}).hidden == {S}


strides = st.tuples(st.integers(1, 8), st.integers(-3, 3), st.integers(1, 2), st.integers(0, 2))
sizes_of_s = st.lists(strides, min_size=1, max_size=3)
made = strides.flatmap(lambda one: st.tuples(st.just(one), st.integers(0, 12), st.sampled_from([">", "<", "==", "%"])))


def size_of(stride: tuple[int, int, int, int], symbol: Any) -> Any:
    """A size behind one or two layers with strides."""
    by, shift, factor, offset = stride
    return factor * FloorDiv(FloorDiv(symbol + 8 + shift, by) + offset, 2)


def condition_of(made: Any) -> Any:
    stride, number, kind = made
    size = size_of(stride, S)
    match kind:
        case ">":
            return size > number
        case "<":
            return size < number
        case "==":
            return Eq(size, number)
    return Eq(Mod(size, number % 4 + 1), 0)


@settings(deadline=None, max_examples=40)
@given(sizes_of_s, made)
def test_where_new_conditions_are_met_those_of_the_run_are(layers: list[Any], made: Any) -> None:
    sizes, condition = [size_of(one, S) for one in layers], condition_of(made)
    if condition in (True, False):
        return
    example = {S: next((number for number in range(2, 40) if condition.subs(S, number)), 2)}
    found = SizeSubstitution([sizes], [condition], example)
    for number in range(2, 40):
        actual = [int(size.subs(S, number)) for size in sizes]
        values = {new: size for new, size in zip(found.shapes[0], actual, strict=True) if getattr(new, "is_Symbol", 0)}
        met = all(bool(one.subs(values)) for one in found.conditions)
        known = [int(size.subs(values)) if hasattr(size, "subs") else size for size in found.shapes[0]]
        if not found.hidden and met and known == actual and 0 not in actual:
            assert bool(condition.subs(S, number))
        fixes = any(isinstance(new, int) for new in found.shapes[0])
        assert known == actual or fixes
