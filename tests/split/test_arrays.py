"""Models that are given numpy arrays can be cut: the arrays cross as tensors, and are arrays in the tail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.errors import BadBoundary, BadInputs, NoMatch, Unsupported
from microtome.plan.codec_benchmark import codec_costs
from microtome.remote.payloads import pack_inputs, unpack_inputs
from microtome.split.splitter import Splitter


class Block(nn.Module):
    """Makes a tensor of an array itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Tensor:
        y: Tensor = self.b(torch.relu(self.a(torch.from_numpy(x).float())))
        return y


class Net(nn.Module):
    """Reads arrays in its own code, before and after its calls, and inside a call."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.c, self.last = Block(), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Any, *, more: dict[str, Any], scale: float, mask: Tensor) -> Tensor:
        y = self.c(self.block(x) * torch.as_tensor(x, dtype=torch.float32)) * scale
        same = 2.0 if more["again"] is x else 1.0
        y = self.last(y * mask) * same + torch.tensor(more["rows"].sum(1, keepdims=True)).float()
        return y * float(x.mean())


def example(dtype: str, layout: str, rows: int = 3) -> mt.Inputs:
    values = np.random.default_rng(rows).normal(size=(rows, 4)) * 3
    x = {
        "dense": lambda: values.astype(dtype),
        "transposed": lambda: np.asfortranarray(values.astype(dtype)),
        "gaps": lambda: np.repeat(values.astype(dtype), 2, axis=1)[:, ::2],
    }[layout]()
    more = {"again": x, "rows": np.arange(rows * 2).reshape(rows, 2)}
    return mt.Inputs(x, more=more, scale=0.5, mask=torch.rand(rows, 4))


@pytest.mark.parametrize("layout", ["dense", "transposed", "gaps"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8", "bool"])
def test_every_cut_of_a_model_that_is_given_arrays_is_exact(dtype: str, layout: str) -> None:
    model, given = Net().eval(), example(dtype, layout)
    other = example(dtype, layout, rows=5)
    with torch.no_grad():
        splitter = Splitter(model, given)
        assert not splitter.cuts.refused
        assert [cut.at for cut in splitter.cuts] == ["block.a", "block.b", "block", "c", "last"]
        for cut in splitter.cuts:
            stages = splitter.at(cut)
            assert stages.verified == "bit-equal"
            for inputs in (given, other):
                whole = inputs.run(model)
                boundary = stages[0](*inputs.args, **inputs.kwargs)
                assert stages[1](mt.Boundary.from_bytes(boundary.to_bytes())).equal(whole)
                assert stages(*inputs.args, **inputs.kwargs).equal(whole)
            sent = stages[0](*given.args, **given.kwargs)
            assert cut.nbytes == sent.nbytes
            assert sum(live.name.startswith("inputs(ndarray") for live in cut.live) == 2


def test_several_stages_hand_arrays_on_and_a_tail_may_write_into_its_own() -> None:
    class Writing(Net):
        def forward(self, x: Any, **kwargs: Any) -> Tensor:
            y = super().forward(x, **kwargs)
            x += 1
            return y * float(x.mean())

    model, given = Writing().eval(), example("float32", "dense")
    with torch.no_grad():
        stages = mt.split(model, given, at=["block.a", "c"])
        before = given.args[0].copy()
        boundary = stages[1](stages[0](*given.args, **given.kwargs))
        first, second = stages[2](boundary), stages[2](boundary)
        assert np.array_equal(given.args[0], before)
        assert first.equal(second)
        assert first.equal(given.run(model))


class Changing(nn.Module):
    """A call in it changes the array that it is given, and code after it reads that."""

    def __init__(self) -> None:
        super().__init__()
        self.change, self.last = Change(), nn.Linear(4, 4)

    def forward(self, x: Any) -> Tensor:
        self.change(x)
        y: Tensor = self.last(torch.as_tensor(x))
        return y


class Change(nn.Module):
    def forward(self, x: Any) -> None:
        x *= 2


def test_a_call_in_the_head_that_changes_an_array_is_refused() -> None:
    cuts = mt.cuts(Changing(), mt.Inputs(np.ones((2, 4), np.float32)))
    assert not cuts.offered
    refusal = "'change' runs in the head, and it mutates a ndarray among its arguments"
    assert {cut.refused for cut in cuts.refused} == {refusal}


WHOLE = np.ones((4, 4), np.float32)
REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (np.array([None, 1]), "ndarray that is not a writable array of plain numbers"),
    "read only": (np.broadcast_to(np.float32(1), (2, 4)), "ndarray that is not a writable array of plain numbers"),
    "reversed": (np.ones((2, 4), np.float32)[::-1], "ndarray that is not a writable array of plain numbers"),
    "swapped bytes": (np.ones((2, 4), ">f4"), "ndarray that is not a writable array of plain numbers"),
    "overlapping": ([WHOLE, WHOLE[1:]], "ndarray that overlaps another input in memory"),
    "of a tensor": ([WHOLE, torch.from_numpy(WHOLE)], "ndarray that overlaps another input in memory"),
    "an object": (np.random.default_rng(0), "Generator"),
}


class Ignoring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Any) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


@pytest.mark.parametrize("name", REFUSED)
def test_an_array_that_no_tensor_can_stand_for_is_refused(name: str) -> None:
    other, kind = REFUSED[name]
    cuts = mt.cuts(Ignoring(), mt.Inputs(torch.ones(2, 4), other))
    assert not cuts.offered
    assert all(str(cut.refused).startswith(f"the model is given a {kind}") for cut in cuts.refused)
    assert len(cuts.refused) == 2


def test_arrays_that_overlap_are_refused_in_a_run_too() -> None:
    model, x = Ignoring(), torch.ones(2, 4)
    head, _ = mt.split(model, (x, [WHOLE, WHOLE + 1]), at="a")
    with pytest.raises(Unsupported, match="expected plain data, got a ndarray that overlaps another input in mem"):
        head(x, [WHOLE, WHOLE[1:]])
    with pytest.raises(BadInputs, match=r"\[ndarray, ndarray\]"):
        head(x, [WHOLE, x])
    with pytest.raises(NoMatch, match="overlaps another input in memory"):
        mt.split(model, mt.Inputs(x, [WHOLE, torch.from_numpy(WHOLE)]), at="a")


def test_a_boundary_without_its_arrays_is_refused() -> None:
    model, given = Net().eval(), example("float32", "dense")
    head, tail = mt.split(model, given, at="c")
    boundary = head(*given.args, **given.kwargs)
    boundary.tensors["inputs(ndarray#1)"] = boundary.tensors["inputs(ndarray#1)"].bfloat16()
    with pytest.raises(BadBoundary, match=r"expected numbers of an array, got torch.bfloat16"):
        tail(boundary)
    del boundary.tensors["inputs(ndarray#1)"]
    with pytest.raises(BadBoundary, match=r"the boundary lacks tensor 'inputs\(ndarray#1\)'"):
        tail(boundary)


def test_the_inputs_of_a_whole_model_are_sent_with_their_arrays() -> None:
    model, given = Net().eval(), example("float64", "gaps")
    template = Splitter(model, given).spec.inputs
    sent = mt.Boundary.from_bytes(pack_inputs(given, template, "").to_bytes())
    there = unpack_inputs(sent, template, None)
    assert there.kwargs["more"]["again"] is there.args[0]
    assert there.args[0].dtype == given.args[0].dtype
    assert there.run(model).equal(given.run(model))


def test_codecs_are_measured_on_arrays_too() -> None:
    model, given = Net().eval(), example("float32", "dense")
    cuts = mt.cuts(model, given)
    costs = codec_costs(cuts, ["raw"], model=model, inputs=given)
    assert {live.name for cut in cuts for live in cut.live} <= set(costs.costs["raw"])
