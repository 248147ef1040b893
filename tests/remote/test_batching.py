"""Requests that are computed together."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import microtome as mt
from microtome.engine.pytree import tensors_in
from microtome.errors import BadQuery, RemoteError
from microtome.inputs import Inputs
from microtome.remote.batch_verification import CannotBatch
from microtome.remote.batching import Batcher, build_batcher, make_examples
from microtome.remote.served_model import ServedModel
from microtome.remote.server import Server
from microtome.remote.stage_ref import StageRef
from microtome.results.cuts import Cut
from tests.marks import slow
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


@pytest.mark.parametrize("name", ["tiny-vit", *slow("tiny-resnet")])
@pytest.mark.parametrize("at", [7, *slow(0, "")])
def test_requests_together_give_what_each_gives_alone(name: str, at: int | str) -> None:
    model, x = small(name)
    cut = mt.cuts(model, x)[at].at if isinstance(at, int) else at
    items = [torch.randn(1 + number % 3, *x.shape[1:]) for number in range(24)]
    with mt.serve(model, x, listen="127.0.0.1:0", batch=8, batch_window="1s") as server:
        with mt.connect(model, x, server.address, at=cut, codec="raw") as remote:
            results = list(remote.stream(items, window=16))
            assert max(sent.at == cut for sent in remote.requests)
        computed = served_batches(server)
    assert computed < 1 + len(items)  # and the warm-up
    with torch.no_grad():
        for given, result in zip(items, results, strict=True):
            torch.testing.assert_close(result, model(given), rtol=1e-4, atol=1e-5)


def test_several_workers_do_not_share_a_batch() -> None:
    model, x = small("tiny-vit")
    with mt.serve(model, x, listen="127.0.0.1:0", batch=8, batch_window="1s", concurrency=4) as server:
        with mt.connect(model, x, server.address, at="", codec="raw") as remote:
            before = served_batches(server)
            list(remote.stream([x] * 8, window=8))
        assert served_batches(server) - before == 1


def test_a_stage_is_batched_from_examples_of_the_whole_model() -> None:
    model, x = small("tiny-vit")
    head, tail = mt.split(model, x, at="blocks.0")
    xs = [torch.randn_like(x) for _ in range(3)]
    with torch.no_grad():
        served = ServedModel(tail, examples=make_examples(head, Inputs(x)))
        boundaries = [head(one) for one in xs]
        (key,) = {served.batch_key(boundary) for boundary in boundaries}
        assert key is not None
        for one, output in zip(xs, served.compute(boundaries), strict=True):
            torch.testing.assert_close(output, model(one), rtol=1e-4, atol=1e-5)
        assert ServedModel(tail).batch_key(boundaries[0]) is None


class Counting(nn.Module):
    """Returns the number of rows, which does not cross as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.linear(x), len(x)


