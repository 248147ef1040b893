"""The sizes that stages as graphs accept, and the conditions on them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import MicrotomeError
from microtome.split.graph.size_conditions import find_unmet
from microtome.split.graph.stage_graph import capture_stage


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Strided(nn.Module):
    """What crosses has sizes such as `s1//4`, on which the tail decides."""

    def __init__(self, decision: str) -> None:
        super().__init__()
        self.first, self.second, self.decision = nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, 4, 1), decision

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.decision == "wide" and y.shape[-1] > 6:
            y = y * 3
        if self.decision == "padded" and y.shape[-1] % 4:
            y = nn.functional.pad(y, (0, 4 - y.shape[-1] % 4))
        if self.decision == "input" and x.shape[-1] % 8:
            y = y * 3
        output: Tensor = self.second(y)
        return output


@pytest.mark.parametrize(
    ("decision", "condition", "size", "other"),
    [
        ("wide", "s2 > 6", (3, 3, 20, 40), (3, 3, 16, 24)),
        ("padded", "Eq(Mod(s2, 4), 0)", (3, 3, 20, 48), (3, 3, 16, 40)),
    ],
)
def test_a_tail_behind_a_stride_raises_for_sizes_of_another_branch(
    decision: str, condition: str, size: tuple[int, ...], other: tuple[int, ...]
) -> None:
    model = Strided(decision).eval()
    head, tail = mt.split(model, torch.randn(2, 3, 16, 32), at="first")
    graph, compiled = tail.graph(), tail.compile(backend="eager")
    assert graph.meta["shapes"] == "first[s0, 4, s1, s2]"
    assert graph.meta["conditions"] == [condition]
    image = torch.randn(size)
    assert graph(head(image).tensors["first"])["output"].equal(model(image))
    assert compiled(head(image)).equal(model(image))
    with pytest.raises(RuntimeError, match="expected sizes with"):
        graph(head(torch.randn(other)).tensors["first"])
    with pytest.raises(MicrotomeError, match="expected sizes with"):
        compiled(head(torch.randn(other)))


class Interpolates(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.first, self.last, self.options = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), options

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(nn.functional.interpolate(self.first(x), **self.options))
        return output


@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": 2},
        {"scale_factor": 1.5, "mode": "nearest-exact"},
        {"scale_factor": 2, "mode": "bilinear"},
        {"size": (9, 7), "mode": "bicubic", "align_corners": True},
        {"size": (5, 6), "mode": "bilinear", "antialias": True},
        {"scale_factor": 0.7, "mode": "bicubic", "antialias": True},
    ],
    ids=str,
)
def test_interpolations_are_exact_in_graphs(options: dict[str, Any]) -> None:
    model = Interpolates(options).eval()
    head, tail = mt.split(model, torch.randn(2, 3, 16, 16), at="first")
    graph = tail.graph()
    assert (graph.meta["shapes"], graph.meta["verified"]) == ("first[s0, 4, s1, s2]", "bit-equal")
    image = torch.randn(3, 3, 20, 26)
    assert graph(head(image).tensors["first"])["output"].equal(model(image))


def test_capturing_leaves_the_kernels_of_interpolations() -> None:
    ops = torch.ops.aten.upsample_bilinear2d.vec, torch.ops.aten.upsample_bilinear2d.default
    before = [dict(op.py_kernels) for op in ops]
    mt.split(Interpolates({"scale_factor": 2}).eval(), torch.randn(2, 3, 16, 16), at="first")[1].graph()
    assert [op.py_kernels for op in ops] == before


class Padded(nn.Module):
    """Pads as TensorFlow does, by a size that is divided and rounded up."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        missing = max((math.ceil(x.shape[-1] / 2) - 1) * 2 + 3 - x.shape[-1], 0)
        if missing:
            x = nn.functional.pad(x, (0, missing, 0, missing))
        output: Tensor = self.last(self.convolution(x))
        return output


def test_conditions_may_divide_and_round_sizes() -> None:
    model = Padded().eval()
    head, _ = mt.split(model, torch.randn(2, 3, 16, 16), at="convolution")
    graph = head.graph()
    assert any("CeilToInt" in condition for condition in graph.meta["conditions"])
    for size in (3, 3, 20, 22), (3, 3, 16, 17):
        image = torch.randn(size)
        assert graph(image)["convolution"].equal(head(image).tensors["convolution"])


def test_a_size_is_fixed_where_what_crosses_does_not_decide() -> None:
    model = Strided("input").eval()  # 24 and 25 both give 6
    head, tail = mt.split(model, torch.randn(2, 3, 16, 24), at="first")
    graph = tail.graph()
    assert graph.meta["shapes"] == "first[s0, 4, s1, 6]"
    assert graph.meta["static"]["x[3]"] == "the stage from 'first' needs the size, which does not cross the cut"
    image = torch.randn(3, 3, 20, 24)
    assert graph(head(image).tensors["first"])["output"].equal(model(image))


