"""Values from files are compared with annotations, also inside of tuples."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import pytest

from microtome.files.types import find_mismatch, from_plain, to_plain


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
        ([1], bool | int | float | str | None, ": expected a bool, int, float, string or None, got [1]"),
        ((1, 2), tuple[int, str] | None, "[1]: expected a string, got 2"),
        (10**101, int, f": expected an integer, got {10**101!r:.80}"),
    ],
)
def test_mismatches_are_located_inside_of_values(value: Any, hint: Any, words: str | None) -> None:
    assert find_mismatch(value, hint) == words


def test_numbers_of_any_size_are_accepted_on_request() -> None:
    for number in (10**101, -(10**400), 1e300, float("inf")):
        assert find_mismatch([number], list[int | float | str], finite=False) is None
        assert find_mismatch(number, float, finite=False) is None
    assert find_mismatch(1.0, int, finite=False) == ": expected an integer, got 1.0"
    assert find_mismatch(True, int, finite=False) == ": expected an integer, got True"


class Circle(NamedTuple):
    radius: float
    kind: Literal["circle"] = "circle"


class Square(NamedTuple):
    side: int
    kind: Literal["square"] = "square"


class Drawing(NamedTuple):
    shapes: tuple[Circle | Square, ...]


def test_the_members_of_a_union_are_distinguished_by_type() -> None:
    drawing = Drawing((Square(2), Circle(1.5)))
    assert to_plain(drawing) == {"shapes": [{"side": 2, "kind": "square"}, {"radius": 1.5, "kind": "circle"}]}
    assert from_plain(to_plain(drawing), Drawing) == drawing
    assert find_mismatch(drawing, Drawing) is None


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"kind": "square", "side": "2"}, ".shapes[0].side: expected an integer, got '2'"),
        ({"kind": "oval"}, ".shapes[0]: expected a Circle or Square, got {'kind': 'oval'}"),
        ({"kind": ["square"]}, ".shapes[0]: expected a Circle or Square, got {'kind': ['square']}"),
        (3, ".shapes[0]: expected a Circle or Square, got 3"),
    ],
)
def test_a_member_of_a_union_that_is_none_of_them_is_found(shape: Any, words: str) -> None:
    assert find_mismatch(from_plain({"shapes": [shape]}, Drawing), Drawing) == words


class Options(NamedTuple):
    name: str
    sizes: tuple[int, ...] = ()
    limit: int | None = None
    total: int = 0


def test_empty_defaults_are_omitted_on_request() -> None:
    assert to_plain([Options("a")], compact=True) == [{"name": "a", "total": 0}]
    assert to_plain(Options("a", (1,), 0), compact=True) == {"name": "a", "sizes": [1], "limit": 0, "total": 0}
    assert to_plain(Options("a")) == {"name": "a", "sizes": [], "limit": None, "total": 0}
    assert from_plain({"name": "a", "total": 0}, Options) == Options("a")
