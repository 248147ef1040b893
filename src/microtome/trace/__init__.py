"""One run of a model as data."""

from microtome.trace.run import trace
from microtome.trace.trace import How, Memory, Op, Trace, TracedCall, Value

__all__ = ["How", "Memory", "Op", "Trace", "TracedCall", "Value", "trace"]
