"""Several threads that call one model while sessions open and close."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome.engine import meta_run
from microtome.engine.composite_ops import is_meta_or_fake
from microtome.engine.thread_stacks import outer_frames, thread_stacks
from microtome.errors import Unsupported
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

    def wait(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    def join(self) -> None:
        self.wait()
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
        for turn in range(200):
            with mt.Session(model, at=None if turn % 2 else "0"):
                pass
    finally:
        done.set()
        for caller in callers:
            caller.join()
    model(X)
    assert vars(nn.Module)[CALL] is None


def test_no_garbage_is_collected_while_the_stacks_of_other_threads_are_read() -> None:
    """A collection may switch threads; CPython 3.11 then crashes on a frame that the other thread has left."""
    collecting_in: list[set[str]] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        collecting_in.append({frame.f_code.co_name for frame in outer_frames(sys._getframe())})

    leave = threading.Event()
    thread = InThread(leave.wait)
    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    try:
        assert len(thread_stacks()) > 1
        assert [[] for _ in range(9)]
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)
        leave.set()
        thread.join()
    assert collecting_in
    assert not any("outer_frames" in names for names in collecting_in)


# -- actions of one thread, and calls of another -----------------------------------------------------------------------


class Gated(nn.Module):
    """Waits in the middle of its forward, in the one thread that is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(4, 4), nn.Identity()
        self.last = nn.TransformerEncoderLayer(4, 1, 4, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        beside = Beside.of(self)
        if beside is not None:
            beside.meet()
        x = self.middle(self.first(x))
        if beside is not None:
            beside.wait()
        y: Tensor = self.last(x)
        return y


class Beside:
    """Runs a model in another thread while an action runs it in this one.

    The other thread calls the model once the action is inside the model, or has called it before and goes on then.
    """

    _of: ClassVar[dict[int, Beside]] = {}

    def __init__(self, model: nn.Module, x: Tensor, *, began_before: bool) -> None:
        self._model, self._x = model, x
        self._wanted = model(x)
        self._inside, self._go_on = threading.Event(), threading.Event()
        self._here, self._there = threading.get_ident(), 0
        self._thread: InThread | None = None
        Beside._of[id(model)] = self
        if began_before:
            self._thread = InThread(self._run)
            assert self._inside.wait(timeout=60)

    @classmethod
    def of(cls, model: nn.Module) -> Beside | None:
        return cls._of.get(id(model))

    def _run(self) -> None:
        self._there = threading.get_ident()
        assert self._model(self._x).equal(self._wanted)

    def meet(self) -> None:
        if threading.get_ident() != self._here or self._go_on.is_set():
            return
        self._thread = self._thread or InThread(self._run)
        self._go_on.set()
        self._thread.wait()

    def wait(self) -> None:
        if threading.get_ident() == self._there:
            self._inside.set()
            assert self._go_on.wait(timeout=60)

    def end(self) -> None:
        self.meet()
        assert self._thread is not None
        self._thread.join()
        del Beside._of[id(self._model)]


def extract(model: nn.Module, x: Tensor, _: Any) -> Any:
    feats = mt.extract(model, x, "first")
    return list(feats), feats.stopped


def extract_all(model: nn.Module, x: Tensor, _: Any) -> Any:
    return list(mt.extract(model, x, "*", stop=False))


def attend(model: nn.Module, x: Tensor, _: Any) -> Any:
    return mt.attention(model, x).layers


def run_head(model: nn.Module, x: Tensor, stages: Any) -> Any:
    return [tensor.shape for tensor in stages[0](x).tensors.values()]


def run_tail(model: nn.Module, x: Tensor, stages: Any) -> Any:
    return stages[1](stages[0](x)).shape


@pytest.mark.parametrize("action", [extract, extract_all, attend, run_head, run_tail])
@pytest.mark.parametrize("began_before", [False, True])
def test_an_action_neither_observes_nor_changes_the_calls_of_another_thread(
    action: Callable[..., Any], began_before: bool
) -> None:
    model, x = Gated().eval(), torch.rand(3, 1, 4)
    stages = mt.split(model, x, at="middle")
    alone = action(model, x, stages)
    beside = Beside(model, x, began_before=began_before)
    assert action(model, x, stages) == alone
    beside.end()


def test_extract_has_no_substitute_tensors_while_another_thread_runs_the_model() -> None:
    model, x = Gated().eval(), torch.rand(3, 1, 4)
    beside = Beside(model, x, began_before=True)
    feats = mt.extract(model, x, "first")
    assert not feats.stopped  # where to stop is learned with substitute tensors
    beside.end()
    assert mt.extract(model, x, "first").stopped


@pytest.mark.parametrize("action", [mt.trace, mt.cuts, mt.profile])
def test_a_call_that_would_find_substitute_tensors_is_refused(action: Callable[..., Any]) -> None:
    model, x = Gated().eval(), torch.rand(3, 1, 4)
    beside = Beside(model, x, began_before=False)
    action(model, x)
    with pytest.raises(Unsupported, match=r"the model \(Gated\) is called in thread 'Thread-.*' while another thread"):
        beside.end()


class Calls:
    """An argument whose copying, before the run, makes another thread run the model."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def __deepcopy__(self, memo: Any) -> Calls:
        InThread(self.call).join()
        return self


class Ignores(nn.Module):
    """Takes an argument that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        y: Tensor = self.last(self.first(x))
        return y


@pytest.mark.parametrize("fake", [None, True])
@pytest.mark.parametrize("part", ["", "first"])
def test_a_call_while_substitute_tensors_are_placed_is_refused(part: str, fake: bool | None) -> None:
    model, x = Ignores(), torch.rand(1, 4)
    call = Calls(lambda: model.get_submodule(part)(x))
    with pytest.raises(Unsupported, match=r"is called in thread 'Thread-.*' while another thread .*: call it when"):
        mt.trace(model, mt.Inputs(x, call), fake=fake)
    assert not model(x).is_meta


def test_calls_that_began_before_a_trace_end_first() -> None:
    """Law: whatever another thread does meanwhile, it has the model's own output, or an error that says what to do."""
    model, x = Ignores(), torch.rand(1, 4)
    wanted, refusals, ends = model(x), 0, threading.Event()
    wrong: list[Any] = []

    def run() -> None:
        nonlocal refusals
        while not ends.is_set():
            try:
                output = model(x)
                if is_meta_or_fake(output) or not output.equal(wanted):
                    wrong.append(output)
            except Unsupported:
                refusals += 1
            except Exception as error:  # noqa: BLE001  torch's own: it found a substitute tensor
                wrong.append(error)

    thread = InThread(run)
    try:
        for at in range(60):
            mt.trace(model, x, fake=True if at % 2 else None)
    finally:
        ends.set()
        thread.join()
    assert wrong == []


def test_a_trace_is_refused_while_another_thread_stays_inside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_run, "PATIENCE_S", 0.01)
    model, x = Gated().eval(), torch.rand(3, 1, 4)
    beside = Beside(model, x, began_before=True)
    with pytest.raises(Unsupported, match="expected a model that no other thread runs, got a Gated that is still"):
        mt.trace(model, x)
    beside.end()


