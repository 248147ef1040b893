"""Probes, which only observe a session, and interventions, which change the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor

from microtome.engine.call import Call
from microtome.engine.composite_ops import CompositeOp, Function
from microtome.engine.selectors import Selector
from microtome.engine.torch_internals import OpOverload
from microtome.errors import MicrotomeError, ProbeError
from microtome.results.trace import Phase

#: An operator, or a function of torch that the session shows whole.
AnyOp = OpOverload | Function


class Where(NamedTuple):
    """The place where an operator runs.

    Attributes:
        call: The call whose code ran it, or whose backward it is part of; None outside any.
        function: The function of torch that the code called; None in a session that shows none whole, and outside any.
        autocast: Whether that function was called under autocast.
        whole: Of a function that is shown whole, when it has run: this run.
        part_of: Of an operator in a backward: the run of such a function whose backward it is part of.
    """

    call: Call | None
    phase: Phase
    function: Function | None = None
    autocast: bool = False
    composite: CompositeOp | None = None
    part_of: CompositeOp | None = None


class Probe:
    """Looks at a run and cannot change it: what its methods return is ignored.

    Override what you need; a method left alone costs nothing. Every `enter` is followed by one `exit` or one `fail` of
    the same call, also when the forward raises; every `enter_backward` by one `exit_backward`.
    """

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The call begins, with the arguments of the caller or those that a `ReplaceInputs` put in their place."""

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The call ended well."""

    def fail(self, call: Call, error: BaseException) -> None:
        """The call ended by an exception."""

    def op_begins(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator is about to run."""

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """An operator ran, in the thread that opened the session or in a backward that it called."""

    def read(self, where: Where, tensor: Tensor) -> None:
        """Python code reads the values of a tensor without an operator, in a session that shows functions whole."""

    def backward_moves(self, call: Call | None) -> None:
        """The backward goes on with this call; None: with nobody's nodes, or it has ended. Cheaper than all entries."""

    def enter_backward(self, call: Call) -> None:
        """The backward of the call begins, or comes back to it after another."""

    def exit_backward(self, call: Call) -> None:
        """The backward leaves the call."""


@dataclass(frozen=True)
class Replace:
    """Gives the selected calls another output: `by(call, output)` returns it."""

    at: Selector
    by: Callable[[Call, Any], Any]


@dataclass(frozen=True)
class ReplaceInputs:
    """Gives the selected calls other arguments: `by(call, args, kwargs)` returns a tuple and a dict."""

    at: Selector
    by: Callable[[Call, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Skip:
    """Leaves out the forward of the selected modules: `output(call, args, kwargs)` gives what they return instead.

    Attributes:
        when: Asked at each selected call, after all probes, whether to leave it out; None: always.
    """

    at: Selector
    output: Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]
    when: Callable[[Call], bool] | None = None


@dataclass(frozen=True)
class Stop:
    """Ends the run at the exit of the first selected call, by raising `Stopped` through the model.

    Attributes:
        when: Asked at the exit of each selected call, after all probes, whether to end there; None: at the first.
    """

    at: Selector
    when: Callable[[Call], bool] | None = None


@dataclass(frozen=True)
class ReplaceOp:
    """Gives operators another output: `by(where, func, args, kwargs)` returns it, or NotImplemented to have it run."""

    by: Callable[[Where, AnyOp, tuple[Any, ...], dict[str, Any]], Any]


Intervention = Replace | ReplaceInputs | Skip | Stop | ReplaceOp


class Stopped(BaseException):
    """A `Stop` was reached. Not an `Exception`, so that a model that catches those does not swallow it.

    Attributes:
        call: The call that was stopped at.
        output: What that call returned.
    """

    def __init__(self, call: Call, output: Any) -> None:
        super().__init__(f"stopped at the exit of {call.address!r}")
        self.call = call
        self.output = output


# -- notification ------------------------------------------------------------------------------------------------------


def overridden_methods(probes: Iterable[Probe], name: str, *, skip_root: bool = False) -> list[Callable[..., None]]:
    """The probes' methods of this name, without those that only inherit the empty one.

    Args:
        skip_root: Whether the model itself is not looked at; it is in the session, since its call is the run.
    """
    methods = [getattr(probe, name) for probe in probes if getattr(type(probe), name) is not getattr(Probe, name)]
    return [_except_root(method) for method in methods] if skip_root else methods


def _except_root(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def told(call: Call, *details: Any) -> None:
        if call.path:
            method(call, *details)

    return told


def notify(methods: Iterable[Callable[..., None]], event: str, call: Call, *details: Any) -> None:
    """Tell every probe; then raise what the first of them raised, if any did."""
    failed: MicrotomeError | None = None
    for method in methods:
        try:
            method(call, *details)
        except MicrotomeError as error:  # says itself what is wrong
            failed = failed or error
        except Exception as error:  # noqa: BLE001  whatever a probe raises, the user must learn at which call
            name = getattr(method, "__qualname__", repr(method))
            message = f"{name} raised {type(error).__name__} at {event} of {call.address!r}: {error}"
            failed = failed or _with_cause(ProbeError(message, call.address), error)
    if failed is not None:
        raise failed


def notify_backward_step(methods: Iterable[Callable[..., None]], call: Call | None) -> None:
    if call is not None:
        notify(methods, "the backward", call)
        return
    for method in methods:
        method(None)


def _with_cause(error: ProbeError, cause: Exception) -> ProbeError:
    error.__cause__ = cause
    return error
