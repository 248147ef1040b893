"""Defer signals while a model or the process is being changed or restored.

Python runs signal handlers in the main thread, between any two bytecodes, and most of them raise: that of Ctrl-C raises
KeyboardInterrupt. Raised while a session opens or closes, or while weights are restored, it would leave the rest
undone. So, while anything of the engine is open, a handler of its own is installed in front of the user's. It calls the
user's at once, unless the main thread is inside the `__enter__` or `__exit__` of a `SignalSafe`; then the signal is
deferred to their end. The block inside, such as a forward, can be interrupted as ever.

Signals are deferred, too, inside operators that are implemented in Python (a dispatch mode, a fake or meta tensor):
torch's C++ code cannot always propagate an exception from there, and the process would abort. The same holds where
torch pushes and pops modes: interrupted generators of torch would push a mode when they are freed. The next module call
delivers the signal.

The handler inspects the frames on the stack instead of a flag, because a signal may arrive after Python has called
`__exit__` and before its first line runs. CPython checks for signals at the start of a function, after calls, and at
backward jumps: so nothing is called between the last check of pending signals and the end of `__enter__`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # ten times faster than `signal`, which converts to enums
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from microtome.engine.thread_stacks import outer_frames
from microtome.engine.torch_internals import (
    OPERATOR_FILES,
    dispatch_modes,
    function_modes,
    mode_flags,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    set_mode_flags,
)

P = ParamSpec("P")
T = TypeVar("T")

#: Signals whose handlers may raise. The most likely one is last, and so restored last.
_NUMBERS = [
    getattr(signal, name)
    for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGTERM", "SIGBREAK", "SIGINT")
    if hasattr(signal, name)
]


class _Signals:
    """The user's handlers, while those of the engine are installed in front of them."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._uses = 0
        self.pending: list[int] = []

    def acquire(self) -> bool:
        """Install the handler; False in threads other than the main one, which handle no signals."""
        if threading.get_ident() != threading.main_thread().ident:
            return False
        if not self._uses:
            self.pending.clear()  # left by signals in quick succession, of which another one was delivered
            try:
                for number in _NUMBERS:
                    handler = _signal.getsignal(number)
                    if callable(handler) and handler != self.handle:
                        self._handlers[number] = handler
                        _signal.signal(number, self.handle)
            except BaseException:
                self._restore()
                raise
        self._uses += 1
        return True

    def release(self) -> None:
        self._uses -= 1
        if not self._uses and threading.get_ident() == threading.main_thread().ident:
            self._restore()

    def _restore(self) -> None:
        try:
            for number in _NUMBERS:
                if number in self._handlers and _signal.getsignal(number) == self.handle:
                    _signal.signal(number, self._handlers[number])
        except BaseException:  # raised by a handler that is restored already
            self._restore()
            raise

    def handle(self, number: int, frame: FrameType | None) -> None:
        if _is_deferred(frame):
            if number not in self.pending:  # the operating system, too, queues one of each
                self.pending.append(number)
            return
        self._handlers[number](number, frame)
        self.deliver(frame)

    def deliver(self, frame: FrameType | None) -> None:
        """Call the handlers of all pending signals, whatever they raise."""
        if not self.pending:
            return
        number = self.pending.pop(0)
        try:
            self._handlers[number](number, frame)
        finally:
            self.deliver(frame)


_signals = _Signals()
_MAX_REPEATS = 1000


