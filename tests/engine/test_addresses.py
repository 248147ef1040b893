"""Addresses: resolving names when modules run several times and outputs have several items."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from microtome.addresses import Addresses, split_call_index
from microtome.engine.selectors import path_aliases, reject_ambiguous_names
from microtome.errors import BadQuery, NoMatch, Unsupported


@pytest.mark.parametrize(
    ("known", "name", "meant"),
    [
        (["a"], "a", "a"),
        (["a"], "a#0", "a"),
        (["a", "a#1"], "a#0", "a"),
        (["a", "a#1"], "a#1", "a#1"),
        (["a#0", "a#1"], "a#0", "a#0"),
        (["", "#1"], "#0", ""),
        (["a"], "b", None),
        (["a"], "a#1", None),
        (["a.b", "a.b.c"], "a.b", "a.b"),
        (["a[0]"], "a", "a[0]"),
        (["a", "a[0]"], "a", "a"),
        (["a[1][0]", "a[10]"], "a[1]", "a[1][0]"),
        (["a[x#1]"], "a[x#1]", "a[x#1]"),
        (["a", "a/attention#1"], "a", "a"),
        (["a/add#0"], "a/add", "a/add#0"),
        (["a/add#0", "a#1/add#0"], "a#1/add", "a#1/add#0"),
        (["a/add#0", "a#1/add#0"], "a#0/add#0", "a/add#0"),
        (["x/y", "x/y#1"], "x/y#0", "x/y"),  # modules may have such names
        (["x/y/add#0"], "x/y/add", "x/y/add#0"),
        (["a#b"], "a#b#0", "a#b"),
    ],
)
def test_a_name_means_one_of_what_there_is(known: list[str], name: str, meant: str | None) -> None:
    assert Addresses(known).resolve(name) == meant


@pytest.mark.parametrize(
    ("known", "name", "message"),
    [
        (["a", "a#1", "a#2"], "a", "'a' ran 3 times: say which of 'a#0', 'a#1', 'a#2'"),
        (["a[0]", "a[1]"], "a", r"'a' is the name of 2: say which of 'a\[0\]', 'a\[1\]'"),
        (["a[0]", "a#1[0]"], "a[0]", r"'a\[0\]' ran 2 times: say which of 'a#0\[0\]', 'a#1\[0\]'"),
        (["a/add#0", "a/add#1"], "a/add", "'a/add' is the name of 2: say which of 'a/add#0', 'a/add#1'"),
        (["x/y", "x/y#1"], "x/y", "'x/y' .* say which of 'x/y#0', 'x/y#1'"),
        ([f"a[{at}]" for at in range(20)], "a", r"'a\[7\]', …$"),
    ],
)
def test_a_name_that_may_mean_several_is_an_error_that_lists_them(known: list[str], name: str, message: str) -> None:
    with pytest.raises(NoMatch, match=message):
        Addresses(known).resolve(name)


@given(st.lists(st.from_regex(r"[ab](#[1-3])?(/op#[0-2])?(\[[0-1]\])?", fullmatch=True), unique=True))
def test_what_is_spelled_out_means_itself(known: list[str]) -> None:
    there = Addresses(known)
    exact = [address for address in known if f"{address}[0]" not in known and f"{address}[1]" not in known]
    assert [there.resolve(there.name(address)) for address in exact] == exact
    assert len(set(there.names)) == len(known)


def test_a_name_is_a_text() -> None:
    with pytest.raises(BadQuery, match="expected a name such as 'blocks.0' or 'blocks.0#1', got 5"):
        Addresses(["5"]).resolve(5)


def test_shared_modules_are_found_by_all_their_names() -> None:
    model: Any = nn.Module()
    model.a = nn.Sequential(nn.ReLU())
    model.b = model.a
    others = path_aliases(model)
    assert others == {"b": "a", "b.0": "a.0"}
    there = Addresses(["a", "a.0", "a.0#1"], others)
    assert (there.resolve("b"), there.resolve("b.0#1"), there.resolve("b.1")) == ("a", "a.0#1", None)
    assert path_aliases(nn.Sequential(nn.ReLU())) == {}


def test_a_name_that_reads_as_a_call_is_refused() -> None:
    reject_ambiguous_names(["a", "a#", "a#b", "a#1.b", "a/b"])
    with pytest.raises(Unsupported, match=r"the name of the module 'a\.b#1' reads as the call 1 of 'a\.b'"):
        reject_ambiguous_names(["a", "a.b#1"])


def test_the_call_that_a_selector_names() -> None:
    assert [split_call_index(text) for text in ("a", "a#1", "a*#0", "a#", "a#b", nn.ReLU)] == [
        ("a", None),
        ("a", 1),
        ("a*", 0),
        ("a#", None),
        ("a#b", None),
        (nn.ReLU, None),
    ]
