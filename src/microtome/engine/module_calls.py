"""The one place where microtome gets between a module and its forward, and between the user and autograd.

`nn.Module.__call__` runs `self._compiled_call_impl` instead of `_call_impl` when it is not None; that is how
`Module.compile` works. While a session is open, this attribute of the class `nn.Module` is a descriptor that sends
every module call through the open sessions. That encloses the module's own hooks, sees every argument and every way a
call can end, adds nothing to any module, and costs less than one hook. A data descriptor goes before what an instance
holds, so a module compiled in place runs as Python too.

Torch reads the attribute twice in each call: once to compare it with None, and again to call it. Other threads may be
between the two reads when a session opens or closes, so a slot never answers None for a module, and the last session
leaves a `_PassThrough` behind as long as some thread is between them.

`backward()` and `autograd.grad` both go through `torch.autograd._engine_run_backward`, which is wrapped in the same
way.
"""

from __future__ import annotations

import dis
import sys
import threading
import warnings
from collections.abc import Callable, Container
from functools import partial, wraps
from types import FrameType, MethodType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from microtome.engine.thread_stacks import outer_frames, thread_frames
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
    """A session as the chain sees it."""

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

    Sessions that change runs are innermost, so that the others see the changed values whichever was opened first. One
    that changes arguments is in two places: there, and outermost, where it changes them before the others see them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[Interceptor] = []
        self._undo: list[Callable[[], object]] = []
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
                self._undo.append(partial(_uninstall, _original_attribute()))
            self._open.append(session)
            self._rebuild()

    def remove(self, session: Interceptor) -> None:
        with self._lock:
            self._open = [other for other in self._open if other is not session]
            if self._open:
                self._rebuild()
                return
            missed = not self._eager and is_dynamo_imported()
            while self._undo:
                self._undo.pop()()
            self._eager = self._fast_paths_disabled = False
            if missed:
                self._warn_of_compiled()

    def run_untracked_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run autograd's engine without telling the open sessions."""
        return self._backward(*args, **kwargs)

    def _rebuild(self) -> None:
        call: AnyCall | None = None
        backward = self._backward
        inside_out = sorted(self._open, key=lambda session: not session.changes_runs)
        for session in inside_out:
            call = session.wrap_output(call) if session.replaces_inputs else session.wrap_call(call)
            backward = session.wrap_backward(backward)
        for session in inside_out:
            if session.replaces_inputs:
                call = session.wrap_call(call)
        assert call is not None
        setattr(nn.Module, MODULE_CALL, _CallSlot(call, self._open[0].ignored if len(self._open) == 1 else ()))
        setattr(torch.autograd, RUN_BACKWARD, backward)

    def _disable_fast_paths(self) -> None:
        """Keep TransformerEncoderLayer and MultiheadAttention from running their children inside one fused operator."""
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._fast_paths_disabled = True
        self._undo.append(partial(torch.backends.mha.set_fastpath_enabled, before))

    def force_eager(self) -> None:
        """Have compiled code run as Python, for it calls no modules. Nothing is compiled before dynamo is imported."""
        if self._eager or not is_dynamo_imported():
            return
        with self._lock:
            try:
                stance = torch.compiler.set_stance("force_eager")
            except RuntimeError as error:
                raise Unsupported(
                    "a session cannot see into compiled code that is already running. Open the session outside the "
                    "compiled function, and call torch.compile before it is opened."
                ) from error
            self._eager = True
            self._undo.append(partial(stance.__exit__, None, None, None))

    def _warn_of_compiled(self) -> None:
        """Dynamo was imported while a session was open, and what it compiled ran before any module did."""
        if count_compiled_graphs():
            warnings.warn(
                "compiled code ran in this session before torch.compile could be told to run as Python: calls of "
                "modules inside it were not seen. Call torch.compile before the session is opened.",
                RuntimeWarning,
                stacklevel=4,
            )


class _CallSlot:
    """Stands for every module's `_compiled_call_impl`; what a module stores under that name waits until it is gone."""

    def __init__(self, call: AnyCall, ignored: Container[int]) -> None:
        self._call = call
        self._ignored = ignored

    def __get__(self, module: nn.Module | None, kind: type) -> AnyCall | None:
        if module is None:
            return None
        # What nobody looks at runs faster this way than through the sessions.
        return module._call_impl if id(module) in self._ignored else MethodType(self._call, module)

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[MODULE_CALL] = value

    def __delete__(self, module: nn.Module) -> None:
        if module.__dict__.pop(MODULE_CALL, None) is None:
            raise AttributeError(MODULE_CALL)


class _PassThrough(_CallSlot):
    """Replaces the slot of the last session until no thread is between torch's two reads of the attribute.

    It answers a first read as torch would, so that no further thread comes to depend on it, and a second read with
    something to call. Each read tries to remove it.
    """

    def __init__(self) -> None:
        super().__init__(nn.Module._call_impl, ())

    def __get__(self, module: nn.Module | None, kind: type) -> AnyCall | None:
        caller = sys._getframe(1)
        if not _is_read_anywhere(but=caller):
            self.remove()
        compiled: AnyCall | None = None if module is None else module.__dict__.get(MODULE_CALL)
        if module is None or compiled is not None or not _is_at(caller, _SECOND_READ):
            return compiled
        return module._call_impl

    def remove(self) -> None:
        with chain._lock:
            if vars(nn.Module)[MODULE_CALL] is self:
                setattr(nn.Module, MODULE_CALL, None)


def _original_attribute() -> Any:
    """The attribute as torch or somebody else set it."""
    held = vars(nn.Module)[MODULE_CALL]
    return None if isinstance(held, _PassThrough) else held


def _uninstall(found: Any) -> None:
    """Give the attribute back what it held, at once if no thread is about to call what it read as not None."""
    if found is None and _is_installed():
        passing = _PassThrough()
        setattr(nn.Module, MODULE_CALL, passing)  # from now on, only those who are between the reads can need it
        if _is_read_anywhere():
            return
    setattr(nn.Module, MODULE_CALL, found)


def _is_installed() -> bool:
    return isinstance(vars(nn.Module)[MODULE_CALL], _CallSlot)


def _reads() -> tuple[range, range]:
    """The offsets in the bytecode of `nn.Module.__call__` from its first read to its second, and of the second."""
    offsets = [step.offset for step in dis.get_instructions(WRAPPED_CALL)] + [len(WRAPPED_CALL.co_code)]
    reads = [step.offset for step in dis.get_instructions(WRAPPED_CALL) if step.argval == MODULE_CALL]
    if len(reads) < 2:  # one read cannot disagree with itself
        return range(0), range(0)
    end = offsets[offsets.index(reads[-1]) + 1]
    return range(reads[0], end), range(reads[-1], end)


_BOTH_READS, _SECOND_READ = _reads()


def _is_at(frame: FrameType, offsets: range) -> bool:
    return frame.f_code is WRAPPED_CALL and frame.f_lasti in offsets


def _is_read_anywhere(*, but: FrameType | None = None) -> bool:
    """Whether any thread is at one of the two reads or between them; in the midst of it, other code may run."""
    return any(
        frame is not but and _is_at(frame, _BOTH_READS)
        for top in thread_frames().values()
        for frame in outer_frames(top)
    )


chain = CallbackChain()


P = ParamSpec("P")
R = TypeVar("R")


def run_uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function run as Python where torch.compile traces its caller: it breaks the graph there.

    For functions that open sessions. `torch.compiler.disable` does the same, and imports dynamo to do it.
    """
    outside: Callable[P, R] = disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # true only while dynamo traces this line
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call
