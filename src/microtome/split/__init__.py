"""Cutting a model into parts that give together exactly what it gives."""

from microtome.split.split import split

__all__ = ["split"]
