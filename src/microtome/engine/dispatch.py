"""How a session tells its probes what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from microtome.engine.call import Call
from microtome.engine.probes import Probe
from microtome.errors import MicrotomeError, ProbeError


def methods_of(probes: Iterable[Probe], name: str, *, unseen: bool = False) -> list[Callable[..., None]]:
    """The probes' methods of this name, without those that only inherit the empty one.

    Args:
        unseen: Whether the model itself is not looked at; it is in the session, since its call is the run.
    """
    methods = [getattr(probe, name) for probe in probes if getattr(type(probe), name) is not getattr(Probe, name)]
    return [_but_the_root(method) for method in methods] if unseen else methods


def _but_the_root(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def told(call: Call, *details: Any) -> None:
        if call.path:
            method(call, *details)

    return told


def tell(methods: Iterable[Callable[..., None]], event: str, call: Call, *details: Any) -> None:
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
            failed = failed or _because(ProbeError(message, call.address), error)
    if failed is not None:
        raise failed


def tell_moves(methods: Iterable[Callable[..., None]], call: Call | None) -> None:
    if call is not None:
        tell(methods, "the backward", call)
        return
    for method in methods:
        method(None)


def _because(error: ProbeError, cause: Exception) -> ProbeError:
    error.__cause__ = cause
    return error
