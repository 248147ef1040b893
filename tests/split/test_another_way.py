"""What a run does otherwise than the example did is an error, or makes no difference; never another answer."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import BadBoundary, MicrotomeError, Unsupported
from tests.split.test_cuts import Net, refusals
from tests.split.test_stages import exact, same

PLUS = torch.rand(2, 4) + 0.5


class Does(nn.Module):
    """Does what it is told to."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(*args)


def refused_or_exact(model: nn.Module, *others: Tensor) -> dict[str, str]:
    """Cut everywhere on `PLUS`, and run a copy's tail on what is another's head: the errors, by the cut."""
    errors: dict[str, str] = {}
    for cut in mt.cuts(model, PLUS):
        head, _ = mt.split(copy.deepcopy(model), PLUS, at=cut)
        _, tail = mt.split(copy.deepcopy(model), PLUS, at=cut)
        for x in (PLUS, *others):
            whole = copy.deepcopy(model)(x.clone())
            try:
                got = tail(mt.Boundary.from_bytes(head(x.clone()).to_bytes()))
            except MicrotomeError as error:
                assert x is not PLUS
                errors[cut.at] = str(error)
                continue
            assert same(got, whole), cut.at
    return errors


# -- before the cut ----------------------------------------------------------------------------------------------------


def test_a_call_that_returns_its_argument_on_the_example_and_something_else_in_a_run() -> None:
    clamps = Does(lambda x: x if x.sum() > 0 else x.clamp(max=-1))
    errors = refused_or_exact(Net(lambda net, x: net.b(net.one(x * 2)), one=clamps), -PLUS)
    assert errors == {"one": "the model returns a value of 'one', which did not cross the cut"}
    either = Does(lambda x, y: x if x.sum() > y.sum() else y)
    assert list(refused_or_exact(Net(lambda net, x: net.b(net.one(x * 2, x)), one=either), -PLUS)) == ["one"]


@pytest.mark.parametrize(
    ("body", "difference"),
    [
        (lambda x: x.view(-1) if x.sum() > 0 else x.clamp(max=-1).view(-1), "returns no view of an argument"),
        (lambda x: x.view(-1) if x.sum() < 0 else x.clamp(max=1).view(-1), "returns an argument, or a view of one"),
        (lambda x: x if x.sum() < 0 else x.clamp(max=1), "returns an argument, or a view of one"),
    ],
)
def test_a_call_that_returns_a_view_in_one_run_and_not_in_another(body: Callable[..., Any], difference: str) -> None:
    def around(net: Net, x: Tensor) -> Tensor:
        y = x * 2
        z = net.one(y)
        out = net.b(x)
        y.add_(1)  # so that it matters
        return z.view(-1) + out.view(-1)

    errors = refused_or_exact(Net(around, one=Does(body)), -PLUS)
    assert list(errors) == ["one", "b"]
    assert difference in errors["one"]


def test_a_call_that_writes_into_its_argument_in_a_run_alone() -> None:
    def writes(x: Tensor) -> Tensor:
        return x.sum() if x.sum() > 0 else x.mul_(3).sum()

    def around(net: Net, x: Tensor) -> Tensor:
        y = x * 2
        return net.one(y) + net.b(y)

    errors = refused_or_exact(Net(around, one=Does(writes)), -PLUS)
    assert "the run differs from the example: 'one' writes to a tensor among its arguments" in errors["one"]


@dataclass
class Noted:
    count: Any


