"""Which sources each element of a run depends on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from microtome.engine.dependence import Dependence, Untraceable

torch.manual_seed(0)
CONV = nn.Conv2d(4, 4, 3, padding=1)
NORM = nn.BatchNorm2d(4).eval()
LINEAR = nn.Linear(8, 8)
ATTENTION = nn.MultiheadAttention(8, 2, batch_first=True).eval()
ENCODER = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
LSTM = nn.LSTM(8, 8, batch_first=True)
TABLE = torch.randn(2, 3)

Function = Callable[[Tensor], Tensor]

APART: dict[str, Function] = {
    "convolution": CONV,
    "batch norm in eval": NORM,
    "linear": LINEAR,
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "group norm": lambda x: F.group_norm(x, 2),
    "max pooling": lambda x: F.max_pool2d(x, 2),
    "average pooling": lambda x: F.adaptive_avg_pool2d(x, 1),
    "softmax": lambda x: x.softmax(-1),
    "attention": lambda x: ATTENTION(x[:, 0], x[:, 0], x[:, 0])[0],
    "fused attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "encoder": lambda x: ENCODER(x[:, 0]),
    "lstm": lambda x: LSTM(x[:, 0])[0],
    "product of rows with themselves": lambda x: x.flatten(2).transpose(1, 2) @ x.flatten(2),
    "rows merged and parted": lambda x: LINEAR(x.reshape(12, 8, 8)).view(3, 4, 8, 8),
    "in place": lambda x: x.add_(1).relu_(),
    "written through a view": lambda x: x[:, :2].mul_(x[:, 2:]).new_zeros(x.shape).copy_(x),
    "topk of each": lambda x: x.topk(2, -1)[0],
    "concatenated": lambda x: torch.cat([x, x[:, :1]], 1),
    "rolled inside": lambda x: x.roll(1, 2),
    "interpolated": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "cumulative": lambda x: x.cumsum(1),
    "masked": lambda x: x.masked_fill(x > 0, 0),
    "peak of each": lambda x: x / x.abs().amax((1, 2, 3), keepdim=True),
    "batch second": lambda x: x[:, 0].transpose(0, 1).contiguous().transpose(0, 1),
    "embedding": lambda x: F.embedding((x.flatten(1) > 0).long(), TABLE),
    "as complex numbers": lambda x: torch.view_as_real(torch.fft.fft(x)),
}

COMBINED: dict[str, Function] = {
    "peak": lambda x: x / x.abs().max(),
    "mean": lambda x: x - x.mean(0),
    "in place": lambda x: x.sub_(x.mean()),
    "batch norm in training": nn.BatchNorm2d(4),
    "threshold that the example does not reach": lambda x: torch.where(x.max() > 1e9, x, x + 1),
    "any, never so on the example": lambda x: x + (x > 1e9).any(),
    "all, always so on the example": lambda x: x * (x < 1e9).all(),
    "count": lambda x: x * ((x > 100).sum() > 5),
    "sorted": lambda x: x.sort(0)[0],
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "cumulative": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "first": lambda x: x + x[:1],
    "last to first": lambda x: torch.cat([x[:1] + x[-1:], x[1:]]),
    "gram": lambda x: x.flatten(1) @ x.flatten(1).T,
    "product with zeros": lambda x: x + x.relu().prod(0),
    "quantised": lambda x: torch.fake_quantize_per_tensor_affine(
        x, x.abs().max() / 127, torch.tensor(0, dtype=torch.int32), -128, 127
    ),
    "longest row": lambda x: x * (x.flatten(1).sum(1).argmax() == 0),
    "through a view": lambda x: x.view(1, -1).cumsum(1).view(x.shape),
}

READ: dict[str, Function] = {
    "a branch": lambda x: x if x.max() < 1e9 else -x,
    "tolist": lambda x: x * len(x.sum(1).tolist()),
    "numpy": lambda x: torch.from_numpy(x.numpy() * 2),
    "unique": lambda x: x + len(x.unique()),
    "nonzero": lambda x: x + len(x.nonzero()),
    "a mask": lambda x: x + x[x > 0].sum(),
}


def labels(function: Function) -> Tensor:
    x = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), Dependence() as dependence:
        for at, row in enumerate(x):
            dependence.mark(row, 1 << at)
        output = function(x)
    return dependence.labels(output)


@pytest.mark.parametrize("name", APART)
def test_each_row_depends_on_itself_alone(name: str) -> None:
    for at, row in enumerate(labels(APART[name])):
        assert row.unique().tolist() == [1 << at]


@pytest.mark.parametrize("name", COMBINED)
def test_a_dependence_between_rows_is_found(name: str) -> None:
    assert any((row & ~(1 << at) & 7).any() for at, row in enumerate(labels(COMBINED[name])))


@pytest.mark.parametrize("name", READ)
def test_values_read_into_python_are_refused(name: str) -> None:
    with pytest.raises(Untraceable, match="reads values into Python"):
        labels(READ[name])


def test_integers_that_are_all_the_same_are_not_tried_as_indices() -> None:
    with pytest.raises(Untraceable, match="one value in all elements"):
        labels(lambda x: F.embedding((x.flatten(1) > 1e9).long(), TABLE))


def test_what_depends_on_nothing_has_no_label() -> None:
    assert not labels(lambda x: torch.ones(3, 2) + torch.zeros_like(x[:, 0, 0, :2])).any()


def test_the_random_state_and_the_argument_stay_as_they_are() -> None:
    before, x = torch.get_rng_state(), torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    was = x.clone()
    with Dependence() as dependence:
        dependence.mark(x, 1)
        x.sort(0)
    assert torch.get_rng_state().equal(before)
    assert x.equal(was)
