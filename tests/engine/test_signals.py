"""Law 1 under signals: whatever moment a handler raises at, model and process are as found."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

import microtome as mt
from microtome.engine.meta_run import SUBSTITUTION_LOCK
from microtome.engine.module_calls import chain
from microtome.engine.signals import _NUMBERS, SignalSafe, complete_step, grad_mode, signal_safe
from microtome.engine.snapshot import restore_containers, restore_dict
from tests.engine.test_laws import assert_same, snapshot
from tests.marks import slow

# -- what is compared --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def handle_interrupts() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt: a shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def is_free(lock: Any) -> bool:
    """Whether another thread can take a lock."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def everything(model: nn.Module) -> dict[str, Any]:
    """What `snapshot` has, and what an interrupt in the midst of putting back has been seen to leave."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return {
        **snapshot(model),
        "order": {path: list(vars(module)) for path, module in model.named_modules()},
        "held": {path: repr(vars(module).get("held")) for path, module in model.named_modules()},
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "collector": gc.isenabled(),
        "filters": list(warnings.filters),
        "loggers": {name: logging.getLogger(name).disabled for name in ("torch._subclasses.fake_tensor",)},
        "stance": None if dynamo is None else dynamo._stance.stance,
        "locks": (is_free(SUBSTITUTION_LOCK), is_free(chain._lock)),
        "sessions": len(chain._open),
        "handlers": [signal.getsignal(number) for number in _NUMBERS],
        "flags": {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")},
        "overrides": dict(vars(torch.overrides)),
        "function modes": torch._C._is_torch_function_enabled(),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("microtome")],
    }


class Net(nn.Module):
    """Weights, buffers, attention, and containers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.TransformerEncoderLayer(4, 1, 4, 0.0, batch_first=True)
        self.last = nn.Linear(4, 2)
        self.held = {"scale": torch.ones(1), "names": ["a", "b"], "seen": {1, 2}}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.layer(self.norm(self.first(x)) * self.held["scale"]))
        return y


# -- the actions -------------------------------------------------------------------------------------------------------


def build() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().eval(), torch.rand(2, 3, 4)


def record(model: Net, x: Tensor, folder: Path | None) -> None:
    with mt.record(model, ["first", "layer"], to=folder):
        model(x)


def record_attention(model: Net, x: Tensor, _: Any) -> None:
    with mt.record(model, attention=True):
        model(x)


def edit(model: Net, x: Tensor, _: Any) -> None:
    with mt.edit(model, {"first": mt.zero()}, inputs={"last": lambda given: given}):
        model(x)


def track(model: Net, x: Tensor, _: Any) -> None:
    with mt.track(model, on_enter=lambda call, phase: None) as t:
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert t.path is None


def nest(model: Net, x: Tensor, _: Any) -> None:
    with mt.track(model), mt.track(), torch.no_grad():
        model(x)


def run_stages(model: Net, x: Tensor, _: Any) -> None:
    head, tail = model.stages  # type: ignore[misc]
    tail(head(x))


Action = Callable[[Any, Tensor, Any], object]

ACTIONS: dict[str, Action] = {
    "trace": lambda model, x, _: mt.trace(model, x),
    "trace-fake": lambda model, x, _: mt.trace(model, x, fake=True),
    "trace-real": lambda model, x, _: mt.trace(model, x, fake=False),
    "trace-backward": lambda model, x, _: mt.trace(model, x, backward=True),
    "profile": lambda model, x, _: mt.profile(model, x),
    "profile-time": lambda model, x, _: mt.profile(model, x, measure="time", repeat=3, warmup=1),
    "cuts": lambda model, x, _: mt.cuts(model, x),
    "split": lambda model, x, _: mt.split(model, x, at="norm"),
    "stages": run_stages,
    "extract": lambda model, x, _: mt.extract(model, x, "layer"),
    "extract-grad": lambda model, x, _: mt.extract(model, x, "layer", grad=True),
    "extract-ops": lambda model, x, _: mt.extract(model, x, "layer.linear1/*"),
    "record": record,
    "record-memory": lambda model, x, _: record(model, x, None),
    "record-attention": record_attention,
    "attention": lambda model, x, _: mt.attention(model, x),
    "edit": edit,
    "track": track,
    "nest": nest,
}


# -- delivering --------------------------------------------------------------------------------------------------------


