"""Track which module runs now, in the forward and in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from microtome.engine import Call, Probe, Session
from microtome.errors import BadQuery, MicrotomeError, ProbeError
from microtome.results.trace import Phase

Callback = Callable[[Call, Phase], object]


class Tracker(Session):
    """The modules that run now, at any moment inside its `with` block. Returned by `track`."""

    @property
    def path(self) -> str | None:
        """The address of the innermost call, or None when no module runs.

        While the model runs, that of a module's first call has no index, since the module may run again: results have
        `#0` if it did. `f"{call.path}#{call.index}"`, of `current`, names the call in any result.
        """
        call = self.current
        return None if call is None else call.address

    @property
    def module(self) -> nn.Module | None:
        """The module of the innermost call, or None when no module runs."""
        call = self.current
        return None if call is None else call.module


def track(
    model: nn.Module | None = None, *, on_enter: Callback | None = None, on_exit: Callback | None = None
) -> Tracker:
    """Track which module of a model, or of the whole process, runs.

    In a backward, calls are known whose forward ran in the block, too.

    Args:
        model: The model. None tracks every module, named by the class of its root: `Net.layer1.0`.
        on_enter: Called as `on_enter(call, phase)` when a call begins. The phase is `"forward"`, `"backward"`, or
            `"recompute"` (a forward inside a backward, as checkpointing does).
        on_exit: Likewise when it ends, also by an exception.

    >>> import torch, microtome as mt
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    >>> with mt.track(net, on_enter=lambda call, phase: print(f"{phase:9}{call.address!r}")) as t:
    ...     net(torch.ones(1, 2)).sum().backward()
    forward  ''
    forward  '0'
    forward  '1'
    backward ''
    backward '1'
    backward '0'
    >>> t.path is None
    True
    """
    probes: list[Probe] = []
    for name, callback in (("on_enter", on_enter), ("on_exit", on_exit)):
        if callback is not None and not callable(callback):
            raise BadQuery(f"expected {name} to be a function of the call and its phase, got {callback!r}")
    if on_enter is not None:
        probes.append(_OnEnter(on_enter))
    if on_exit is not None:
        probes.append(_OnExit(on_exit))
    return Tracker(model, probes, backward=True)


def _name_callback(callback: Callback, name: str) -> Callback:
    """Name the callback, by its parameter of `track`, in an error that it raises."""

    def call_back(call: Call, phase: Phase) -> None:
        try:
            callback(call, phase)
        except MicrotomeError:
            raise
        except Exception as error:
            where = f"in the {phase} of {call.address!r}"
            raise ProbeError(f"{name} raised {type(error).__name__} {where}: {error}", call.address) from error

    return call_back


class _OnEnter(Probe):
    def __init__(self, callback: Callback) -> None:
        self._callback = _name_callback(callback, "on_enter")

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._callback(call, call.phase)

    def enter_backward(self, call: Call) -> None:
        self._callback(call, "backward")


class _OnExit(Probe):
    def __init__(self, callback: Callback) -> None:
        self._callback = _name_callback(callback, "on_exit")

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._callback(call, call.phase)

    def fail(self, call: Call, error: BaseException) -> None:
        self._callback(call, call.phase)

    def exit_backward(self, call: Call) -> None:
        self._callback(call, "backward")
