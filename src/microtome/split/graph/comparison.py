"""Compare what a compiled or exported stage returns with what the stage returns."""

from __future__ import annotations

from typing import Any

import torch

from microtome.engine.pytree import tensors_in
from microtome.errors import Unsupported
from microtome.split.comparison import differences
from microtome.split.verification import BIT_EQUAL


def compare_outputs(got: Any, expected: Any, name: str, tolerance: float | None = None) -> str:
    """Return `"bit-equal"`, or the largest difference.

    Args:
        name: Of what returned `got`, for errors.
        tolerance: The largest difference that is rounding, relative to the largest number that is expected; None: half
            of the digits of the dtype.

    Raises:
        Unsupported: They differ by more than rounding.
    """
    found = list(differences(got, expected))
    if not found:
        return BIT_EQUAL
    for one in found:
        if one.largest is None:
            raise Unsupported(f"{name} returns another output{one.path}: {one.description}")
    largest = max(one.largest or 0.0 for one in found)
    numbers = [tensor for tensor in tensors_in(expected) if tensor.is_floating_point() and tensor.numel()]
    scale = max((float(tensor.abs().max()) for tensor in numbers), default=0.0)
    allowed = tolerance or max((torch.finfo(tensor.dtype).eps ** 0.5 for tensor in numbers), default=0.0)
    if not largest <= allowed * scale:
        raise Unsupported(f"{name} returns outputs that differ by {largest:.3g}, of numbers up to {scale:.3g}")
    return f"the outputs differ by at most {largest:.3g}, of numbers up to {scale:.3g}"
