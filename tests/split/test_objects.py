"""Objects of plain Python classes cross by structure: their class is the receiver's own, and none of its code runs."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import microtome as mt
from benchmarks.detection import detection_runs
from benchmarks.split_zoo.models import detector
from benchmarks.split_zoo.proof import prove
from microtome.engine.pytree import is_record, map_tensors, tensors_in
from microtome.errors import BadInputs, NoMatch
from microtome.split.comparison import differences
from tests.marks import slow
from tests.split.test_stages import same

made: list[str] = []


class Boxes:
    def __init__(self, tensor: Tensor) -> None:
        made.append("Boxes")
        self.tensor = tensor

    @property
    def area(self) -> Tensor:
        return self.tensor.prod(-1)


class Instances:
    """Has its own way to set and to get attributes."""

    def __init__(self, size: tuple[int, int], **fields: Any) -> None:
        made.append("Instances")
        object.__setattr__(self, "_size", size)
        object.__setattr__(self, "_fields", dict(fields))

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("_fields", {})
        if name not in fields:
            raise AttributeError(name)
        return fields[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError("set by code that is not this test's")


class Slotted:
    __slots__ = ("scale", "unset", "x")

    def __init__(self, x: Tensor, scale: float) -> None:
        self.x, self.scale = x, scale


class Mixed(Slotted):
    def __init__(self, x: Tensor, scale: float, name: str) -> None:
        super().__init__(x, scale)
        self.name = name


@dataclass
class Outer:
    inner: Boxes
    dtype: torch.dtype = torch.float32


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "object": (Boxes, lambda v: v.tensor + v.area[..., None]),
    "own __setattr__": (
        lambda x: Instances((3, 4), boxes=Boxes(x), scores=x.sum(-1), names=["a", None]),
        lambda v: v.boxes.tensor * v._size[0] + v.scores[..., None] * len(v.names),
    ),
    "slots": (lambda x: Slotted(x, 3.5), lambda v: v.x * v.scale),
    "slots and attributes": (lambda x: Mixed(x, 0.5, "abc"), lambda v: v.x * v.scale * len(v.name)),
    "in a dataclass in a list": (lambda x: [Outer(Boxes(x)), Outer(Boxes(x + 1))], lambda v: v[1].inner.tensor),
    "normal distribution": (lambda x: Normal(x, x.exp()), lambda v: v.log_prob(torch.ones(()))),
    "categorical distribution": (lambda x: Categorical(logits=x), lambda v: v.probs * v.entropy()[..., None]),
}


class Makes(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make, self.linear = make, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


class Net(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any], use: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first, self.makes, self.passes, self.last = nn.Linear(4, 4), Makes(make), nn.Identity(), nn.Linear(4, 2)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        value = self.passes(self.makes(self.first(x)))
        return self.last(self.use(value))


@pytest.mark.parametrize("kind", KINDS)
def test_objects_cross_every_cut(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Net(*KINDS[kind]).eval(), torch.randn(3, 4)
    with torch.no_grad():
        cuts = mt.cuts(model, x)
        assert [cut.at for cut in cuts] == ["first", "makes.linear", "makes", "passes", "last"]
        for cut in cuts:
            head, tail = mt.split(model, x, at=cut)
            assert head(x).nbytes == cut.nbytes, cut.at
            for other in (x, torch.randn(5, 4)):
                assert same(tail(mt.Boundary.from_bytes(head(other).to_bytes())), model(other)), cut.at


def test_the_tail_runs_no_code_of_the_class() -> None:
    model, x = Net(*KINDS["own __setattr__"]).eval(), torch.randn(3, 4)
    with torch.no_grad():
        head, tail = mt.split(model, x, at="makes")
        data = head(x).to_bytes()
        made.clear()
        tail(mt.Boundary.from_bytes(data))
    assert made == []
    assert b"Instances" not in data  # the class is the tail's own: nothing that came over the wire names it


class Other(Boxes):
    pass


class Either(nn.Module):
    def forward(self, x: Tensor) -> Boxes:
        return Boxes(x) if x.sum() > 0 else Other(x)


def test_an_object_of_another_class_than_on_the_example_is_refused() -> None:
    model = nn.Sequential(Either(), Uses()).eval()
    head, tail = mt.split(model, torch.ones(2, 4), at="0")
    assert same(tail(head(torch.ones(3, 4))), torch.ones(3, 4))
    with pytest.raises(BadInputs, match=r"output of '0': expected .*, got Other\(tensor="):
        head(-torch.ones(2, 4))


class Uses(nn.Module):
    def forward(self, boxes: Boxes) -> Tensor:
        return boxes.tensor


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, boxes: Boxes) -> Boxes:
        return Boxes(self.last(self.first(boxes.tensor)) + boxes.tensor)


def test_objects_are_inputs_and_outputs() -> None:
    model, given = Takes().eval(), Boxes(torch.randn(2, 4))
    with torch.no_grad():
        head, tail = mt.split(model, given, at="first")
        other = Boxes(torch.randn(5, 4))
        output = tail(mt.Boundary.from_bytes(head(other).to_bytes()))
        assert type(output) is Boxes
        assert same(output.tensor, model(other).tensor)


@pytest.mark.parametrize("held", [open, object(), iter(()), nn.Linear(1, 1), 1j], ids=lambda held: type(held).__name__)
def test_an_object_that_holds_something_else_is_refused_with_the_reason(held: Any) -> None:
    def make(x: Tensor) -> Boxes:
        boxes = Boxes(x)
        boxes.held = {"at": [1, held]}  # type: ignore[attr-defined]
        return boxes

    model = Net(make, lambda boxes: boxes.tensor)
    found = rf"it returns a Boxes \(\.held\['at'\]\[1\] is a {type(held).__name__}\), which is no tensor, number"
    with pytest.raises(NoMatch, match=found):
        mt.split(model, torch.randn(2, 4), at="makes")
    assert {cut.at for cut in mt.cuts(model, torch.randn(2, 4)).refused} == {"makes", "passes", "last"}


def test_an_object_that_holds_itself_is_refused_with_the_reason() -> None:
    boxes: Any = Boxes(torch.ones(2, 4))
    boxes.all = [boxes]
    (cut, *_) = mt.cuts(Takes(), boxes).refused
    assert cut.refused is not None
    assert "Boxes (.all[0] is a Boxes), which cannot be sent" in cut.refused


def test_an_object_that_a_call_changes_is_refused() -> None:
    class Changes(nn.Module):
        def forward(self, boxes: Boxes) -> Tensor:
            boxes.tensor = boxes.tensor + 1
            return boxes.tensor

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.changes, self.last = Changes(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            boxes = Boxes(x * 2)
            return self.last(self.changes(boxes)) + boxes.tensor

    (cut, _) = mt.cuts(Around(), torch.randn(2, 4)).refused
    assert cut.refused == "'changes' runs in the head, and it mutates a Boxes among its arguments"


def test_what_is_a_record_is_mapped_and_compared_by_structure() -> None:
    boxes = Boxes(torch.ones(2))
    endless = Boxes(torch.ones(2))
    endless.again = endless  # type: ignore[attr-defined]
    assert is_record(boxes)
    assert is_record(Slotted(torch.ones(1), 1.0))
    assert not any(map(is_record, (endless, nn.Linear(1, 1), Boxes, 3, [boxes], torch.ones(1), None)))
    assert [tensor.tolist() for tensor in tensors_in([boxes, Mixed(torch.zeros(1), 1.0, "")])] == [[1, 1], [0]]
    twice = map_tensors(lambda tensor: tensor * 2, Mixed(torch.ones(1), 1.5, "a"))
    assert (type(twice), twice.x.item(), twice.scale, twice.name) == (Mixed, 2.0, 1.5, "a")
    (found,) = differences(Slotted(torch.ones(1), 1.0), Slotted(torch.ones(1), 2.0))
    assert found.description == "1.0 instead of 2.0"


@pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large", *slow("fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn")])  # fmt: skip  # noqa: E501
def test_detectors_are_cut_exactly(name: str) -> None:
    with detection_runs():
        model, inputs = detector(name)
        tally = prove(name, model, inputs, most=6)
    assert (tally.late, tally.wrong, tally.failed) == ({}, {}, {})
    assert tally.exact == tally.tried >= 5
    assert tally.unlisted.total() <= 1


class Packed(nn.Module):
    """A common encoder of sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.last = nn.Embedding(9, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.gru(packed)
        return self.last(pad_packed_sequence(hidden, batch_first=True)[0])


class Picture:
    """As an image of Pillow: it can be converted to an array, and is none."""

    def __init__(self, pixels: bytes) -> None:
        self.pixels = pixels

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (len(self.pixels),), "typestr": "|u1", "version": 3, "data": self.pixels}


VALUES: list[tuple[Any, Any]] = [
    (Picture(b"a"), Picture(b"b")),
    (np.float32(1), np.float32(2)),
    ({1, 2}, {1, 3}),
    (frozenset({"a"}), frozenset({"a", "b"})),
    ({torch.ones(1)}, {torch.zeros(1)}),
    (np.ones(3), np.zeros(3)),
    (np.ones(3), np.ones(4)),
    (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
    (1 + 2j, 1 + 3j),
    (range(3), range(4)),
    (bytearray(b"a"), bytearray(b"b")),
    (torch.device("cpu"), torch.device("meta")),
    (torch.float16, torch.float32),
    (float("nan"), 1.0),
]


@pytest.mark.parametrize(("value", "other"), VALUES)
def test_values_of_every_kind_are_compared(value: Any, other: Any) -> None:
    assert len(list(differences([value], [other]))) == 1
    assert not list(differences([value], [deepcopy(value)]))
