"""Apply torchstat's formulas to modules, and warn where there is none."""

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


class InvalidArgument(BadInputs, AssertionError):
    """An invalid argument; torchstat raises an AssertionError."""


def first_tensor(value: Any) -> Any:
    """Return the first tensor in the arguments or the output of a module; None if there is none."""
    return next(tensors_in(value), None)


def count(
    quantity: str, formula: Callable[[nn.Module, Any, Any], T | None], zero: T, module: nn.Module, inp: Any, out: Any
) -> T:
    """Apply a formula to a call of a module; return zero and warn if torchstat has none for its type."""
    result = formula(module, first_tensor(inp), first_tensor(out))
    if result is None:
        warn_caller(f"[{quantity}]: {type(module).__name__} is not supported: counted as 0")
        return zero
    return result


def for_types(compute: Callable[[nn.Module, Any, Any], T], *types: type[nn.Module]) -> Callable[..., T]:
    """Return a function that accepts only modules of these types."""

    def compute_type(module: nn.Module, inp: Any, out: Any) -> T:
        if not isinstance(module, types):
            names = " or ".join(expected.__name__ for expected in types)
            raise InvalidArgument(f"expected a module of type {names}, got {type(module).__name__}")
        return compute(module, inp, out)

    return compute_type


def warn_caller(text: str) -> None:
    """Warn at the caller's line outside microtome, on every call: Python's default is once for each line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, module)
