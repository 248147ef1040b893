from __future__ import annotations

import pytest
import torch
from torch import nn

from microtome.split.analysis.module_attributes import ModuleStates, changed_attributes


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.count = 1000
        self.options = (1, 2)


class ListHolder(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.entries = [1]
        self.kept = torch.zeros(1)


def rename(holder: Holder) -> None:
    value = holder.options
    del holder.options  # the last: another name has its place then
    setattr(holder, "choices", value)  # noqa: B010  an attribute that mypy does not know


CHANGES = {
    "count": lambda holder: setattr(holder, "count", 1001),
    "options": lambda holder: setattr(holder, "options", (1, 3)),
    "choices,options": rename,
    "mean": lambda holder: setattr(holder, "mean", torch.ones(2)),
    "extra": lambda holder: setattr(holder, "extra", 0),
    "mean,new": lambda holder: holder._buffers.update(new=holder._buffers.pop("mean")),
}


@pytest.mark.parametrize("names", CHANGES)
@pytest.mark.parametrize("kind", [Holder, ListHolder])
def test_changes_of_attributes_are_found(kind: type[Holder], names: str) -> None:
    holder, states = kind(), ModuleStates()
    states.begin(holder)
    before = states.of(holder)
    CHANGES[names](holder)
    assert changed_attributes(before, states.of(holder)) == tuple(names.split(","))


def test_a_state_is_read_once_while_it_is_unchanged() -> None:
    holder, states = Holder(), ModuleStates()
    states.begin(holder)
    first = states.of(holder)
    holder.train(False)  # torch's own attributes are no state
    holder.train()
    assert states.of(holder) is first
    assert states.of(None) == {}


def test_the_contents_of_lists_are_compared() -> None:
    holder, states = ListHolder(), ModuleStates()
    states.begin(holder)
    before = states.of(holder)
    holder.entries.append(2)
    assert changed_attributes(before, states.of(holder)) == ("entries",)
    assert changed_attributes(before, states.of(None)) != ()
