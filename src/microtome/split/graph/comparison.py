"""Compare what a compiled or exported stage returns with what the stage returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microtome.errors import Unsupported
from microtome.split.comparison import differences
from microtome.split.verification import BIT_EQUAL


def compare_outputs(got: Any, expected: Any, name: str, tolerance: float | None = None) -> str:
    """Return `"bit-equal"`, or the largest difference.

    Each tensor is compared at its own scale, the largest of its numbers; integers and booleans are equal.

    Args:
        name: Of what returned `got`, for errors.
        tolerance: The largest difference that is rounding, relative to the scale; None: half of its digits.

    Raises:
        Unsupported: They differ by more than rounding.
    """
    worst = (0.0, BIT_EQUAL)
    for one in differences(got, expected):
        if one.largest is None or one.expected is None:
            raise Unsupported(f"{name} returns another output{one.path}: {one.description}")
        dtype = one.expected.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            raise Unsupported(f"{name} returns outputs{one.path} of {dtype} that differ")
        scale = _scale_of(one.expected)
        text = f"{one.largest:.3g}, of numbers up to {scale:.3g}"
        allowed = tolerance or torch.finfo(dtype).eps ** 0.5
        if not one.largest <= allowed * scale:
            raise Unsupported(f"{name} returns outputs{one.path} that differ by {text}")
        worst = max(worst, (one.largest / scale, f"the outputs differ by at most {text}"))
    return worst[1]


def _scale_of(tensor: Tensor) -> float:
    """The largest number that is finite."""
    numbers = tensor.abs()
    numbers = numbers[numbers.isfinite()]
    return float(numbers.max()) if numbers.numel() else 0.0
