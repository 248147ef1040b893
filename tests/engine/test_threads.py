"""Several threads that call one model while sessions open and close."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from torch import nn

import microtome as mt
from tests.engine.test_calls import Log, X

CALL = "_compiled_call_impl"


class InThread:
    """Run a function in another thread, and raise here what it raises there."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  raised by `join`
            self._error = error

    def join(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


class BetweenReads:
    """Pause the first module call of a thread where `nn.Module.__call__` has compared the attribute with None."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._lines: list[int] = []

    def call(self, model: nn.Module) -> None:
        sys.settrace(self._trace)
        try:
            assert model(X).equal(X)
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not nn.Module.__call__.__code__ or self.reached.is_set():
            return None
        if event == "line":
            self._lines.append(frame.f_lineno)
            if len(self._lines) == 2:
                self.reached.set()
                assert self.go_on.wait(timeout=60)
        return self._trace


@pytest.mark.parametrize("others", [False, True])
def test_a_session_may_close_while_another_thread_is_between_the_reads_of_its_slot(others: bool) -> None:
    model = nn.Sequential(nn.Identity())
    pause, session = BetweenReads(), mt.Session(None if others else model)
    with session:
        thread = InThread(lambda: pause.call(model))
        assert pause.reached.wait(timeout=60)
    model(X)
    pause.go_on.set()
    thread.join()
    model(X)  # the first call after it finds nobody who needs the attribute
    assert vars(nn.Module)[CALL] is None


def test_a_session_may_open_while_another_thread_is_between_the_reads() -> None:
    model, log = nn.Sequential(nn.Identity()), Log()
    pause = BetweenReads()
    with mt.Session(model):
        thread = InThread(lambda: pause.call(model))
        assert pause.reached.wait(timeout=60)
    with mt.Session(model, [log]):  # which finds what the first one had to leave
        pause.go_on.set()
        thread.join()
        log.calls.clear()
        model(X)
    assert log.addresses == ["", "0"]
    assert vars(nn.Module)[CALL] is None


def test_a_module_that_leaves_the_session_between_the_reads_is_called() -> None:
    child = nn.Identity()
    model, pause = nn.Sequential(nn.Identity(), child), BetweenReads()
    with mt.Session(model):
        del model[1]
        thread = InThread(lambda: pause.call(child))
        assert pause.reached.wait(timeout=60)
        for _ in range(2):
            child(X)  # and is known from here on not to be part of the model
        pause.go_on.set()
        thread.join()


@pytest.fixture
def eager_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_calls_go_on_while_sessions_open_and_close(eager_switches: None) -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(8)))
    done = threading.Event()

    def call() -> None:
        while not done.is_set():
            model(X)

    callers = [InThread(call) for _ in range(3)]
    try:
        for turn in range(600):
            with mt.Session(model, at=None if turn % 2 else "0"):
                pass
    finally:
        done.set()
        for caller in callers:
            caller.join()
    model(X)
    assert vars(nn.Module)[CALL] is None
