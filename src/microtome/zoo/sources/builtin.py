"""`zoo:NAME`: the built-in models."""

from __future__ import annotations

from functools import partial
from typing import Any

from microtome.zoo.builtin import names, parts
from microtome.zoo.sources.source import FoundModel

PACKAGE = "microtome"

__all__ = ["PACKAGE", "find", "names"]


def find(name: str, args: dict[str, Any]) -> FoundModel:
    make, inputs = parts(name)
    return FoundModel(partial(make, **args), lambda _: inputs())
