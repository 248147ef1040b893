"""Keeping `nn.Module` patched between the sessions of a block."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.engine.session import keep_patched
from microtome.engine.torch_internals import MODULE_CALL

X = torch.ones(1, 2)


def attribute() -> Any:
    return vars(nn.Module)[MODULE_CALL]


class Paths(mt.Probe):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def enter(self, call: mt.Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen.append(call.path)


def test_the_class_changes_once_for_all_sessions_of_the_block() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with keep_patched():
        slot = attribute()
        for _ in range(3):
            with mt.Session(model, [paths := Paths()]):
                model(X)
                assert attribute() is slot
            assert paths.seen == ["", "0"]
            model(X)
            assert paths.seen == ["", "0"]  # between sessions, nothing is observed
    assert attribute() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_class_is_restored_whatever_is_raised(error: type[BaseException]) -> None:
    def interrupt() -> None:
        with keep_patched(), keep_patched(), mt.Session(nn.Linear(2, 2)):
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error

    with pytest.raises(error):
        interrupt()
    assert attribute() is None


def test_modules_compiled_in_place_run_compiled_between_sessions() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model, graphs = Net(), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model.compile(backend=backend)
    with keep_patched():
        with mt.Session(model):
            model(X)
        assert not graphs
        model(X)
        assert len(graphs) == 1
    assert attribute() is None


def test_a_patch_of_other_code_inside_the_block_stays() -> None:
    model, patched = nn.Sequential(nn.Linear(2, 2)), []

    def patch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        patched.append(type(self).__name__)
        return self._call_impl(*args, **kwargs)

    try:
        with keep_patched():
            setattr(nn.Module, MODULE_CALL, patch)
            with mt.Session(model, [paths := Paths()]):
                model(X)
            assert paths.seen == ["", "0"]
            model(X)
            assert patched[-2:] == ["Sequential", "Linear"]
        assert attribute() is patch
    finally:
        setattr(nn.Module, MODULE_CALL, None)


def test_blocks_of_two_threads_overlap() -> None:
    model, began, ends = nn.Linear(2, 2), threading.Event(), threading.Event()

    def hold() -> None:
        with keep_patched():
            began.set()
            ends.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert began.wait(60)
    with keep_patched(), mt.Session(model, [paths := Paths()]):
        model(X)
    assert paths.seen == [""]
    assert attribute() is not None
    ends.set()
    thread.join(60)
    assert attribute() is None