class Counted(nn.Module):
    """What a later call needs says how many rows there are; two tensors are in other layouts or share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.count, self.relu, self.last = (
            nn.Linear(4, 4),
            Counting(),
            nn.ReLU(inplace=True),
            nn.Linear(4, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z, rows = self.count(self.relu(y).t().contiguous().t())
        return self.last(z * y) * (rows / len(x))


MIDDLE = [
    ("tiny-vit", "blocks.0.attn.qkv", "blocks.1.mlp.0"),
    ("tiny-vit", "blocks.1.attn", "blocks.2"),
    ("counted", "first", "count"),
    ("counted", "count", "count.linear"),
    pytest.param("tiny-resnet", "stem.1", "layer2.0.conv2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "first", "second"), MIDDLE)
@torch.no_grad()
def test_every_stage_of_a_chain_is_batched(name: str, first: str, second: str) -> None:
    torch.manual_seed(0)
    model, x = (Counted().eval(), torch.randn(1, 4)) if name == "counted" else small(name)
    items = [torch.cat([x.roll(shift, -1)] * (1 + shift % 2)) for shift in range(5)]
    stages = mt.split(model, x, at=[first, second])
    served = ServedModel(model, x)
    requests = [served._pack_inputs(item).to_bytes() for item in items]
    for index in range(3):
        ref = StageRef(stages.at, index)
        decoded, again = ([mt.Boundary.from_bytes(data) for data in requests] for _ in range(2))
        (key,) = {served.batch_key(boundary, ref) for boundary in decoded}
        assert key is not None, index
        outputs = served.compute(decoded, ref)
        if index < 2:
            alone = [served.compute([boundary], ref)[0] for boundary in again]
            assert [one.facts for one in outputs] == [one.facts for one in alone]
            requests = [output.to_bytes() for output in outputs]
    for item, output in zip(items, outputs, strict=True):
        torch.testing.assert_close(output, model(item), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_stage_before_the_last_that_mixes_requests_is_not_batched() -> None:
    model, x = Between(MIXING["mean"]).eval(), torch.randn(3, 4)
    served = ServedModel(model, x)
    cuts = ("first", "last")
    boundary = mt.split(model, x, at=cuts)[0](x)
    assert served.batch_key(boundary, StageRef(cuts, 1)) is None


def test_a_tensor_that_is_passed_twice_is_computed_alone() -> None:
    model, x = Positioned().eval(), torch.randn(4, 4)
    served = ServedModel(model, (x, x))
    boundary = mt.split(model, (x, x), at="first")[0](x, x)
    assert served.batch_key(boundary) is None


@pytest.mark.slow
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
    assert build_batcher(partial(make_examples, head, Inputs(x)), tail) is None
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
    batcher = build_batcher(partial(make_examples, head, Inputs(x, scale)), tail)
    assert batcher is not None
    assert batcher.example_rows == {"first": 2}
    same, other = head(x, scale), head(x, torch.tensor(3.0))
    joined = batcher.split(tail(batcher.concatenate([same, same])), [2, 2])
    torch.testing.assert_close(joined[1]["out"], model(x, scale)["out"])
    with pytest.raises(CannotBatch, match="does not grow with the batch"):
        batcher.concatenate([same, other])


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
    batcher = build_batcher(partial(make_examples, head, Inputs(x)), tail)
    assert batcher is not None
    assert batcher.facts_per_row
    good = head(x)
    assert batcher.key(good) is not None
    for path in batcher.facts_per_row:
        for value in (-1, 0, 1000, "2", None):
            forged = copy.deepcopy(good)
            inside = forged.facts
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = value
            assert batcher.key(forged) is None
    assert batcher.key(mt.Boundary(at, good.fingerprint, {}, {})) is None


def test_a_batch_is_divided_until_that_costs_as_much_as_verifying_it() -> None:
    batcher = Batcher(
        {"x": 1}, {}, frozenset({0}), frozenset(), verdicts={2: None, 3: None, 6: "an output depends on another"}
    )
    assert batcher.divide([1] * 3) == batcher.divide([2, 1, 0]) == [3]
    assert batcher.divide([1] * 8) == [8]
    assert [batcher.divide([1] * 6) for _ in range(20)] == [[4, 2]] * 20
    assert [batcher.divide([1] * 7) for _ in range(5)] == [[4, 2, 1]] * 4 + [[7]]
    batcher.verdicts[7] = None
    assert batcher.divide([1] * 7) == [7]


@torch.no_grad()
def test_like_requests_share_a_key_that_is_made_once() -> None:
    model, x = small()
    cut = mt.cuts(model, x)[6]
    head, tail = mt.split(model, x, at=cut)
    batcher = build_batcher(partial(make_examples, head, Inputs(x)), tail)
    assert batcher is not None
    one, other, twice = (
        mt.Boundary.from_bytes(head(each).to_bytes()) for each in (x, torch.randn_like(x), torch.cat([x, x]))
    )
    assert batcher.key(one) is batcher.key(other) is not None
    assert batcher.key(twice) == batcher.key(one)
    assert one.record is other.record is not None
    assert one.record is not twice.record
    forged = other.with_tensors({name: torch.cat([tensor, tensor]) for name, tensor in other.tensors.items()})
    assert batcher.key(forged) is None


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
    served = ServedModel(model, (torch.randn(1, 4), torch.randn(1, 4)))

    def key(*given: Tensor) -> str | None:
        return served.batch_key(served._pack_inputs(*given))

    assert key(torch.randn(2, 4), torch.randn(2, 4)) == key(torch.randn(3, 4), torch.randn(3, 4)) is not None
    assert key(torch.randn(2, 4), torch.randn(1, 4)) is None
    assert key(torch.randn(1, 4), torch.randn(2, 4)) is None


@pytest.mark.parametrize("example", [torch.zeros(1, 4), torch.ones(2, 4)])
def test_an_example_that_is_the_same_turned_round_still_shows_that_rows_are_mixed(example: Tensor) -> None:
    served = ServedModel(Normalised().eval(), example)
    assert served.batch_key(served._pack_inputs(example)) is None


def test_an_example_of_which_no_other_is_known_is_not_joined() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2)).eval()
    for example, joins in ((torch.tensor([[0, 1, 2]]), True), (torch.tensor([[1, 1, 1]]), False)):
        served = ServedModel(model, example)
        assert (served.batch_key(served._pack_inputs(example)) is not None) is joins


Function = Callable[[Tensor], Tensor]


#: Ways to return pixels beside scores: outputs of several scales.
SCALES: dict[str, Callable[[Tensor], Any]] = {
    "one": lambda y: y,
    "a dict": lambda y: {"boxes": y * 1e5, "scores": y},
    "a list": lambda y: [y, y * 1e-5],
    "a number": lambda y: {"sum": y.sum(1), "constant": torch.tensor(2.0)},
    "columns": lambda y: torch.cat([y * 1e5, y], 1),
    "channels": lambda y: torch.stack([y * 1e6, y, y * 1e-3], 1),
    "images": lambda y: torch.stack([y * 1e6, y], -1)[:, None].expand(-1, 3, -1, -1),
}


class Between(nn.Module):
    """Two layers with functions between."""

    def __init__(self, *functions: Function, finish: Callable[[Tensor], Any] = SCALES["one"]) -> None:
        super().__init__()
        self.finish = finish
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.functions = functions

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        for function in self.functions:
            y = function(y)
        return self.finish(self.last(y))


#: Those after which a row still depends on itself alone.
APART: dict[str, Function] = {
    "relu": torch.relu,
    "softmax": lambda y: y.softmax(-1),
    "own peak": lambda y: y / y.abs().amax(-1, keepdim=True),
    "turned": lambda y: y.flip(-1),
    "merged": lambda y: y.view(-1, 2).tanh().view(-1, 4),
    "in place": lambda y: y.clone().add_(1).mul_(2),
    "masked": lambda y: y.masked_fill(y > 0, 0.5),
    "sorted": lambda y: y.sort(-1)[0],
    "outer": lambda y: (y[:, :, None] @ y[:, None]).sum(-1),
}
#: Those that let a request reach another.
MIXING: dict[str, Function] = {
    "peak": lambda y: y / y.abs().max(),
    "norm": lambda y: y / y.norm(),
    "mean": lambda y: y - y.mean(0),
    "cumulative": lambda y: y.cumsum(0),
    "sorted": lambda y: y.sort(0)[0],
    "flipped": lambda y: y.flip(0),
    "batch norm": lambda y: nn.functional.batch_norm(torch.cat([y, -y]), None, None, training=True)[: len(y)],
    "branch": lambda y: y if y.max() < 1e6 else -y,
    "tolist": lambda y: y if max(y[:, 0].tolist()) < 1e6 else -y,
    "threshold": lambda y: torch.where(y.max() > 1e6, -y, y),
    "any": lambda y: y + (y > 1e30).any(),
    "unique": lambda y: y * (1.0 + len(y.round().unique()) // 100),
    "quantised": lambda y: (y / (y.abs().max() / 127)).round() * (y.abs().max() / 127),
    "weights of the batch": lambda y: y.softmax(0),
    "batch size": lambda y: (y + 1) / len(y),
}


def joins(model: nn.Module, x: Tensor, at: str = "first") -> bool:
    served = ServedModel(model.eval(), x)
    with torch.no_grad():
        boundary = served._pack_inputs(x) if not at else mt.split(model, x, at=at)[0](x)
    return served.batch_key(boundary) is not None


@pytest.mark.parametrize("at", ["first", ""])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_lets_requests_reach_each_other_is_not_joined(name: str, rows: int, at: str) -> None:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    assert not joins(Between(MIXING[name]), x, at)


@settings(max_examples=25)
@given(
    apart=st.lists(st.sampled_from([*APART]), max_size=4),
    mixing=st.lists(st.sampled_from(sorted(MIXING)), max_size=1),  # two may cancel out
    data=st.data(),
    rows=st.integers(1, 3),
    others=st.sampled_from([1, 7, 8]),
    scale=st.sampled_from([1e-3, 1.0, 1e3, torch.inf, torch.nan]),
    scales=st.sampled_from([*SCALES]),
)
def test_a_model_is_joined_if_and_only_if_no_request_reaches_another(
    apart: list[str], mixing: list[str], data: st.DataObject, rows: int, others: int, scale: float, scales: str
) -> None:
    functions = [APART[name] for name in apart]
    for name in mixing:  # a factor is undone by what may follow
        place = len(apart) if name == "batch size" else data.draw(st.integers(0, len(apart)))
        functions.insert(place, MIXING[name])
    model = Between(*functions, finish=SCALES[scales]).eval()
    x, own, *strangers = torch.randn(2 + others, rows, 4, generator=torch.Generator().manual_seed(0))
    served = ServedModel(model, x)
    joined = served.batch_key(served._pack_inputs(x)) is not None
    assert joined is not bool(mixing)
    if joined:
        beside = [served._pack_inputs(given) for given in (own, *(stranger * scale for stranger in strangers))]
        calm = [served._pack_inputs(given) for given in (own, *strangers)]
        answer = list(tensors_in(served.compute(calm)[0]))
        assert all(map(torch.equal, tensors_in(served.compute(beside)[0]), answer))
        alone = tensors_in(model(own))
        assert all(torch.allclose(one, other, rtol=1e-4, atol=0.0) for one, other in zip(answer, alone, strict=True))


#: Those that make an answer depend on the number of rows, or on its place among them.
COUNTING: dict[str, Function] = {
    "share": lambda y: y / len(y),
    "place": lambda y: y + torch.arange(len(y))[:, None],
    "small share": lambda y: y * (1 + 1e-2 / len(y)),
    "small place": lambda y: y + 1e-2 * torch.arange(len(y))[:, None],
}


#: Ways to return a large output beside a small one.
PAIRS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a dict": lambda large, small: {"large": large, "small": small},
    "a list": lambda large, small: [small, large],
    "columns": lambda large, small: torch.cat([large, small], 1),
    "channels": lambda large, small: torch.stack([large, small], 1),
    "images": lambda large, small: torch.stack([large, small], -1)[:, None].expand(-1, 3, -1, -1),
    "complex": torch.complex,
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", COUNTING)
def test_a_large_output_does_not_hide_what_the_batch_does_to_a_small_one(name: str, pair: str) -> None:
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    assert not joins(Between(finish=lambda y: PAIRS[pair](y * 1e6, COUNTING[name](y))), x)
    assert joins(Between(finish=lambda y: PAIRS[pair](y * 1e6, y)), x)


@pytest.mark.parametrize("kind", ["inf", "integers", "text"])
def test_what_is_not_a_finite_number_is_compared_exactly(kind: str) -> None:
    def give(y: Tensor, count: int) -> Any:
        several: dict[str, Any] = {
            "inf": y.masked_fill(y > 0, torch.inf if count == 1 else 1e30),
            "integers": (y * 4).long() * 1_000_000 + count,
            "text": [y, f"{count}"],
        }
        return several[kind]

    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    assert not joins(Between(finish=lambda y: give(y, len(y))), x)
    assert joins(Between(finish=lambda y: give(y, 1)), x)


def test_a_stranger_neither_moves_an_answer_nor_reads_from_it() -> None:
    model, x = Between(MIXING["peak"]).eval(), torch.randn(1, 4)
    with (
        mt.serve(model, x, listen="127.0.0.1:0", batch=4, batch_window="1s") as server,
        mt.connect(model, x, server.address, at="first", codec="raw") as remote,
        torch.no_grad(),
    ):
        items = [x * scale for scale in (1.0, 100.0, 0.01, 1.0)]
        for own, result in zip(items, remote.stream(items, window=4), strict=True):
            assert result.equal(model(own))


def test_a_number_of_rows_at_which_the_model_does_something_else_is_not_joined() -> None:
    model, x = Between(lambda y: y if len(y) < 4 else y - y.mean(0)).eval(), torch.randn(1, 4)
    served = ServedModel(model, x)
    requests = [served._pack_inputs(torch.randn(1, 4)) for _ in range(5)]
    assert len({served.batch_key(request) for request in requests}) == 1
    assert len(served.compute(requests[:3])) == 3
    with pytest.raises(CannotBatch, match="5 rows are not computed together"):
        served.compute(requests)


@pytest.mark.parametrize("rows", [8, 9])
@pytest.mark.parametrize("name", [*MIXING, "small peak"])
def test_requests_that_reach_each_other_in_a_larger_batch_alone_are_not_joined_there(name: str, rows: int) -> None:
    def mix(y: Tensor) -> Tensor:
        return y + 1e-5 * y.max() if name == "small peak" else MIXING[name](y)

    served = ServedModel(Between(lambda y: y if len(y) < 8 else mix(y)).eval(), torch.randn(1, 4))
    requests = [served._pack_inputs(torch.randn(1, 4)) for _ in range(rows)]
    assert len(served.compute(requests[:7])) == 7
    for _ in range(2):  # also where the answer is known
        with pytest.raises(CannotBatch, match=f"{rows} rows are not computed together: "):
            served.compute(requests)


@pytest.mark.parametrize("rows", [8, 9, 71])
@pytest.mark.parametrize("name", APART)
def test_a_stranger_in_a_larger_batch_does_not_move_an_answer(name: str, rows: int) -> None:
    served = ServedModel(Between(APART[name]).eval(), torch.randn(1, 4, generator=torch.Generator().manual_seed(0)))
    own, *others = (served._pack_inputs(torch.randn(1, 4)) for _ in range(rows))
    calm = served.compute([own, *others])[0]
    torch.testing.assert_close(calm, served.compute([own])[0])
    for scale in (1e-6, 1e6, torch.inf, torch.nan):
        strangers = [served._pack_inputs(torch.randn(1, 4) * scale) for _ in others]
        assert served.compute([own, *strangers])[0].equal(calm)


@pytest.mark.parametrize("far", [1, 6, 70, 71])
def test_requests_are_told_apart_however_many_there_are(far: int) -> None:
    """From 72 rows on, adds to each row the one `far` rows before it."""
    model = Between(lambda y: y if len(y) < 72 else y + 1e-9 * y.roll(far, 0)).eval()
    served = ServedModel(model, torch.randn(1, 4))
    requests = [served._pack_inputs(torch.randn(1, 4)) for _ in range(72)]
    with pytest.raises(CannotBatch, match="does not depend on that request alone"):
        served.compute(requests)


def test_a_number_of_rows_at_which_a_request_alone_is_something_else_is_not_joined() -> None:
    served = ServedModel(Between(lambda y: -y if len(y) == 5 else y).eval(), torch.randn(1, 4))
    requests = [served._pack_inputs(torch.randn(rows, 4)) for rows in (5, 4)]
    with pytest.raises(CannotBatch, match="5 rows are not computed together: the outputs of the batch differ"):
        served.compute(requests)


def test_rows_that_belong_together_are_joined_in_whole_groups() -> None:
    pairs = Between(lambda y: y.view(-1, 2, 4).sub(y.view(-1, 2, 4).mean(1, keepdim=True)).view(-1, 4)).eval()
    served = ServedModel(pairs, torch.randn(2, 4))
    assert served.batch_key(served._pack_inputs(torch.randn(4, 4))) is not None
    assert served.batch_key(served._pack_inputs(torch.randn(3, 4))) is None


def test_why_requests_are_computed_one_by_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "microtome.remote"):
        joins(Between(MIXING["mean"]), torch.randn(1, 4))
        joins(Between(MIXING["branch"]), torch.randn(1, 4))
    assert "does not depend on that request alone" in caplog.text
    assert "reads values into Python" in caplog.text


def test_batches_of_a_server_that_cannot_verify_them_are_refused() -> None:
    model, x = small()
    stage = mt.split(model, x, at="layer1")[1]
    with pytest.raises(BadQuery, match="expected batch=1 for a stage, got 8: .* Serve the whole model"):
        mt.serve(stage, listen="127.0.0.1:0", batch=8)
    with pytest.raises(BadQuery, match="expected no concurrency= and no batch= of a server that trains"):
        mt.serve(model, x, listen="127.0.0.1:0", batch=8, optimizer=torch.optim.Adam)
    with pytest.raises(BadQuery, match="expected a batch of 1 or more requests, got True"):
        mt.serve(model, x, listen="127.0.0.1:0", batch=True)


def test_inputs_with_a_stage_are_refused() -> None:
    model, x = small()
    stage = mt.split(model, x, at="layer1")[1]
    for inputs in ("nonsense", x):
        with pytest.raises(BadQuery, match="expected no inputs with a stage, which has its example, got"):
            mt.serve(stage, inputs, listen="127.0.0.1:0")