@pytest.mark.parametrize(
    ("make", "change", "count", "name"),
    [
        (lambda: [2], lambda held, n: held.__setitem__(0, n), lambda held: held[0], "list"),
        (lambda: {"n": 2}, lambda held, n: held.update(n=n), lambda held: held["n"], "dict"),
        (lambda: {2}, lambda held, n: held.add(n), len, "set"),
        (lambda: Noted(2), lambda held, n: setattr(held, "count", n), lambda held: held.count, "Noted"),
        (lambda: SimpleNamespace(n=2), lambda held, n: setattr(held, "n", n), lambda held: held.n, "SimpleNamespace"),
        (lambda: deque([2]), lambda held, n: held.__setitem__(0, n), lambda held: held[0], "deque"),
    ],
)
def test_what_a_call_changes_and_did_not_on_the_example(make: Any, change: Any, count: Any, name: str) -> None:
    def note(x: Tensor, held: Any) -> Tensor:
        change(held, x.shape[0])  # two, as it was, on the example
        return x + 1

    def around(net: Net, x: Tensor) -> Tensor:
        held = make()
        return net.b(net.one(x, held)) * count(held)

    model = Net(around, one=Does(note))
    errors = refused_or_exact(model, torch.rand(3, 4))
    assert f"'one' mutates a {name} among its arguments, before the cut" in errors["one"]
    if name not in ("list", "dict"):
        found = refusals(model, "3x4")
        assert f"'one' runs in the head, and it mutates a {name} among its arguments" in found["one"]


def test_a_number_that_becomes_one_of_another_kind_is_changed() -> None:
    def around(net: Net, x: Tensor) -> Tensor:
        held = {"n": 1}
        return net.b(net.one(x, held)).int() * held["n"]

    assert exact(Net(around, one=Does(lambda x, held: held.update(n=1.0) or x)), PLUS) == 2


@pytest.mark.parametrize("where", ["nested", "elsewhere"])
def test_a_list_that_a_module_keeps_is_refused_wherever_it_keeps_it(where: str) -> None:
    def around(net: Net, x: Tensor) -> Tensor:
        kept: Any = net.kept["list"] if where == "nested" else net.b.kept
        kept.clear()
        return net.b(net.one(x, kept)) + kept[0]

    model: Any = Net(around, one=Does(lambda x, kept: kept.extend([x, x + 1]) or x))
    model.kept, model.b.kept = {"list": []}, []
    assert "it mutates a list or dict among its arguments" in refusals(model, "2x4")["one"]


# -- after the cut -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [lambda net, x: net.a(x), lambda net, x: x * 2])
def test_what_crossed_is_written_into_in_a_run_alone(made: Callable[..., Any]) -> None:
    def around(net: Net, x: Tensor) -> Tensor:
        y = made(net, x)
        part = net.one(y)
        z = net.b(x)
        if x.sum() < 0:
            y.add_(1)  # and so to what `one` returned
        return part + z.view(-1)[:2]

    errors = refused_or_exact(Net(around, one=Does(lambda y: y[0, :2])), -PLUS)
    assert "'one' or its argument was modified in place after the cut" in errors["one"]


# -- what a tail cannot have -------------------------------------------------------------------------------------------


