"""Values from files are compared with annotations, also inside of tuples."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from microtome.files.types import find_mismatch


class Pair(NamedTuple):
    name: str
    span: tuple[int, int]


@pytest.mark.parametrize(
    ("value", "hint", "words"),
    [
        ((1, "a"), tuple[int, str], None),
        ((1, 2), tuple[int, str], "[1]: expected a string, got 2"),
        ((1,), tuple[int, str], ": expected a tuple of 2, got (1,)"),
        ((1, "a", 2), tuple[int, str], ": expected a tuple of 2, got (1, 'a', 2)"),
        ([1, "a"], tuple[int, str], ": expected a tuple of 2, got [1, 'a']"),
        ((), tuple[()], None),
        ((1,), tuple[()], ": expected a tuple of 0, got (1,)"),
        (Pair("a", (1, 2)), Pair, None),
        (Pair("a", (1, 2.5)), Pair, ".span[1]: expected an integer, got 2.5"),  # type: ignore[arg-type]
        ([(1, True)], list[tuple[int, bool]], None),
        ([(1, True), (1, 0)], list[tuple[int, bool]], "[1][1]: expected true or false, got 0"),
        ((1, 2, "a"), tuple[int, ...], "[2]: expected an integer, got 'a'"),
        (None, tuple[int, str] | None, None),
    ],
)
def test_tuples_are_compared_place_by_place(value: Any, hint: Any, words: str | None) -> None:
    assert find_mismatch(value, hint) == words
