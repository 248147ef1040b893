"""Where to cut a model, from what it costs on each device and the link between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from microtome.plan.run import plan

if TYPE_CHECKING:
    from microtome.plan.codecs import CodecCosts, codec_costs
    from microtome.plan.data import Candidate, Plan, Span, Step
    from microtome.plan.link import Link

__all__ = ["Candidate", "CodecCosts", "Link", "Plan", "Span", "Step", "codec_costs", "plan"]

_WHERE = {"CodecCosts": "codecs", "codec_costs": "codecs", "Link": "link"}


def __getattr__(name: str) -> Any:
    """Import the classes when they are first asked for, as `microtome.profile` does."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"microtome.plan.{_WHERE.get(name, 'data')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