class Signaller:
    """Raises a signal at the n-th moment at which CPython would look for one, in whatever Python code runs then."""

    def __init__(self, at: int, number: int = signal.SIGINT, times: int = 1) -> None:
        self.seen = 0
        self._at = at
        self._number = number
        self._times = times

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        # CPython handles signals when a function written in Python begins and when one written in C has returned.
        if event not in ("call", "c_return") or frame.f_code is _RUN:
            return
        self.seen += 1
        if self._at <= self.seen < self._at + self._times:
            signal.raise_signal(self._number)

    def run(self, action: Callable[[], object]) -> bool:
        """Whether the action was interrupted."""
        interrupted = begun = False
        while True:  # signals that come again may arrive in the lines below
            try:
                if not begun:
                    begun = True
                    sys.setprofile(self._count)
                    action()
                sys.setprofile(None)
                return interrupted
            except KeyboardInterrupt:
                interrupted = True


_RUN = Signaller.run.__code__


def sweep(name: str, count: int, folder: Path, *, times: int = 1, number: int = signal.SIGINT) -> int:
    """Interrupt an action at as many moments, spread over it; return how many of the signals ended it."""
    model, x = build()
    object.__setattr__(model, "stages", mt.split(model, x, at="norm"))
    action = ACTIONS[name]
    folders = (folder / str(index) for index in range(10 * count + 10))
    for _ in range(2):  # what is imported or remembered the first time is there from then on
        action(model, x, next(folders))
    whole = Signaller(-1)
    whole.run(lambda: action(model, x, next(folders)))
    before = everything(model)
    chance = random.Random(name)
    interrupted = 0
    for turn in range(count):
        low, high = (whole.seen * at // count for at in (turn, turn + 1))
        at = 1 + low + chance.randrange(max(high - low, 1))
        target = next(folders)
        interrupted += Signaller(at, number, times).run(lambda target=target: action(model, x, target))  # type: ignore[misc]
        assert_same(before, everything(model), f"{name}, {at} of {whole.seen}")
    action(model, x, next(folders))
    assert_same(before, everything(model))
    return interrupted


#: The actions that `make test` interrupts.
QUICK = ("trace", "split", "record", "track")
#: A signal that comes while a generator is freed is reported, and lost, by Python itself.
freed = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@freed
@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in ACTIONS if name not in QUICK))])
def test_model_and_process_are_as_found_when_a_signal_comes_at_any_moment(name: str, tmp_path: Path) -> None:
    assert sweep(name, 8, tmp_path) > 1


@freed
@pytest.mark.zoo
@pytest.mark.parametrize("name", ACTIONS)
def test_model_and_process_are_as_found_after_thousands_of_signals(name: str, tmp_path: Path) -> None:
    count = int(os.environ.get("MICROTOME_INTERRUPTS", "150"))
    assert sweep(name, count, tmp_path) > count // 4


@freed
@pytest.mark.parametrize("name", ["trace", "split", "track", "record"])
def test_model_and_process_are_as_found_after_several_signals_in_a_row(name: str, tmp_path: Path) -> None:
    assert sweep(name, 6, tmp_path, times=50) > 1


