"""Split a model into stages that together compute exactly what it computes."""

from microtome.split.split import split

__all__ = ["split"]
