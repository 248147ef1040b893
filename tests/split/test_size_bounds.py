"""A boundary may state no more for tensors that it does not hold than what it holds explains."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import BadBoundary
from microtome.split.boundary.boundary import Boundary

#: What reading may take: little beside what the attacks state.
LIMIT = "1MB"
#: What each attack states, in bytes.
STATED = 64 << 20


class Likeness(nn.Module):
    """Its tail allocates what has the shape of an input that does not cross."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.stem(x).mean((2, 3)))
        return y + torch.ones_like(x).mean() + torch.arange(x.shape[-1]).sum()


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu(), torch.cat([x, x])


class Unread(nn.Module):
    """Its tail reads the shape alone of what a call before the cut returns."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Two()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.both(x)
        y: Tensor = self.last(one)
        return y + torch.zeros_like(other).sum()


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:]


class Viewed(nn.Module):
    """A call before the cut returns a view of an argument that is written into after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.rows = Rows()
        self.last = nn.Linear(7, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        part = self.rows(y)
        z: Tensor = self.last(part)
        y.add_(1)
        return z + part.sum() + y.sum()


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y[:, :4], y[:, 2:]


class Joined(nn.Module):
    """Two values in one memory cross, and one of them is written into."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = Halves()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.halves(x)
        y: Tensor = self.last(x)
        left.mul_(2)
        return y + right.sum() + left.sum()


class Draws(nn.Module):
    """It draws before the cut what only the shape is read of afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        y: Tensor = self.first(x)
        return y + torch.ones_like(noise).sum()


class Gathers(nn.Module):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(x.cos())
        return x.sin()


class Gathering(nn.Module):
    """A call before the cut puts into a list what only the shape is read of."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = Gathers()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        y: Tensor = self.last(self.gathers(x, kept))
        return y + torch.zeros_like(kept[0]).sum()


class Spread(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand(x.shape)


class Expanded(nn.Module):
    """A broadcast tensor, of stride 0, crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = Spread()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.spread(x))
        return y


IMAGE = torch.linspace(-1, 1, 3 * 8 * 8).view(1, 3, 8, 8)
FLAT = torch.linspace(-1, 1, 16).view(2, 8)
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "input": (Likeness, IMAGE, "stem"),
    "output": (Unread, FLAT, "both"),
    "view": (Viewed, FLAT, "rows"),
    "joined": (Joined, FLAT, "halves"),
    "draw": (Draws, FLAT, "first"),
    "list": (Gathering, FLAT, "gathers"),
    "expanded": (Expanded, FLAT, "spread"),
}


def halves(name: str) -> tuple[nn.Module, Tensor, Any, Any]:
    torch.manual_seed(0)
    make, x, at = MODELS[name]
    model = make().eval()
    head, tail = mt.split(model, x, at=at)
    return model, x, head, tail


