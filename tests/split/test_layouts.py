"""What crosses keeps its strides and its alignment, by which kernels round: over bytes, in copies, between devices."""

from __future__ import annotations

import enum
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import BadBoundary, NoMatch
from microtome.split.boundary.tensor_bytes import duplicate, moved
from tests.split.test_stages import same

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaps between rows": lambda x: x[..., :39],
    "gaps between elements": lambda x: x[..., ::2],
    "one of each row": lambda x: x[:, 0],
    "expanded": lambda x: x[:1].expand(7, -1, -1),
    "overlapping windows": lambda x: x.unfold(-1, 5, 2),
    "dense and unaligned": lambda x: x.flatten()[1:],
    "transposed with gaps": lambda x: x.transpose(1, 2)[..., 1:],
    "permuted": lambda x: x.permute(2, 0, 1),
}


class Part(nn.Module):
    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Reduce(nn.Module):
    """Sums and products, each of which rounds by how its input lies."""

    def __init__(self, part: Callable[[Tensor], Tensor], x: Tensor) -> None:
        super().__init__()
        self.part = Part(part)
        self.linear = nn.Linear(part(x).shape[-1], 17)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.part(x)
        return self.linear(y), y.sum(-1), y.mean(), y.reshape(-1).sum(), y.softmax(-1), torch.linalg.vector_norm(y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_the_tail_is_bit_equal_over_bytes_however_a_tensor_lies(layout: str, codec: str) -> None:
    x = torch.randn(7, 33, 40, generator=torch.Generator().manual_seed(0))
    net = Reduce(LAYOUTS[layout], x).eval()
    with torch.no_grad():
        head, tail = mt.split(net, x, at="part")
        assert same(tail(mt.Boundary.from_bytes(head(x).to_bytes(codec))), net(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_lie_as_the_original(layout: str, device: str) -> None:
    tensor = LAYOUTS[layout](torch.randn(7, 33, 40))
    for copy in (duplicate(tensor), moved(tensor, device)):
        assert torch.equal(copy.cpu(), tensor)
        assert copy.stride() == tensor.stride()
        assert copy.data_ptr() % 64 == tensor.data_ptr() % 64
    assert duplicate(tensor).data_ptr() != tensor.data_ptr()
    assert moved(tensor, "cpu") is tensor


class Numbered(nn.Module):
    def __init__(self, number: object) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        return x + 1, self.number


class Painted(nn.Module):
    def __init__(self, number: object) -> None:
        super().__init__()
        self.first, self.last = Numbered(number), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        y, number = self.first(x)
        return self.last(y), number


def test_verification_goes_through_bytes() -> None:
    with pytest.raises(BadBoundary, match=r"cannot be encoded as JSON"):
        mt.split(Painted(10**5000), torch.ones(1, 4), at="first")


class Colour(enum.IntEnum):
    RED = 1


class Kilo(int):
    """A number that would arrive as an int."""


def test_a_member_of_an_enum_crosses_as_itself() -> None:
    net, x = Painted(Colour.RED), torch.ones(1, 4)
    head, tail = mt.split(net, x, at="first")
    _, number = tail(mt.Boundary.from_bytes(head(x).to_bytes()))
    assert number is Colour.RED


def test_a_number_of_a_class_of_its_own_is_refused() -> None:
    with pytest.raises(NoMatch, match=r"'first' runs in the head, and it returns a Kilo, which is no tensor, number"):
        mt.split(Painted(Kilo(3)), torch.ones(1, 4), at="first")


class Quantize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


class Dequantize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.dequantize()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch deprecates quantized dtypes
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_quantized_tensor_may_stay_before_the_cut(layout: torch.memory_format) -> None:
    model = nn.Sequential(nn.ReLU(), Quantize(), Dequantize(), nn.ReLU())
    x = torch.randn(2, 3, 4, 5).to(memory_format=layout)
    head, tail = mt.split(model, x, at="2")
    assert torch.equal(tail(mt.Boundary.from_bytes(head(x).to_bytes())), model(x))
