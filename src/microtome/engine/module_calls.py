"""The two patches of torch through which open sessions intercept module calls and backwards.

`nn.Module.__call__` calls `self._compiled_call_impl`, unless it is None, instead of `_call_impl`; `Module.compile` sets
it. While a session is open, or in a block of `keep_patched`, this attribute of the class `nn.Module` is a descriptor
that routes every module call through the open sessions. That encloses the module's own hooks, passes every argument,
observes every way a call can end, adds nothing to any module, and costs less than one hook. A data descriptor takes
precedence over instance attributes, so a module compiled in place runs eagerly while a session is open.

Torch reads the attribute twice in each call: to compare it with None, and to call it. Other threads may be between the
two reads when a session opens or closes, so the descriptor never returns None for a module, and the last session leaves
a `_PassThrough` in place as long as some thread is between them.

`Tensor.backward` and `autograd.grad` both call `torch.autograd._engine_run_backward`, which is wrapped likewise.
"""

from __future__ import annotations

import dis
import sys
import threading
import warnings
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial, wraps
from types import FrameType, MethodType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from microtome.engine.thread_stacks import thread_stacks
from microtome.engine.torch_internals import (
    MODULE_CALL,
    RUN_BACKWARD,
    WRAPPED_CALL,
    count_compiled_graphs,
    disable_dynamo,
    is_dynamo_imported,
)
from microtome.errors import Unsupported

AnyCall = Callable[..., Any]


class Interceptor(Protocol):
    """The interface of a session that the chain uses."""

    changes_runs: bool
    replaces_inputs: bool
    fast_paths: bool

    @property
    def ignored(self) -> Container[int]: ...
    def wrap_call(self, inner: AnyCall | None) -> AnyCall: ...
    def wrap_output(self, inner: AnyCall | None) -> AnyCall: ...
    def wrap_backward(self, inner: AnyCall) -> AnyCall: ...


class CallbackChain:
    """The open sessions of the process, each wrapped around those before it.

    Sessions with interventions are innermost, so that the others observe the changed values whichever was opened first.
    One that replaces inputs is in the chain twice: there, and outermost, where it replaces them before the others run.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[Interceptor] = []
        self._undo: list[Callable[[], object]] = []
        self._slot: _CallSlot | None = None  # the installed one
        self._original: Any = None  # what was there before it
        self._holds = 0
        self._eager = False
        self._fast_paths_disabled = False
        self._backward: AnyCall = vars(torch.autograd)[RUN_BACKWARD]

    def add(self, session: Interceptor) -> None:
        with self._lock:
            self.force_eager()
            if not session.fast_paths and not self._fast_paths_disabled:
                self._disable_fast_paths()
            if not self._open:
                self._backward = vars(torch.autograd)[RUN_BACKWARD]
                self._undo.append(partial(setattr, torch.autograd, RUN_BACKWARD, self._backward))
                self._undo.append(self._uninstall)
                self._undo.append(raise_recursion_limit())
            self._open.append(session)
            self._rebuild()

    def remove(self, session: Interceptor) -> None:
        with self._lock:
            self._open = [other for other in self._open if other is not session]
            if self._open:
                self._rebuild()
                return
            may_have_missed_calls = not self._eager and is_dynamo_imported()
            while self._undo:
                self._undo.pop()()
            self._eager = self._fast_paths_disabled = False
            if may_have_missed_calls:
                self._warn_of_compiled_code()

    def hold(self) -> None:
        """Keep the attribute of `nn.Module` installed until `release`, also while no session is open."""
        with self._lock:
            self._holds += 1
            if _original_attribute() is None:  # else other code has patched it: calls go there between sessions
                self._install()

    def release(self) -> None:
        with self._lock:
            self._holds -= 1
            if not self._open:
                self._uninstall()

    def _install(self) -> _CallSlot:
        if self._slot is None or vars(nn.Module)[MODULE_CALL] is not self._slot:  # other code may have patched it since
            self._original, self._slot = _original_attribute(), _CallSlot()
            setattr(nn.Module, MODULE_CALL, self._slot)
        return self._slot

    def _uninstall(self) -> None:
        if self._slot is None:
            return
        self._slot.target = None, ()
        if not self._holds or self._original is not None:
            if isinstance(vars(nn.Module)[MODULE_CALL], _CallSlot):  # else other code has patched it since
                _uninstall(self._original)
            self._slot = None

    def run_untracked_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run autograd's engine past the open sessions."""
        return self._backward(*args, **kwargs)

    def _rebuild(self) -> None:
        call: AnyCall | None = None
        backward = self._backward
        innermost_first = sorted(self._open, key=lambda session: not session.changes_runs)
        for session in innermost_first:
            call = session.wrap_output(call) if session.replaces_inputs else session.wrap_call(call)
            backward = session.wrap_backward(backward)
        for session in innermost_first:
            if session.replaces_inputs:
                call = session.wrap_call(call)
        self._install().target = call, self._open[0].ignored if len(self._open) == 1 else ()
        setattr(torch.autograd, RUN_BACKWARD, backward)

    def _disable_fast_paths(self) -> None:
        """Keep TransformerEncoderLayer and MultiheadAttention from fusing their children into one operator."""
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._fast_paths_disabled = True
        self._undo.append(partial(torch.backends.mha.set_fastpath_enabled, before))

    def force_eager(self) -> None:
        """Run compiled code eagerly, since it calls no modules. Nothing is compiled before dynamo is imported."""
        if self._eager or not is_dynamo_imported():
            return
        with self._lock:
            try:
                stance = torch.compiler.set_stance("force_eager")
            except RuntimeError as error:
                raise Unsupported(
                    "a session cannot observe compiled code that is already running. Open the session outside the "
                    "compiled function, and call torch.compile before it is opened."
                ) from error
            self._eager = True
            self._undo.append(partial(stance.__exit__, None, None, None))

    def _warn_of_compiled_code(self) -> None:
        """Warn if dynamo was imported while a session was open, and compiled code ran before any module."""
        if count_compiled_graphs():
            warnings.warn(
                "compiled code ran in this session before it could be made to run eagerly: calls of modules inside it "
                "were not observed. Call torch.compile before the session is opened.",
                RuntimeWarning,
                stacklevel=4,
            )


