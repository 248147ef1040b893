"""One run of a model as data."""

from microtome.trace.trace import trace

__all__ = ["trace"]
