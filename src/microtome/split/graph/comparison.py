"""Compare what a compiled or exported stage returns with what the stage returns."""

from __future__ import annotations

import math
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
        tolerance: The largest difference that is rounding, relative to the scale, but at least the last three bits of
            its numbers; None: half of its digits.

    Raises:
        Unsupported: They differ by more than rounding.
    """
    worst = (0.0, BIT_EQUAL)
    for one in differences(got, expected):
        where = f"outputs{one.path}"
        if one.largest is None or one.expected is None:
            raise Unsupported(f"{name} returns another output than the stage: {where}: {one.description}")
        dtype = one.expected.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            raise Unsupported(f"{name}: expected {where} of {dtype} to equal those of the stage, got others")
        scale = _scale_of(one.expected)
        if math.isinf(one.largest):
            raise Unsupported(
                f"{name}: expected {where} to be finite where those of the stage are, got infinity or NaN elsewhere, "
                "as of a row of attention that a mask of padding excludes whole: pad the example on the right"
            )
        text = f"{one.largest:.3g}, of numbers up to {scale:.3g}"
        eps = torch.finfo(dtype).eps
        if not one.largest <= (eps**0.5 if tolerance is None else max(tolerance, 8 * eps)) * scale:
            raise Unsupported(f"{name}: expected {where} of the stage, got others that differ by {text}")
        worst = max(worst, (one.largest / scale, f"the outputs differ by at most {text}"))
    return worst[1]


def _scale_of(tensor: Tensor) -> float:
    """The largest number that is finite."""
    numbers = tensor.abs()
    numbers = numbers[numbers.isfinite()]
    return float(numbers.max()) if numbers.numel() else 0.0
