"""Addresses of calls: nesting, repetition, sharing, recursion, and modules that come and go."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt


class Log(mt.Probe):
    """The calls in the order they began."""

    def __init__(self) -> None:
        self.calls: list[mt.Call] = []

    def enter(self, call: mt.Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append(call)

    @property
    def addresses(self) -> list[str]:
        return [call.address for call in self.calls]


def addresses(model: nn.Module, *args: Any, within: nn.Module | None = None) -> list[str]:
    log = Log()
    with mt.Session(within or model, [log]):
        model(*args)
    return log.addresses


X = torch.ones(1, 2)


def test_a_call_knows_its_path_index_parent_depth_phase_and_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    log = Log()
    with mt.Session(model, [log]):
        model(X)
    root, first, second, relu = log.calls
    assert [call.path for call in log.calls] == ["", "0", "1", "1.0"]
    assert [call.depth for call in log.calls] == [0, 1, 1, 2]
    assert (root.parent, relu.parent) == (None, second)
    assert relu.stack == (root, second, relu)
    assert (first.index, first.phase, first.module) == (0, "forward", model[0])
    assert repr(relu) == "<Call '1.0' forward>"


class Repeat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(self.inner(x)))


def test_a_module_that_runs_three_times_makes_three_calls() -> None:
    assert addresses(Repeat(), X) == ["", "inner", "inner#1", "inner#2"]


def test_the_index_begins_anew_with_each_outermost_call() -> None:
    model = Repeat()
    log = Log()
    with mt.Session(model, [log]):
        model(X)
        model.inner(X)
        model(X)
    assert log.addresses == ["", "inner", "inner#1", "inner#2", "inner", "", "inner", "inner#1", "inner#2"]


def test_a_shared_module_is_called_by_its_first_name_and_counted_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared), shared)
    assert addresses(model, X) == ["", "0", "0.0", "1", "0.0#1", "0.0#2"]


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.ReLU()

    def forward(self, x: Tensor, depth: int) -> Tensor:
        return self(self.leaf(x), depth - 1) if depth else x


def test_recursion() -> None:
    model = Recursive()
    log = Log()
    with mt.Session(model, [log]):
        model(X, 2)
    assert log.addresses == ["", "leaf", "#1", "leaf#1", "#2"]
    assert [call.depth for call in log.calls] == [0, 1, 1, 2, 2]


def test_a_module_that_holds_the_one_that_holds_it() -> None:
    outer, inner = nn.Sequential(), nn.Sequential()
    outer.add_module("inner", inner)
    inner.add_module("outer", outer)
    with mt.track(outer) as t:
        assert t.paths_of(inner) == ("inner",)
        assert t.paths_of(outer) == ("",)


def test_module_lists_and_dicts_are_part_of_the_path_and_make_no_calls() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.ReLU()])
            self.heads = nn.ModuleDict({"a": nn.Tanh()})

        def forward(self, x: Tensor) -> Tensor:
            return self.heads["a"](self.layers[0](x))

    assert addresses(Net(), X) == ["", "layers.0", "heads.a"]


def test_lazy_modules_keep_their_path_when_they_become_another_class() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    log = Log()
    with mt.Session(model, [log]):
        model(torch.ones(2, 2))
        model(torch.ones(2, 2))
    assert log.addresses == ["", "0", "1"] * 2
    assert [type(call.module) for call in log.calls[1:3]] == [nn.Linear, nn.BatchNorm1d]


def test_replicas_of_data_parallel_have_the_path_of_their_original() -> None:
    model = nn.Sequential(nn.ReLU(), Repeat())
    original: Any = model[1]
    inner = original._replicate_for_data_parallel()  # what torch.nn.parallel.replicate calls
    inner.inner = original.inner._replicate_for_data_parallel()
    assert inner is not original
    assert addresses(inner, X, within=model) == ["1", "1.inner", "1.inner#1", "1.inner#2"]


def test_a_replica_has_the_path_of_its_original_in_a_session_without_a_model() -> None:
    model = nn.Sequential(nn.ReLU())
    log = Log()
    with mt.Session(None, [log]):
        model(X)
        model[0]._replicate_for_data_parallel()(X)
    assert log.addresses == ["Sequential", "Sequential.0", "Sequential.0"]


class Grows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Sequential(nn.Linear(2, 2))
        return self.late(x)


@pytest.mark.parametrize("process", [False, True])
def test_modules_added_by_a_forward_are_observed_at_once(process: bool) -> None:
    model = nn.Sequential(Grows())
    log = Log()
    with mt.Session(None if process else model, [log]):
        model(X)
    if process:
        assert log.addresses == ["Sequential", "Sequential.0", "Sequential.0.late", "Sequential.0.late.0"]
    else:
        assert log.addresses == ["", "0", "0.late", "0.late.0"]


def test_modules_added_moved_and_removed_between_runs_have_their_present_path() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    relu, tanh = model
    log = Log()
    with mt.Session(model, [log]) as session:
        model.append(nn.Sigmoid())
        model(X)
        assert log.addresses == ["", "0", "1", "2"]
        model.insert(0, nn.GELU())  # writes into the dict of modules, past every hook that torch has
        model(X)
        assert [(call.path, call.module) for call in log.calls[4:7]] == [("", model), ("0", model[0]), ("1", relu)]
        del model[0]
        del model[0]
        model(X)
        assert [(call.path, call.module) for call in log.calls[-3:]] == [("", model), ("0", tanh), ("1", model[1])]
        seen = len(log.calls)
        relu(X)  # no longer part of the model
        assert len(log.calls) == seen
        model[0](X)
        assert log.calls[-1].path == session.paths_of(tanh)[0] == "0"


def test_other_models_and_copies_made_inside_are_not_observed() -> None:
    model = nn.Sequential(nn.ReLU())
    log = Log()
    with mt.Session(model, [log]):
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        for other in (copied, loaded, nn.ReLU()):
            other(X)
    assert log.calls == []
    assert vars(copied[0]).keys() == vars(loaded[0]).keys() == vars(nn.ReLU()).keys()


def test_a_session_on_a_part_of_a_model_has_paths_of_that_part() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh()))
    assert addresses(model, X, within=model[1]) == ["", "0"]


def test_a_module_that_first_ran_alone_takes_its_name_from_the_larger_one() -> None:
    inner = nn.Sequential(nn.ReLU())
    model = nn.ModuleDict({"inner": inner, "other": nn.Tanh()})
    model.forward = lambda x: inner(x)
    log = Log()
    with mt.Session(None, [log]) as session:
        inner(X)
        assert log.addresses == ["Sequential", "Sequential.0"]
        model(X)
        inner(X)
        assert log.addresses[2:] == [
            *("ModuleDict", "ModuleDict.inner", "ModuleDict.inner.0"),
            *("ModuleDict.inner", "ModuleDict.inner.0"),
        ]
        assert session.paths_of(inner[0]) == ("ModuleDict.inner.0",)
        with pytest.raises(LookupError, match="no module at path 'Sequential.0'"):
            session.module_of("Sequential.0")


def test_names_of_modules_that_are_gone_are_free_again() -> None:
    log = Log()
    with mt.Session(None, [log]):
        for _ in range(3):
            nn.Sequential(nn.ReLU())(X)
    assert log.addresses == ["Sequential", "Sequential.0"] * 3


def test_modules_moved_between_runs_have_their_present_path_without_a_model_too() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    log = Log()
    with mt.Session(None, [log]):
        model(X)
        model.insert(0, nn.GELU())
        model(X)
    assert [(call.path, type(call.module)) for call in log.calls[-3:]] == [
        *(("Sequential.0", nn.GELU), ("Sequential.1", nn.ReLU), ("Sequential.2", nn.Tanh)),
    ]


def test_a_module_that_outlives_its_root_becomes_one() -> None:
    log = Log()
    with mt.Session(None, [log]) as session:
        model = nn.Sequential(nn.ReLU())
        model(X)
        kept = model[0]
        del model
        kept(X)
        assert session.paths_of(kept) == ("ReLU",)
        with pytest.raises(LookupError, match="the Tanh has not run in this session, nor has a module that"):
            session.paths_of(nn.Tanh())
    assert log.addresses == ["Sequential", "Sequential.0", "ReLU"]


def test_modules_made_on_the_fly_belong_to_no_model() -> None:
    class Inline(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.ReLU()(x)

    assert addresses(Inline(), X) == [""]


def test_a_module_put_elsewhere_in_the_model_while_it_runs_is_observed() -> None:
    class Puts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            late = nn.ReLU()
            late(x)  # not yet
            model.add_module("late", late)
            return late(x)

    model = nn.Sequential(Puts())
    log = Log()
    with mt.Session(model, [log]):
        model[0](X)
    assert log.addresses == ["0", "late"]


def test_an_address_will_do_as_a_path() -> None:
    model = Repeat()
    with mt.track(model) as t, mt.track() as everything:
        model(X)
        assert t.module_of("inner#2") is everything.module_of("Repeat.inner#1") is model.inner
        for wrong in (None, 0):
            with pytest.raises(TypeError, match=f"expected a path such as 'layer1.0', got {wrong}"):
                t.module_of(wrong)  # type: ignore[arg-type]
