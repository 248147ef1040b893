"""Addresses: resolving names when modules run several times and outputs have several items."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import microtome as mt
from microtome.addresses import Addresses, find_address, split_call_index
from microtome.engine.selectors import path_aliases, reject_ambiguous_names, select
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


class Net(nn.Module):
    """Runs `shared` twice, and operators of its own in `attn`."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.attn = nn.MultiheadAttention(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.shared(x))
        y: Tensor = self.attn(x, x, x)[0]
        return y


#: As calls begin.
CALLS = ["", "shared#0", "shared.0#0", "shared.1#0", "shared#1", "shared.0#1", "shared.1#1", "attn"]


@pytest.mark.parametrize("root", ["(root)", "", "#0", "(root)#0"])
def test_the_root_is_accepted_as_tables_print_it(root: str) -> None:
    net, x = Net().eval(), torch.ones(3, 2)
    assert mt.profile(net, x)[root].address == mt.trace(net, x)[root].address == ""
    assert mt.profile(net)[root].type == "Net"
    assert list(mt.extract(net, x, root)) == [""]
    assert mt.extract(net, x, [root, "shared"], stop=False)[root].equal(net(x))
    with mt.edit(net, {root: mt.zero()}):
        assert not net(x).any()
    with mt.track(net) as tracker:
        assert tracker.module_of(root) is net
    for cut in (mt.cuts(net, x).find, lambda at: mt.split(net, x, at)):
        with pytest.raises((NoMatch, BadQuery), match="the exit of the model itself is no cut"):
            cut(root)


def test_a_module_that_is_named_as_tables_print_the_root_is_found() -> None:
    net = nn.Sequential()
    net.add_module("(root)", nn.ReLU())
    assert list(select(net, "(root)")) == ["(root)"]
    assert find_address("(root)", ["", "(root)"]) == "(root)"


def test_a_call_with_its_index_is_accepted_whether_or_not_the_module_ran_again() -> None:
    net, x = Net().eval(), torch.ones(3, 2)
    names: list[str] = []
    with mt.track(net, on_enter=lambda call, _: names.append(f"{call.path}#{call.index}")):
        net(x)
    profile, cuts = mt.profile(net, x), mt.cuts(net, x)
    assert [profile[name].address for name in names] == CALLS
    assert [cuts[name].at for name in names[1:]] == CALLS[1:]
    assert [mt.extract(net, x, name).addresses for name in names] == [(name,) for name in names]


TREE = "Names in a tree are relative to the call that contains them"
ONE_INDEX = "An address has one index, at its end"
OPERATORS = "Operators can be captured, by mt.extract alone, but not recorded, edited or cut at; .* is 'attn'"
ROW = "A row in parentheses has the operators that the module above it runs itself, and no address of its own"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0#0", rf"Did you mean 'shared\.0#0'\? {TREE}"),
        ("1", rf"Did you mean 'shared\.1#0', 'shared\.1#1'\? {TREE}"),
        ("shared#1.0#1", rf"{ONE_INDEX}\. Did you mean 'shared\.0#1'\?"),
        ("shared#1.1", rf"{ONE_INDEX}\. Did you mean 'shared\.1#0', 'shared\.1#1'\?"),
        ("attn.(bmm, softmax)", f"{ROW}: use that of the module, 'attn'"),
        ("(bmm, softmax)", rf"{ROW}: use that of the module\.$"),
        ("attn/softmax#0", OPERATORS),
        ("attn#0/softmax", OPERATORS.replace("'attn'", "'attn#0'")),
        ("attn,shared#1", "Expected one address, got 2: pass each on its own, 'attn' and 'shared#1'"),
        ("attn, shred", r"Did you mean .*'shared"),
        ("shred", r"Did you mean 'shared#0' or 'shared#1'"),
        ("shred#1", r"Did you mean 'shared#1'"),
        ("(input)", "It stands for the input of the model, which only a client can be cut at: mt.connect"),
        ("(output)", r"It stands for the output of the model, whose address is '\(root\)'"),
        ("nothing", "There are: "),
        ("blocks", r"It is not called itself, as a ModuleList is not; inside it are 'blocks\.a', 'blocks\.b'\.$"),
    ],
)
def test_an_error_explains_a_name_that_is_printed_and_is_no_address(name: str, message: str) -> None:
    with pytest.raises(NoMatch, match=message):
        find_address(name, [*CALLS, "blocks.a", "blocks.a.mlp", "blocks.b"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0", rf"no module matches the path '0'\. Did you mean 'shared\.0'\? {TREE}"),
        ("shared#1.1", rf"{ONE_INDEX}\. Did you mean 'shared\.1'\?"),
        ("attn/softmax", OPERATORS),
        ("attn, shared", "Expected one address, got 2: pass each on its own, 'attn' and 'shared'"),
    ],
)
def test_a_selector_that_is_no_path_is_explained(name: str, message: str) -> None:
    with pytest.raises(NoMatch, match=message):
        select(Net(), name)
    with pytest.raises(NoMatch, match=message):
        mt.edit(Net(), {name: mt.zero()}).__enter__()


def test_an_index_inside_a_path_is_of_no_module() -> None:
    with mt.track(Net()) as tracker, pytest.raises(NoMatch, match=ONE_INDEX):
        tracker.module_of("shared#1.1")
