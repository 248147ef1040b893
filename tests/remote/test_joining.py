"""Requests that are computed together."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import RemoteError
from microtome.inputs import Inputs
from microtome.remote.joining import CannotJoin, learn
from microtome.remote.served import Served
from microtome.remote.server import Server
from microtome.split.data import Cut
from tests.remote.small import small


class Normalised(nn.Module):
    """Each row depends on all the others: nothing is as it is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y - y.mean(0))


class Positioned(nn.Module):
    """Something that does not grow with the batch crosses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"out": self.last(self.first(x) * scale)}


def served_batches(server: Server) -> float:
    return server.metrics.registry.get_sample_value("microtome_batch_count") or 0.0


@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-vit"])
@pytest.mark.parametrize("at", [0, 7, ""])
def test_requests_together_give_what_each_gives_alone(name: str, at: int | str) -> None:
    model, x = small(name)
    cut = mt.cuts(model, x)[at].at if isinstance(at, int) else at
    items = [torch.randn(1 + number % 3, *x.shape[1:]) for number in range(24)]
    with mt.serve(model, x, listen="127.0.0.1:0", batch=8, batch_window="50ms") as server:
        with mt.connect(model, x, server.address, at=cut, codec="raw") as remote:
            results = list(remote.stream(items, window=16))
            assert max(sent.at == cut for sent in remote.requests)
        computed = served_batches(server)
    assert computed < len(items)
    with torch.no_grad():
        for given, result in zip(items, results, strict=True):
            torch.testing.assert_close(result, model(given), rtol=1e-4, atol=1e-5)


def test_two_cuts_at_once_are_not_mixed() -> None:
    model, x = small()
    cuts = mt.cuts(model, x)[::6]
    with mt.serve(model, x, listen="127.0.0.1:0", batch=8, batch_window="20ms") as server:

        def ask(at: Cut) -> bool:
            own = copy.deepcopy(model)  # a model is looked at in one thread at a time
            with mt.connect(own, x, server.address, at=at, codec="raw") as remote, torch.no_grad():
                items = [torch.randn_like(x) for _ in range(8)]
                return all(
                    torch.allclose(result, own(given), rtol=1e-4, atol=1e-5)
                    for given, result in zip(items, remote.stream(items), strict=True)
                )

        with ThreadPoolExecutor(len(cuts)) as pool:
            assert all(pool.map(ask, cuts))


def test_a_model_whose_rows_depend_on_each_other_is_not_joined() -> None:
    torch.manual_seed(0)
    model, x = Normalised().eval(), torch.randn(3, 4)
    head, tail = mt.split(model, x, at="first")
    assert learn(head, tail, Inputs(x)) is None
    items = [torch.randn(3, 4) for _ in range(12)]
    with (
        mt.serve(model, x, listen="127.0.0.1:0", batch=4, batch_window="20ms") as server,
        mt.connect(model, x, server.address, at="first", codec="raw") as remote,
        torch.no_grad(),
    ):
        for given, result in zip(items, remote.stream(items), strict=True):
            assert result.equal(model(given))


def test_what_does_not_grow_must_be_the_same() -> None:
    model = Positioned().eval()
    x, scale = torch.randn(2, 4), torch.tensor(2.0)
    head, tail = mt.split(model, (x, scale), at="first")
    joiner = learn(head, tail, Inputs(x, scale))
    assert joiner is not None
    assert joiner.grows == {"first": 2}
    same, other = head(x, scale), head(x, torch.tensor(3.0))
    joined = joiner.part(tail(joiner.join([same, same])), [2, 2])
    torch.testing.assert_close(joined[1]["out"], model(x, scale)["out"])
    with pytest.raises(CannotJoin, match="does not grow with the batch"):
        joiner.join([same, other])


def test_requests_that_cannot_be_joined_are_answered_alone() -> None:
    model = Positioned().eval()
    x, scale = torch.randn(2, 4), torch.tensor(2.0)
    items = [(torch.randn(2, 4), torch.tensor(float(number))) for number in range(12)]
    with (
        mt.serve(model, (x, scale), listen="127.0.0.1:0", batch=4, batch_window="20ms") as server,
        mt.connect(model, (x, scale), server.address, at="first", codec="raw") as remote,
        torch.no_grad(),
    ):
        for given, result in zip(items, remote.stream(items), strict=True):
            torch.testing.assert_close(result["out"], model(*given)["out"])


def test_one_bad_request_does_not_spoil_the_others() -> None:
    model, x = small()
    with mt.serve(model, x, listen="127.0.0.1:0", batch=4, batch_window="100ms") as server:

        def ask(given: Tensor) -> bool:
            own = copy.deepcopy(model)
            with mt.connect(own, x, server.address, at="", codec="raw", fallback=None) as remote, torch.no_grad():
                try:
                    return torch.allclose(remote(given), own(given), rtol=1e-4, atol=1e-5)
                except RemoteError as error:
                    return "MODEL_FAILED" in error.kind and given.shape[1] == 2

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(ask, [x, torch.randn(1, 2, 8, 8), x + 1, x + 2]))


@torch.no_grad()
def test_what_says_another_batch_than_it_has_is_not_joined_with_others() -> None:
    model, x = small("tiny-vit")
    at = mt.cuts(model, x)[7].at
    head, tail = mt.split(model, x, at=at)
    joiner = learn(head, tail, Inputs(x))
    assert joiner is not None
    assert joiner.adds
    good = head(x)
    assert joiner.key(good) is not None
    for path in joiner.adds:
        for value in (-1, 0, 1000, "2", None):
            forged = copy.deepcopy(good)
            inside = forged.facts
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = value
            assert joiner.key(forged) is None
    assert joiner.key(mt.Boundary(at, good.fingerprint, {}, {})) is None


class Spread(nn.Module):
    """What has one row is spread over the rows of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(self.first(x) + y)


def test_requests_whose_inputs_have_different_rows_are_computed_alone() -> None:
    model = Spread().eval()
    served = Served(model, (torch.randn(1, 4), torch.randn(1, 4)))

    def key(*given: Tensor) -> str | None:
        return served.key(served._whole_head(*given))

    assert key(torch.randn(2, 4), torch.randn(2, 4)) == key(torch.randn(3, 4), torch.randn(3, 4)) is not None
    assert key(torch.randn(2, 4), torch.randn(1, 4)) is None
    assert key(torch.randn(1, 4), torch.randn(2, 4)) is None


@pytest.mark.parametrize("example", [torch.zeros(1, 4), torch.ones(2, 4)])
def test_an_example_that_is_the_same_turned_round_still_shows_that_rows_are_mixed(example: Tensor) -> None:
    served = Served(Normalised().eval(), example)
    assert served.key(served._whole_head(example)) is None


def test_an_example_of_which_no_other_is_known_is_not_joined() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2)).eval()
    for example, joins in ((torch.tensor([[0, 1, 2]]), True), (torch.tensor([[1, 1, 1]]), False)):
        served = Served(model, example)
        assert (served.key(served._whole_head(example)) is not None) is joins