def test_a_view_as_another_dtype_of_what_is_written_into_later_is_refused() -> None:
    def around(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        z = net.one(y)
        y.add_(1)
        return net.b(y) + z

    found = refusals(Net(around, one=Does(lambda y: y.view(torch.int32))), "2x4")
    assert "is a view of something that is written to later" in found["one"]


@pytest.mark.parametrize("what", ["count", "last"])
def test_what_a_module_in_the_head_keeps_is_not_taken_from_a_run_before(what: str) -> None:
    class KeepsBoth(nn.Module):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count, self.last = x.shape[0], x + 1
            return self.last

    model = Net(lambda net, x: net.b(net.one(net.a(x))) * getattr(net.one, what), one=KeepsBoth())
    model(torch.rand(3, 4))
    before = dict(vars(model.one))
    with pytest.raises(Unsupported, match=rf"reads attribute '{what}' of a KeepsBoth|give.* numbers that differ"):
        mt.split(model, PLUS, at="b")
    assert list(vars(model.one)) == list(before)
    assert vars(model.one)["last"] is before["last"]
    assert mt.split(model, PLUS, at="a").verified == "bit-equal"


@pytest.mark.parametrize("read", [lambda y: y.detach().numpy()[0, 0].item(), lambda y: y.tolist()[0][0]])
def test_values_that_are_read_without_an_operator_cross(read: Callable[[Tensor], float]) -> None:
    model = Net(lambda net, x: net.c(net.b(y := net.a(x))) * read(y))
    with torch.no_grad():
        assert exact(model, PLUS, others=(torch.rand(3, 4),)) == 3


# -- boundaries from elsewhere -----------------------------------------------------------------------------------------


VIEW = {"kind": "argument_view", "argument_strides": [4, 1], "shape": [8], "strides": [1], "offset": 0}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (None, r"facts.calls\[1\].outputs\[0\]: expected a SentTensor or .*, got None"),
        ({}, r"facts.calls\[1\].outputs\[0\]: expected a SentTensor or .*, got {}"),
        ({"kind": []}, r"facts.calls\[1\].outputs\[0\]: expected a SentTensor or .*, got {'kind': \[\]}"),
        ({"kind": "value", "value": 1}, r"facts.calls\[1\].outputs\[0\]: expected a SentTensor or"),
        ({"kind": "sent"}, r"expected the field 'name' of SentTensor"),
        ({"kind": "sent", "name": "a"}, r"expected a view of an argument as output 0 of 'one', got SentTensor"),
        ({**VIEW, "shape": 2}, r"facts.calls\[1\].outputs\[0\].shape: expected a list, got 2"),
        ({**VIEW, "shape": [-8]}, r"facts.calls\[1\].outputs\[0\]: no tensor is ArgumentView"),
        ({**VIEW, "strides": [1, 1]}, r"facts.calls\[1\].outputs\[0\]: no tensor is ArgumentView"),
        ({**VIEW, "offset": 2**62}, r"facts.calls\[1\].outputs\[0\]: no tensor is ArgumentView"),
        ({**VIEW, "offset": 99}, r"'one': ArgumentView.* is out of bounds"),
        ({**VIEW, "offset": -1}, r"'one': ArgumentView.* is out of bounds"),
        ({**VIEW, "offset": None}, r"facts.calls\[1\].outputs\[0\].offset: expected an integer, got None"),
    ],
)
def test_a_view_that_makes_no_sense_is_refused(item: Any, message: str) -> None:
    def around(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        z = net.one(y)
        out = net.b(x)
        y.add_(1)
        return z + out.view(-1)

    with torch.no_grad():
        head, tail = mt.split(Net(around, one=Does(lambda y: y.view(-1))), PLUS, at="one")
        boundary = head(PLUS)
        assert boundary.facts["calls"][1]["outputs"] == [VIEW]
        boundary.facts["calls"][1]["outputs"][0] = item
        with pytest.raises(BadBoundary, match=message):
            tail(boundary)


@pytest.mark.parametrize(
    ("containers", "message"),
    [
        (None, r"facts.calls\[0\].containers: expected a tuple, got None"),
        ([], r"expected 1 tensors, 0 other values and 1 lists and dicts of 'one', got 1, 0 and 0"),
        ([None], r"facts.calls\[0\].containers\[0\]: expected a ContainerRecord, got None"),
        ([{"keys": None, "items": [3]}], r"containers\[0\].items\[0\]: expected a PlainItem or .*, got 3"),
        ([{"keys": ["n"], "items": [{"kind": "value", "value": 1}]}], r"expected the items of a list that 'one' mut"),
        ([{"keys": None, "items": [{"kind": "output", "position": 1}]}], r"one of 1 outputs of 'one', got position 1"),
        ([{"keys": ["n"], "items": []}], r"facts.calls\[0\].containers\[0\]: expected 0 keys, got 1"),
    ],
)
def test_lists_that_make_no_sense_are_refused(containers: Any, message: str) -> None:
    def around(net: Net, x: Tensor) -> Tensor:
        held: list[Any] = []
        return net.b(net.one(x, held)) + held[0]

    head, tail = mt.split(Net(around, one=Does(lambda x, held: held.append(3) or x)), PLUS, at="one")
    boundary = head(PLUS)
    boundary.facts["calls"][0]["containers"] = containers
    with pytest.raises(BadBoundary, match=message):
        tail(boundary)
