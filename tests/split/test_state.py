"""State that a model carries from run to run stays with the side that writes and reads it, or the cut is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import NoMatch, Unsupported
from microtome.remote.served_model import ServedModel
from tests.marks import slow
from tests.split.test_cuts import Net, refusals
from tests.split.test_stages import same


class Recurrent(nn.Module):
    """Keeps its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, self.hidden = self.rnn(x[:, None], self.hidden)
        return y[:, 0]


class Keeps(nn.Module):
    """Adds what it was given in the runs before, kept in one of several ways."""

    mean: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.last: Any = {"list": [], "dict": {}, "deep": {"in": []}, "number": 0, "unread": 0}.get(how)
        self.register_buffer("mean", torch.zeros(2, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        match self.how:
            case "attribute":
                y, self.last = y if self.last is None else y + self.last, x
            case "list":
                y = y + sum(self.last) if self.last else y
                self.last.append(x)
            case "dict":
                y = y + self.last.get("x", 0)
                self.last["x"] = x
            case "deep":
                y = y + sum(self.last["in"]) if self.last["in"] else y
                self.last["in"].append(x)
            case "number":
                self.last += 1
                y = y * self.last
            case "unread":
                self.last += 1
            case "in place":
                self.mean.mul_(0.9).add_(x.detach())
                y = y + self.mean
            case "replaced":
                y, self.mean = y + self.mean, x.detach() * 2
        return y


HOWS = ["attribute", "list", "dict", "deep", "number", "unread", "in place", "replaced"]
REQUESTS = [torch.rand(2, 4) for _ in range(4)]


def held(model: nn.Module) -> dict[str, Any]:
    """All that the modules hold, by identity, and the values of tensors."""
    found: dict[str, Any] = {}

    def look(place: str, value: Any) -> None:
        found[place] = id(value)
        if isinstance(value, Tensor):
            found[f"{place} values"] = (
                value.detach().clone().numpy().tobytes(),
                id(value.grad) if value.is_leaf else None,
            )
        for key, item in value.items() if isinstance(value, dict) else ():
            look(f"{place}[{key!r}]", item)
        for key, item in enumerate(value) if isinstance(value, list | tuple) else ():
            look(f"{place}[{key}]", item)

    for path, module in model.named_modules():
        for name, value in vars(module).items():
            look(f"{path}.{name}", value)
    return found


def check(model: nn.Module) -> tuple[set[str], set[str]]:
    """Cut everywhere, with one model and with one for each side, over several requests: the cuts, and those refused."""
    before = held(model)
    cuts = mt.cuts(model, REQUESTS[0])
    assert held(model) == before
    for cut in cuts:
        alone = copy.deepcopy(model)
        wanted = [alone(x) for x in REQUESTS]
        one, head_model, tail_model = (copy.deepcopy(model) for _ in range(3))
        was = held(one)
        stages = mt.split(one, REQUESTS[0], at=cut)
        assert stages.verified == "bit-equal", cut.at
        assert held(one) == was, cut.at
        head, tail = mt.split(head_model, REQUESTS[0], at=cut)[0], mt.split(tail_model, REQUESTS[0], at=cut)[1]
        for number, (x, whole) in enumerate(zip(REQUESTS, wanted, strict=True)):
            assert same(stages(x), whole), (cut.at, number)
            assert same(tail(mt.Boundary.from_bytes(head(x).to_bytes())), whole), (cut.at, number)
        for module in (*one.modules(), *tail_model.modules()):
            assert "Placeholder" not in repr(vars(module)), cut.at
    return {cut.at for cut in cuts}, {cut.at for cut in cuts.refused}


def around(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.c(net.one(net.a(x)) + net.b(x))
    return y


@pytest.mark.parametrize("how", ["list", "in place", *slow(*(how for how in HOWS if how not in ("list", "in place")))])
def test_state_inside_a_module_stays_with_its_side(how: str) -> None:
    with torch.no_grad():
        offered, refused = check(Net(around, one=Keeps(how)))
    assert {"a", "one", "b", "c"} <= offered
    # Where the cut lies in the module that keeps the state, it is read after the cut and written before it or again.
    inside = {"one.linear"}
    assert refused <= inside
    assert offered | refused == {"a", "one", "b", "c", "one.linear"}


def test_a_hidden_state_in_the_model_itself_stays_in_the_tail_or_is_refused() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.rnn, self.dec = nn.Linear(4, 4), nn.GRU(4, 4), nn.Linear(4, 4)
            self.hidden: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y, self.hidden = self.rnn(self.enc(x)[None], self.hidden)
            out: Tensor = self.dec(y[0])
            return out

    with torch.no_grad():
        assert check(Whole()) == ({"enc"}, {"rnn", "dec"})
        found = refusals(Whole(), "2x4")
    assert "'hidden' of the model is state that a run leaves to the next one, written in the tail" in found["rnn"]
    with pytest.raises(NoMatch, match="from the second request on"):
        mt.split(Whole(), "2x4", at="rnn")


def test_a_hidden_state_in_a_part_stays_with_that_part() -> None:
    with torch.no_grad():
        offered, _ = check(Net(around, one=Recurrent()))
    assert {"a", "one", "b", "c"} <= offered


@pytest.mark.parametrize("mode", [True, False])
def test_batch_norm_keeps_its_statistics_where_it_runs(mode: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).train(mode)
    with torch.no_grad():
        assert check(model) == ({"0", "1", "2", "3"}, set())


def bodies() -> dict[str, Callable[[Any, Tensor], Tensor]]:
    """Models that keep state in code between calls, or read on one side what the other writes."""

    def counts(net: Any, x: Tensor) -> Tensor:
        net.kept = net.kept + 1 if isinstance(net.kept, int) else 1
        return net.c(net.b(net.a(x)))

    def scales(net: Any, x: Tensor) -> Tensor:
        net.kept = net.kept + 1 if isinstance(net.kept, int) else 1
        return net.c(net.b(net.a(x)) * net.kept)

    def first_reads(net: Any, x: Tensor) -> Tensor:
        y = net.a(x) if net.kept is None else net.a(x + net.kept)
        z = net.b(y)
        net.kept = z
        return net.c(z)

    def last_reads(net: Any, x: Tensor) -> Tensor:
        before, net.kept = net.kept, net.a(x)
        y = net.b(net.kept)
        return net.c(y if before is None else y + before)

    def last_alone(net: Any, x: Tensor) -> Tensor:
        y = net.c(net.b(net.a(x)))
        before, net.kept = net.kept, y
        return y if before is None else y + before

    def once(net: Any, x: Tensor) -> Tensor:
        if net.kept is None:
            net.kept = torch.ones(4, 4).tril()
        return net.c(net.b(net.a(x)) @ net.kept)

    def elsewhere(net: Any, x: Tensor) -> Tensor:
        y = net.a(x) if getattr(net.b, "left", None) is None else net.a(x) + net.b.left
        z = net.b(y)
        net.b.left = z
        return net.c(z)

    return {body.__name__: body for body in (counts, scales, first_reads, last_reads, last_alone, once, elsewhere)}


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("counts", {"a", "b", "c"}),
        ("scales", set()),
        ("first_reads", set()),
        ("last_reads", set()),
        ("last_alone", {"a", "b", "c"}),
        ("once", {"a", "b", "c"}),
        ("elsewhere", set()),
    ],
)
def test_state_that_code_between_calls_keeps(name: str, exact: set[str]) -> None:
    model = Net(bodies()[name])
    model.kept = None  # type: ignore[assignment]
    with torch.no_grad():
        offered, refused = check(model)
    assert offered | refused == {"a", "b", "c"}
    assert offered >= exact


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("action", ["cuts", "split"])
def test_the_model_holds_afterwards_what_it_held(how: str, action: str) -> None:
    model = Net(around, one=Keeps(how))
    model.one.extra = [torch.ones(2, requires_grad=True), {"x": torch.zeros(1)}]
    model.one.extra[0].sum().backward()
    model(REQUESTS[0])
    before = held(model)
    if action == "cuts":
        mt.cuts(model, REQUESTS[1])
    elif action == "split":
        mt.split(model, REQUESTS[1], at="a")
    assert held(model) == before


def test_the_model_holds_what_it_held_if_verification_raises() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            self.runs.append(x)
            if not x.is_meta:
                raise ValueError("enough")
            return x * 2

    model = Net(around, one=Fails())
    before = held(model)
    with pytest.raises(ValueError, match="enough"):
        mt.split(model, REQUESTS[0], at="a")
    assert held(model) == before


@pytest.mark.parametrize("how", ["attribute", "in place"])
def test_a_server_refuses_a_model_that_carries_state(how: str) -> None:
    model = Net(around, one=Keeps(how)).eval()
    with pytest.raises(Unsupported, match=r"a server cannot run this model: it carries .* from run to run"):
        ServedModel(model, REQUESTS[0])
    ServedModel(Net(around, one=Keeps("unread")), REQUESTS[0])
