"""Counts are the same on meta tensors as on real ones, call by call, whatever the values of masks and tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import microtome as mt
from benchmarks.split_zoo.models import Entry, build, entries

ENTRIES = {entry.name: entry for entry in entries() if entry.family == "transformers"}
SOME = ("albert", "bart", "bert", "canine", "gemma3_text", "gpt2", "llama", "mixtral", "openai_privacy_filter", "t5")


def counts(model: nn.Module, inputs: Any, fake: bool | None) -> dict[str, tuple[int | None, int | None]]:
    with torch.no_grad():
        p = mt.profile(model, inputs, fake=fake)
    return {row.address: (row.own.macs, row.own.flops) for row in p.calls}


@cache
def made(entry: Entry) -> tuple[nn.Module, Any]:
    model, inputs = build(entry)
    return model, inputs[1]


def masks(model: nn.Module, inputs: mt.Inputs) -> Iterator[mt.Inputs]:
    """The inputs without a mask, with one that masks nothing, and with one that masks the first three tokens."""
    yield inputs
    ids = inputs.kwargs.get("input_ids")
    if ids is None or "attention_mask" not in inspect.signature(model.forward).parameters:
        return
    mask = torch.ones_like(ids)
    yield mt.Inputs(**inputs.kwargs, attention_mask=mask)
    mask = mask.clone()
    mask[0, :3] = 0
    yield mt.Inputs(**inputs.kwargs, attention_mask=mask)


#: They make CPU tensors in their forward, so that they are counted on fake tensors, and ask whether masks are fake.
ON_FAKE = ("big_bird", "bigbird_pegasus", "longt5")
#: With these small sizes they do not take a mask themselves.
NO_MASK = ("glm4_moe_lite", "mistral4")


def check(entry: Entry) -> None:
    model, inputs = made(entry)
    for given in [inputs] if entry.name in NO_MASK else masks(model, inputs):
        assert counts(model, given, None) == counts(model, given, False)


@pytest.mark.parametrize("name", SOME)
def test_models_of_transformers_count_the_same_with_and_without_values(name: str) -> None:
    pytest.importorskip("transformers")
    check(ENTRIES[name])


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason="see docs/limits.md") if name in ON_FAKE else ())
        for name in sorted({*ENTRIES} - {*SOME})
    ],
)
def test_every_model_of_transformers_counts_the_same_with_and_without_values(name: str) -> None:
    pytest.importorskip("transformers")
    check(ENTRIES[name])


class Branches(nn.Module):
    """Goes by what its mask and its tokens hold, in all the ways that code reads a tensor."""

    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 4)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("order", torch.arange(8))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        if mask.all():
            x = self.layer(x)
        kept = mask.clone()
        kept[:, 0] = 0  # through a view
        for length in kept.sum(-1).tolist():
            x = self.layer(x[:, : max(length, 1)])
        if int(kept.argmax()) > 1:
            x = self.layer(x)
        kept.masked_fill_(ids[:, : kept.shape[1]] > 100, 7)
        for at in kept.nonzero()[:3]:
            x = self.layer(x) + at.sum()
        for _ in range(int(self.order[int(kept[0, -1].item()) + 1])):
            x = self.layer(x)
        return x.sum() + F.one_hot(ids, 20).sum()


@pytest.mark.parametrize("mask", [[[1, 1, 1], [1, 1, 1]], [[0, 0, 1], [1, 1, 1]], [[1, 0, 0], [0, 0, 1]]])
def test_branches_on_integers_are_those_of_the_real_run(mask: list[list[int]]) -> None:
    inputs = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor(mask)
    with torch.no_grad():
        assert mt.trace(Branches(), inputs).how.tensor_mode == "meta"
    assert counts(Branches(), inputs, None) == counts(Branches(), inputs, False)


def test_integers_from_unknown_values_are_unknown() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            at = at.clone()
            at[0] = x.argmax()  # written over with what is not known
            return x * 2 if at[0] == 3 else x

    inputs = torch.tensor([1.0, 2, 3, 9]), torch.tensor([3])
    t = mt.trace(Chosen(), inputs)
    assert t.how.tensor_mode == "real"
    assert "not on meta tensors" in t.how.why


class OneHot(nn.Module):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        for _ in range(int(F.one_hot(at, 8).sum())):  # a function shown whole, which makes its output unseen
            x = x * 2
        return x


class Empty(nn.Module):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        counts = torch.empty(at.shape, dtype=torch.int64, device=at.device)
        torch.add(at, 1, out=counts)
        for _ in range(int(counts.sum())):
            x = x * 2
        return x


@pytest.mark.parametrize("model", [OneHot(), Empty()], ids=["one_hot", "empty"])
def test_memory_without_values_is_unknown(model: nn.Module) -> None:
    inputs = torch.ones(4), torch.tensor([3, 1, 2])
    assert counts(model, inputs, None) == counts(model, inputs, False)


@pytest.mark.parametrize("fake", [None, True, False])
def test_choosing_by_one_hot_costs_nothing_in_every_mode(fake: bool | None) -> None:
    class Chosen(nn.Module):
        def forward(self, at: Tensor) -> Tensor:
            return F.one_hot(at, 100)

    p = mt.profile(Chosen(), torch.randint(0, 100, (64,)), fake=fake, strict=True)
    assert p.total.flops == 0


def test_the_users_tensors_are_not_written_to() -> None:
    class Writes(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

        def forward(self, ids: Tensor) -> Tensor:
            self.seen += ids
            ids.zero_()
            return self.seen * int(self.seen.sum())

    net, ids = Writes(), torch.tensor([1, 2, 3])
    t = mt.trace(net, ids)
    assert t.how.tensor_mode == "meta"
    assert net.seen.tolist() == [0, 0, 0]
    assert ids.tolist() == [1, 2, 3]
