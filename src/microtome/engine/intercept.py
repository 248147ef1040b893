"""The one place where microtome gets between a module and its forward, and between the user and autograd.

`nn.Module.__call__` runs `self._compiled_call_impl` instead of `_call_impl` when it is not None; that is how
`Module.compile` works. While a session is open, this attribute of the class `nn.Module` is a descriptor that sends
every module call through the open sessions. That encloses the module's own hooks, sees every argument and every way a
call can end, adds nothing to any module, and costs less than one hook. A data descriptor goes before what an instance
holds, so a module compiled in place runs as Python too.

`backward()` and `autograd.grad` both go through `torch.autograd._engine_run_backward`, which is wrapped in the same
way.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Container
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from microtome.errors import Unsupported

_CALL = "_compiled_call_impl"
_BACKWARD = "_engine_run_backward"

AnyCall = Callable[..., Any]


class Interceptor(Protocol):
    """A session as the chain sees it."""

    changes_runs: bool
    feeds: bool
    fast_paths: bool

    @property
    def others(self) -> Container[int]: ...
    def wrap_call(self, inner: AnyCall | None) -> AnyCall: ...
    def wrap_change(self, inner: AnyCall | None) -> AnyCall: ...
    def wrap_backward(self, inner: AnyCall) -> AnyCall: ...


class Chain:
    """The open sessions of the process, each wrapped around those before it.

    Sessions that change runs are innermost, so that the others see the changed values whichever was opened first. One
    that changes arguments is in two places: there, and outermost, where it changes them before the others see them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[Interceptor] = []
        self._undo: list[Callable[[], object]] = []
        self._eager = False
        self._slow = False
        self._backward: AnyCall = vars(torch.autograd)[_BACKWARD]

    def add(self, session: Interceptor) -> None:
        with self._lock:
            self.run_eagerly()
            if not session.fast_paths and not self._slow:
                self._fast_paths_off()
            if not self._open:
                self._backward = vars(torch.autograd)[_BACKWARD]
                self._undo.append(partial(setattr, torch.autograd, _BACKWARD, self._backward))
                self._undo.append(partial(setattr, nn.Module, _CALL, vars(nn.Module)[_CALL]))
            self._open.append(session)
            self._rebuild()

    def remove(self, session: Interceptor) -> None:
        with self._lock:
            self._open = [other for other in self._open if other is not session]
            if self._open:
                self._rebuild()
                return
            missed = not self._eager and "torch._dynamo" in sys.modules
            while self._undo:
                self._undo.pop()()
            self._eager = self._slow = False
            if missed:
                self._warn_of_compiled()

    def _rebuild(self) -> None:
        call: AnyCall | None = None
        backward = self._backward
        inside_out = sorted(self._open, key=lambda session: not session.changes_runs)
        for session in inside_out:
            call = session.wrap_change(call) if session.feeds else session.wrap_call(call)
            backward = session.wrap_backward(backward)
        for session in inside_out:
            if session.feeds:
                call = session.wrap_call(call)
        assert call is not None
        setattr(nn.Module, _CALL, _Slot(call, self._open[0].others if len(self._open) == 1 else ()))
        setattr(torch.autograd, _BACKWARD, backward)

    def _fast_paths_off(self) -> None:
        """Keep TransformerEncoderLayer and MultiheadAttention from running their children inside one fused operator."""
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._slow = True
        self._undo.append(partial(torch.backends.mha.set_fastpath_enabled, before))

    def run_eagerly(self) -> None:
        """Have compiled code run as Python, for it calls no modules. Nothing is compiled before dynamo is imported."""
        if self._eager or "torch._dynamo" not in sys.modules:
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
        if torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            warnings.warn(
                "compiled code ran in this session before torch.compile could be told to run as Python: calls of "
                "modules inside it were not seen. Call torch.compile before the session is opened.",
                RuntimeWarning,
                stacklevel=4,
            )


class _Slot:
    """Stands for every module's `_compiled_call_impl`; what a module stores under that name waits until it is gone."""

    def __init__(self, call: AnyCall, others: Container[int]) -> None:
        self._call = call
        self._others = others

    def __get__(self, module: nn.Module | None, kind: type) -> AnyCall | None:
        # Torch asks twice if it is not None: what nobody looks at runs faster this way than through the sessions.
        return None if module is None or id(module) in self._others else MethodType(self._call, module)

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[_CALL] = value

    def __delete__(self, module: nn.Module) -> None:
        if module.__dict__.pop(_CALL, None) is None:
            raise AttributeError(_CALL)


chain = Chain()
