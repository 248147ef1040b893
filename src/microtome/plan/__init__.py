"""Choose where to cut a model, from its costs on each device and the link between them."""

from microtome.plan.plan import plan

__all__ = ["plan"]