def items_of(facts: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Where the facts state a shape: the container, and the key in it."""
    holders: list[Any] = [facts["inputs"]["tensors"], *(draw["outputs"] for draw in facts.get("draws", ()))]
    for call in facts["calls"]:
        holders += [call["outputs"], *(container["items"] for container in call.get("containers", ()))]
    for holder in holders:
        yield from ((holder, key) for key in range(len(holder)) if "shape" in holder[key])
    yield from (
        (item, "tensor") for call in facts["calls"] for item in call.get("written", ()) if "shape" in item["tensor"]
    )


def placeholder_of_output(boundary: Boundary) -> dict[str, Any]:
    (found,) = (item for item in boundary.facts["calls"][0]["outputs"] if item["kind"] == "placeholder")
    assert isinstance(found, dict)
    return found


def forged(item: Any) -> Iterator[Any]:
    """The same with other shapes, each of 64 MiB: by one dimension, by two, by a stride, by a dimension beside 0."""
    shapes = [[STATED // 4], [STATED >> 10, 1 << 8], [0, STATED // 4]]
    if item["kind"] == "placeholder":
        yield from ({**item, "shape": shape, "strides": None} for shape in shapes)
        yield from ({**item, "shape": shape, "strides": [0] * len(shape)} for shape in shapes)
        yield {**item, "shape": [2], "strides": [STATED // 4]}
    else:
        yield from ({**item, "shape": shape, "strides": [0] * len(shape), "offset": 0} for shape in shapes)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in MODELS if name != "expanded"])
def test_no_placeholder_and_no_view_states_more_than_what_was_sent_explains(name: str) -> None:
    _, x, head, tail = halves(name)
    boundary = head(x)
    places = len(list(items_of(boundary.facts)))
    assert places
    for place in range(places):
        for number in range(7):
            facts = copy.deepcopy(boundary.facts)
            holder, key = list(items_of(facts))[place]
            variants = list(forged(holder[key]))
            if number >= len(variants):
                break
            holder[key] = variants[number]
            data = replace(boundary, facts=facts).to_bytes()
            with pytest.raises(
                BadBoundary, match=r"states shape .* expected at most .* Split both sides on an example"
            ):
                tail(Boundary.from_bytes(data, limit=LIMIT))
    assert tail(Boundary.from_bytes(boundary.to_bytes(), limit=LIMIT)).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_other_batches_than_the_examples_cross_exactly(name: str, rows: int) -> None:
    model, x, head, tail = halves(name)
    other = torch.linspace(-2, 2, rows * math.prod(x.shape[1:])).view(rows, *x.shape[1:])
    torch.manual_seed(1)
    whole = model(other)
    torch.manual_seed(1)
    sent = Boundary.from_bytes(head(other).to_bytes(), limit="64MB")
    assert tail(sent).equal(whole)


@torch.no_grad()
def test_inputs_of_another_length_cross_exactly() -> None:
    model, _, head, tail = halves("input")
    image = torch.linspace(-2, 2, 3 * 96 * 64).view(1, 3, 96, 64)
    assert tail(Boundary.from_bytes(head(image).to_bytes(), limit=LIMIT)).equal(model(image))


@torch.no_grad()
def test_a_boundary_of_this_process_may_state_anything() -> None:
    _, x, head, tail = halves("output")
    boundary = head(x)
    item = placeholder_of_output(boundary)
    item["shape"] = [1 << 20]
    assert boundary.spare_bytes is None
    assert tail(boundary).shape == x.shape


@torch.no_grad()
@pytest.mark.parametrize("shape", ["ab", [-1, 2], [2.0], [True, 2], [2**62], None, [[1]]])
def test_a_shape_that_no_tensor_has_is_refused(shape: Any) -> None:
    _, x, head, tail = halves("output")
    boundary = head(x)
    item = placeholder_of_output(boundary)
    item["shape"] = shape
    with pytest.raises(BadBoundary, match=r"invalid boundary facts: facts.calls\[0\].outputs\[.\].*:"):
        tail(Boundary.from_bytes(boundary.to_bytes()))


@torch.no_grad()
def test_as_many_strides_as_dimensions_are_expected() -> None:
    _, x, head, tail = halves("output")
    boundary = head(x)
    item = placeholder_of_output(boundary)
    item["strides"] = [1]
    with pytest.raises(BadBoundary, match=r"facts.calls\[0\].outputs\[.\]: no tensor is .* strides=\[1\]"):
        tail(Boundary.from_bytes(boundary.to_bytes()))


def test_the_dimensions_of_an_empty_tensor_count_against_the_limit() -> None:
    data = Boundary("a", "f", {"t": torch.empty(0, 1 << 20)}, {}).to_bytes()
    with pytest.raises(BadBoundary, match=r"decoding the boundary may take .* of memory, and the limit is"):
        Boundary.from_bytes(data, limit="1MB")
    assert Boundary.from_bytes(data, limit="8MB").tensors["t"].shape == (0, 1 << 20)


@pytest.mark.parametrize("codec", ["raw", "zstd", "lz4", "int8", "int8+zstd"])
def test_tensors_have_at_most_so_many_bytes_whatever_they_are_compressed_to(codec: str) -> None:
    data = Boundary("a", "f", {"t": torch.zeros(1 << 18), "u": torch.zeros(4)}, {}).to_bytes(codec)
    with pytest.raises(BadBoundary, match=r"expected at most 1.00 MiB of tensors .* got 1.00 MiB: .*raise max_message"):
        Boundary.from_bytes(data, limit="64MB", max_tensor_bytes=1 << 20)
    assert Boundary.from_bytes(data, limit="64MB", max_tensor_bytes=(1 << 20) + 16).nbytes == (1 << 20) + 16