class DecidesInHead(nn.Module):
    """A call before the cut decides on a size that does not cross."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(_Padding(), nn.Conv2d(3, 4, 4, 4)), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x))
        return output


class _Padding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 4 - x.shape[-1] % 4)) if x.shape[-1] % 4 else x


def test_conditions_of_calls_before_the_cut_are_none_of_the_tail() -> None:
    model = DecidesInHead().eval()
    head, tail = mt.split(model, torch.randn(2, 3, 16, 32), at="first")
    assert "Eq(Mod(s2, 4), 0)" in head.graph().meta["conditions"]
    graph = tail.graph()
    assert (graph.meta["shapes"], graph.meta["conditions"]) == ("first[s0, 4, s1, s2]", [])
    image = torch.randn(3, 3, 20, 37)
    assert graph(head(image).tensors["first"])["output"].equal(model(image))


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_programs_of_tails_behind_a_stride_have_any_height_and_width(suffix: str, tmp_path: Path) -> None:
    if suffix == "onnx":
        pytest.importorskip("onnxscript", reason="needs microtome[onnx]")
    model = Strided("wide").eval()
    head, tail = mt.split(model, torch.randn(2, 3, 16, 32), at="first")
    exported = tail.export(tmp_path / f"tail.{suffix}")
    assert exported.metadata["inputs"]["first"]["shape"] == ["s0", "4", "s1", "s2"]
    assert exported.metadata["output_types"]["output"]["shape"] == ["s0", "4", "s1", "s2"]
    image = torch.randn(3, 3, 24, 40)
    output = exported(head(image))
    assert isinstance(output, dict)
    torch.testing.assert_close(output["output"], model(image))
    for size in ((3, 3, 24, 20), (0, 3, 24, 40)):
        with pytest.raises(MicrotomeError, match="expected sizes with s2 > 6|a size s0 of 1 or more, got 0"):
            exported(head(torch.randn(size)))


class Decides(nn.Module):
    def __init__(self, size: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.second, self.size = nn.Linear(4, 4), nn.Linear(4, 4), size

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.shape[: len(self.size)] == self.size:
            y = y.new_ones(1, 1, 4)
        output: Tensor = self.second(y)
        return output


def test_sizes_that_may_be_one_alone_but_not_together() -> None:
    model = Decides((1, 1)).eval()
    head, tail = mt.split(model, torch.randn(2, 3, 4), at="first")
    graph = tail.graph()
    assert graph.meta["conditions"] == ["Max(s0, s1) >= 2"]
    assert list(graph.meta["excluded_ones"]) == ["x[0], x[1]"]
    for size in ((1, 3, 4), (2, 1, 4), (5, 7, 4)):
        x = torch.randn(size)
        assert graph(head(x).tensors["first"])["output"].equal(model(x))
    with pytest.raises(RuntimeError, match=r"expected sizes with Max\(s0, s1\) >= 2"):
        graph(head(torch.randn(1, 1, 4)).tensors["first"])
    sizes, conditions = [["s0", "s1", "4"]], graph.meta["conditions"]
    assert find_unmet(sizes, conditions, [(2, 1, 4)]) is None
    assert find_unmet(sizes, conditions, [(1, 1, 4)]) == "sizes with Max(s0, s1) >= 2, got s0 = 1, s1 = 1"


def test_a_symbol_stands_for_one_or_more() -> None:
    model = Decides((0,)).eval()
    head, tail = mt.split(model, torch.randn(2, 3, 4), at="first")
    empty: Any = head(torch.randn(0, 3, 4))
    graph = tail.graph()
    assert graph.meta["conditions"] == []
    with pytest.raises(RuntimeError, match=r"expected sizes of 1 or more in first\[s0, s1, 4\]"):
        graph(empty.tensors["first"])
    with pytest.raises(
        MicrotomeError, match=r"expected sizes of 1 or more in first\[s0, s1, 4\], got first\[0, 3, 4\]"
    ):
        tail.compile(backend="eager")(empty)
    assert find_unmet([["s0", "4"]], [], [(0, 4)]) == "a size s0 of 1 or more, got 0"


def test_a_size_of_one_is_tried_where_it_crosses_as_another() -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = _AddToken(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            if y.shape[1] == 2:  # torch takes s1 for 2 or more, and s1 + 1 for 3 or more
                y = y * 2
            output: Tensor = self.second(y)
            return output

    model = Token().eval()
    _, tail = mt.split(model, torch.randn(2, 3, 4), at="first")
    assert capture_stage(tail).shapes.spell_conditions() == ["s1 - 1 >= 2"]


class _AddToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], x], 1)
