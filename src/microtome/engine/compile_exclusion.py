"""Functions that torch.compile leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from microtome.engine.torch_internals import disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")


def run_uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function run as Python where torch.compile traces its caller: it breaks the graph there.

    For functions that open sessions. `torch.compiler.disable` does the same, and imports dynamo to do it.
    """
    outside: Callable[P, R] = disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # true only while dynamo traces this line
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call