class SignalSafe(Generic[T]):
    """A context manager whose entry and exit are not interrupted: signals are deferred to their end.

    Subclasses define `_set_up` and `_tear_down` instead of `__enter__` and `__exit__`.
    """

    _acquired = False

    def _set_up(self) -> T:
        raise NotImplementedError

    def _tear_down(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        raise NotImplementedError

    def __enter__(self) -> T:
        acquired = _signals.acquire()
        try:
            entered = self._set_up()
        except BaseException:
            self._leave(acquired)
            raise
        while _signals.pending and acquired and not _is_deferred(sys._getframe(1)):
            try:
                _signals.deliver(sys._getframe(1))
            except BaseException as error:
                try:
                    self._tear_down(type(error), error, error.__traceback__)
                finally:
                    self._leave(acquired)
                raise
        self._acquired = acquired
        return entered

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> bool | None:
        acquired, self._acquired = self._acquired, False
        try:
            return self._tear_down(kind, error, trace)
        finally:
            self._leave(acquired)

    def _leave(self, acquired: bool) -> None:
        if acquired:
            try:
                _signals.release()
            finally:  # a handler that is restored may raise
                if _signals.pending and not _is_deferred(sys._getframe(2)):
                    _signals.deliver(sys._getframe(2))


_DEFERRING = {SignalSafe.__enter__.__code__, SignalSafe.__exit__.__code__}
_TORCH = os.path.dirname(torch.__file__)
#: Files and folders of torch that implement operators in Python, and push and pop modes.
_OPERATORS = tuple(os.path.join(_TORCH, *name.split("/")) for name in OPERATOR_FILES)


def _is_deferred(frame: FrameType | None) -> bool:
    return any(
        outer.f_code in _DEFERRING
        or outer.f_code.co_name == "__torch_dispatch__"
        or outer.f_code.co_filename.startswith(_OPERATORS)
        for outer in outer_frames(frame)
    )


#: Deferred signals; nearly always empty.
pending_signals = _signals.pending


def deliver_signals() -> None:
    """Call the handlers of pending signals, unless signals are still deferred."""
    caller = sys._getframe(1)
    if threading.get_ident() == threading.main_thread().ident and not _is_deferred(caller):
        _signals.deliver(caller)


class _Block(SignalSafe[T]):
    def __init__(self, block: AbstractContextManager[T]) -> None:
        self._block = block

    def _set_up(self) -> T:
        return self._block.__enter__()

    def _tear_down(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._block.__exit__(kind, error, trace)


def signal_safe(function: Callable[P, Iterator[T]]) -> Callable[P, SignalSafe[T]]:
    """Make a generator function return a `SignalSafe`, as `contextlib.contextmanager` makes it a context manager."""
    make = contextmanager(function)

    @wraps(function)
    def enter(*args: P.args, **kwargs: P.kwargs) -> SignalSafe[T]:
        return _Block(make(*args, **kwargs))

    return enter


@signal_safe
def grad_mode(enabled: bool) -> Iterator[None]:
    """Enable or disable gradients in the block."""
    with torch.set_grad_enabled(enabled):
        yield


def complete_step(step: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Repeat a step that restores something until it is complete, then raise the exception that interrupted it.

    C code may raise an asynchronous exception in any thread. The step must be idempotent.
    """
    interrupt: BaseException | None = None
    for _ in range(_MAX_REPEATS):
        try:
            step(*args, **kwargs)
            break
        except Exception:
            raise
        except BaseException as error:  # noqa: BLE001  raised at the end
            interrupt = error
    if interrupt is not None:
        raise interrupt


class Modes:
    """The current stacks of function and dispatch modes, to be restored after an interrupt.

    A signal that arrives while torch pushes or pops a mode, as its own Python code often does for operators on fake
    tensors, leaves the stack as it is at that moment.
    """

    def __init__(self) -> None:
        self._functions = function_modes()
        self._dispatch = dispatch_modes()
        self._flags = mode_flags()

    def restore_after(self, _: object, error: BaseException | None, __: object) -> None:
        """Restore the stacks if the block was interrupted. For `ExitStack.push`."""
        if error is not None and not isinstance(error, Exception):
            self.restore()

    def restore(self) -> None:
        if function_modes() != self._functions:
            while function_modes():
                pop_function_mode()
            for mode in self._functions:
                push_function_mode(mode)
        if dispatch_modes() != self._dispatch:
            while stack := dispatch_modes():
                pop_dispatch_mode(stack[-1])
            for mode in self._dispatch:
                push_dispatch_mode(mode)
        set_mode_flags(self._flags)