class _CallSlot:
    """Overrides `_compiled_call_impl` of every module; values that instances store under that name stay hidden.

    Attributes:
        target: The outermost session's `call_module`, None while no session is open; and the ids of modules that no
            session observes.
        is_closing: Whether it waits until no thread is between torch's two reads of the attribute: the first read
            returns what torch expects, so that no further thread comes to depend on it, and the second a callable.
            Each read tries to remove it.
    """

    def __init__(self) -> None:
        self.target: tuple[AnyCall | None, Container[int]] = None, ()
        self.is_closing = False

    def __get__(self, module: nn.Module | None, kind: type) -> AnyCall | None:
        call, ignored = self.target
        if id(module) in ignored:  # first, since most modules are: none of the sessions observes them
            return module._call_impl  # type: ignore[union-attr]
        if module is None:
            if self.is_closing:
                self._remove_unless_read(sys._getframe(1))
            return None
        if call is not None:
            return MethodType(call, module)
        if self.is_closing:
            return self._pass_through(module, sys._getframe(1))
        return module.__dict__.get(MODULE_CALL) or module._call_impl

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[MODULE_CALL] = value

    def __delete__(self, module: nn.Module) -> None:
        if module.__dict__.pop(MODULE_CALL, None) is None:
            raise AttributeError(MODULE_CALL)

    def _pass_through(self, module: nn.Module, caller: FrameType) -> AnyCall | None:
        self._remove_unless_read(caller)
        compiled: AnyCall | None = module.__dict__.get(MODULE_CALL)
        return compiled if compiled is not None or not _is_at(caller, _SECOND_READ) else module._call_impl

    def _remove_unless_read(self, caller: FrameType) -> None:
        if not _is_read_anywhere(ignore=caller):
            with chain._lock:
                if vars(nn.Module)[MODULE_CALL] is self:
                    setattr(nn.Module, MODULE_CALL, None)


def raise_recursion_limit() -> Callable[[], None]:
    """Double Python's recursion limit, and return a function that restores it, unless other code has set it since.

    A call of a module takes four levels of the limit, and each session adds one: a model that runs without a session
    must run in one. These frames take no C stack.
    """
    before = sys.getrecursionlimit()
    ours = 2 * before
    sys.setrecursionlimit(ours)

    def restore() -> None:
        if sys.getrecursionlimit() == ours:
            with suppress(RecursionError):  # raised a few frames below the limit, where the session could just open
                sys.setrecursionlimit(before)

    return restore


def _original_attribute() -> Any:
    """The attribute as torch or other code set it."""
    value = vars(nn.Module)[MODULE_CALL]
    return None if isinstance(value, _CallSlot) else value  # one of ours, that other code has put back


def _uninstall(original: Any) -> None:
    """Restore the attribute, at once unless some thread has read it as not None and is about to call it."""
    slot = vars(nn.Module)[MODULE_CALL]
    if original is None and isinstance(slot, _CallSlot):
        slot.is_closing = True  # from now on, only threads between the reads can need it
        if _is_read_anywhere():
            return
    setattr(nn.Module, MODULE_CALL, original)


def _find_reads() -> tuple[range, range]:
    """The bytecode offsets of `nn.Module.__call__` from its first read to its second, and of the second."""
    offsets = [step.offset for step in dis.get_instructions(WRAPPED_CALL)] + [len(WRAPPED_CALL.co_code)]
    reads = [step.offset for step in dis.get_instructions(WRAPPED_CALL) if step.argval == MODULE_CALL]
    if len(reads) < 2:  # a single read needs no protection
        return range(0), range(0)
    end = offsets[offsets.index(reads[-1]) + 1]
    return range(reads[0], end), range(reads[-1], end)


_BOTH_READS, _SECOND_READ = _find_reads()


def _is_at(frame: FrameType, offsets: range) -> bool:
    return frame.f_code is WRAPPED_CALL and frame.f_lasti in offsets


def _is_read_anywhere(*, ignore: FrameType | None = None) -> bool:
    """Whether any thread is at one of the two reads or between them, where other code may run."""
    frames = [frame for stack in thread_stacks().values() for frame in stack if frame.f_code is WRAPPED_CALL]
    return any(frame is not ignore and frame.f_lasti in _BOTH_READS for frame in frames)


chain = CallbackChain()


P = ParamSpec("P")
R = TypeVar("R")


def run_uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function that opens sessions run eagerly, after a graph break, where torch.compile traces its caller.

    `torch.compiler.disable` does the same, and imports dynamo to do it.
    """
    uncompiled: Callable[P, R] = disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # true only while dynamo traces this line
            return uncompiled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
