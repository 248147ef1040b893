"""Kinds of modules: those that torchstat has a formula for, and the warning for the others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from microtome.engine import tensors_in
from microtome.errors import BadInputs

T = TypeVar("T")

_PACKAGE = str(Path(__file__).parents[2])


class Misuse(BadInputs, AssertionError):
    """An argument that torchstat asserts not to be given."""


def first(value: Any) -> Any:
    """The first tensor in what a module takes or returns, or None."""
    return next(tensors_in(value), None)


def known(what: str, module: nn.Module, count: T | None, zero: T) -> T:
    """The count, or zero and a warning if torchstat has no formula."""
    if count is None:
        warn_caller(f"[{what}]: {type(module).__name__} is not supported: counted as 0")
        return zero
    return count


def for_kinds(compute: Callable[[nn.Module, Any, Any], T], *kinds: type[nn.Module]) -> Callable[..., T]:
    """The function for modules of these kinds alone."""

    def compute_kind(module: nn.Module, inp: Any, out: Any) -> T:
        if not isinstance(module, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise Misuse(f"expected a module of the kind {names}, got {type(module).__name__}")
        return compute(module, inp, out)

    return compute_kind


def warn_caller(text: str) -> None:
    """Warn at the line outside microtome that led here: in every call, where Python's default is once for each line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, module)