class Delegates(nn.Module):
    """Has a worker call its submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        done: list[Tensor] = []
        InThread(lambda: done.append(self.inner(x))).join()
        return done[0]


def test_the_workers_of_a_forward_are_part_of_it() -> None:
    model, x = Delegates(), torch.rand(1, 4)
    assert set(mt.extract(model, x, ["inner.0", "inner"], stop=False)) == {"inner.0", "inner"}


def test_recording_editing_and_tracking_are_of_all_threads() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Identity()), torch.rand(1, 4)
    entered: list[str] = []
    with (
        mt.record(model, "1") as rec,
        mt.edit(model, {"0": mt.zero()}),
        mt.track(model, on_enter=lambda call, phase: entered.append(call.address)),
    ):
        InThread(lambda: model(x)).join()
    assert entered == ["", "0", "1"]
    assert rec["1"][0].equal(torch.zeros(1, 4))


@pytest.mark.parametrize("folder", [False, True])
def test_a_recording_ends_while_another_thread_runs_the_model(folder: bool, tmp_path: Path) -> None:
    model, x = Gated().eval(), torch.rand(3, 1, 4)
    with mt.record(model, ["first", "last"], to=tmp_path / "a" if folder else None) as rec:
        beside = Beside(model, x, began_before=True)  # which runs it once in this thread
    beside.end()
    assert len(rec["last"]) == 1
