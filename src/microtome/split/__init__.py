"""Cutting a model into parts that give together exactly what it gives."""

from microtome.split.run import split

__all__ = ["split"]
