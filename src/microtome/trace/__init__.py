"""One run of a model as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from microtome.trace.run import trace

if TYPE_CHECKING:
    from microtome.trace.data import How, Memory, Op, Trace, TracedCall, Value

__all__ = ["How", "Memory", "Op", "Trace", "TracedCall", "Value", "trace"]


def __getattr__(name: str) -> Any:
    """Import the classes when they are first asked for: they take half as long to make as all else in microtome."""
    if name in __all__:
        from microtome.trace import data

        return getattr(data, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