@pytest.fixture
def alarm() -> Iterator[None]:
    """Have SIGALRM raise, as libraries that limit the time of a call do."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGALRM, before)


@freed
def test_signals_of_other_kinds_wait_too(tmp_path: Path, alarm: None) -> None:
    assert sweep("split", 6, tmp_path, number=signal.SIGALRM) > 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_all_handlers_are_restored_whenever_a_signal_comes(number: int, alarm: None) -> None:
    def block() -> None:
        with grad_mode(True):
            pass

    whole = Signaller(-1)
    whole.run(block)
    before = [signal.getsignal(number) for number in _NUMBERS]
    for at in range(1, whole.seen + 1):
        assert Signaller(at, number).run(block)
        assert [signal.getsignal(number) for number in _NUMBERS] == before


@freed
@pytest.mark.zoo
@pytest.mark.parametrize("name", ACTIONS)
def test_model_and_process_are_as_found_after_signals_of_a_timer(name: str, tmp_path: Path, alarm: None) -> None:
    model, x = build()
    object.__setattr__(model, "stages", mt.split(model, x, at="norm"))
    for turn in range(2):
        began = perf_counter()
        ACTIONS[name](model, x, tmp_path / f"whole{turn}")
    longest = perf_counter() - began
    before, chance, interrupted = everything(model), random.Random(name), 0
    for turn in range(int(os.environ.get("MICROTOME_INTERRUPTS", "150"))):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, longest))
                ACTIONS[name](model, x, tmp_path / str(turn))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
        assert_same(before, everything(model), name)
    assert interrupted


# -- when a signal waits, and when it does not -------------------------------------------------------------------------


class Steps(SignalSafe[None]):
    """Raises a signal at each step, and notes what it comes to."""

    def __init__(self, at: str) -> None:
        self._at = at
        self.done: list[str] = []

    def step(self, name: str) -> None:
        if self._at == name:
            signal.raise_signal(signal.SIGINT)
        self.done.append(name)

    def _set_up(self) -> None:
        self.step("enter")

    def _tear_down(self, *_: Any) -> None:
        self.step("exit")

    def run(self) -> None:
        with self:
            self.step("block")
        self.step("after")


@pytest.mark.parametrize(
    ("at", "done"),
    [
        ("enter", ["enter", "exit"]),
        ("block", ["exit"]),
        ("exit", ["block", "exit"]),
        ("after", ["block", "exit"]),
    ],
)
def test_a_signal_waits_for_the_end_of_entering_and_exiting(at: str, done: list[str]) -> None:
    steps = Steps(at)
    with pytest.raises(KeyboardInterrupt):
        steps.run()
    assert [name for name in steps.done if name != "enter" or at == "enter"] == done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextmanager
def handler(function: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, function)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("at", ["enter", "block", "exit", "after"])
def test_a_handler_of_the_users_own_is_called_once_and_stays(at: str) -> None:
    called: list[int] = []

    def note(number: int, _: Any) -> None:
        called.append(number)

    with handler(note):
        steps = Steps(at)
        steps.run()
        assert signal.getsignal(signal.SIGINT) is note
    assert called == [signal.SIGINT]
    assert steps.done == ["enter", "block", "exit", "after"]


def test_a_handler_that_is_set_inside_stays() -> None:
    def ours(*_: Any) -> None: ...

    before = signal.getsignal(signal.SIGINT)
    try:
        with grad_mode(True):
            signal.signal(signal.SIGINT, ours)
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_inner_block_waits_for_the_outer() -> None:
    done: list[str] = []

    @signal_safe
    def inner() -> Iterator[None]:
        signal.raise_signal(signal.SIGINT)
        yield
        done.append("inner")

    @signal_safe
    def outer() -> Iterator[None]:
        with inner():
            done.append("between")
        yield
        done.append("outer")

    with pytest.raises(KeyboardInterrupt), outer():
        done.append("block")
    assert done == ["between", "inner"]


def test_other_threads_have_no_signals_to_wait_for() -> None:
    found: list[Any] = []

    def work() -> None:
        with grad_mode(True):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_signal_in_an_operator_waits_for_the_next_module() -> None:
    class Interrupts(mt.Probe):
        def op(self, where: Any, *_: Any) -> None:
            if where.call is not None and where.call.path == "0":
                signal.raise_signal(signal.SIGINT)

    entered: list[str] = []
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    with (
        pytest.raises(KeyboardInterrupt),
        mt.Session(model, [Interrupts()]),
        mt.track(model, on_exit=lambda call, _: entered.append(call.address)),
    ):
        model(torch.ones(1))
    assert entered == ["0", ""]


# -- putting back ------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    pass


def test_a_step_that_is_interrupted_is_repeated_and_then_raises() -> None:
    tries: list[int] = []

    def step() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        complete_step(step)
    assert len(tries) == 3


def test_putting_back_never_empties_what_others_may_read() -> None:
    class Watched(dict[str, int]):
        least = 10

        def clear(self) -> None:
            raise AssertionError

        def __delitem__(self, key: str) -> None:
            super().__delitem__(key)
            self.least = min(self.least, len(self))

    held = Watched(c=3, x=0, a=9, b=2)
    restore_dict(held, {"a": 1, "b": 2, "c": 3})
    assert list(held.items()) == [("a", 1), ("b", 2), ("c", 3)]
    assert held.least == 3


def test_putting_back_twice_is_putting_back_once() -> None:
    kept = [({"b": 1}, {"a": 1, "b": 2}), ([1, 2, 3], [3]), ({1, 2}, {2, 3}), ({"x": 1}, ())]
    for _ in range(2):
        restore_containers(kept)
        assert [held for held, _ in kept] == [{"a": 1, "b": 2}, [3], {2, 3}, {}]
    assert list(kept[0][0]) == ["a", "b"]
