"""Compare the gradients of a split model with those of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

#: The most that two orders of a sum may differ, in units of the dtype's precision: about 1e-6 for float32.
_MAX_UNITS = 8


class GradientComparison(NamedTuple):
    """Differences between the gradients of the stages and those of the whole model, on the example.

    Attributes:
        largest: The largest absolute difference; 0: they are equal bit for bit.
        relative: The largest difference of a gradient, relative to its largest absolute number or, where rounding
            errors are all there is, to that of all gradients.
        trained: For each stage, the names of the parameters that get a gradient in it.
    """

    largest: float
    relative: float
    trained: tuple[frozenset[str], ...]

    @property
    def tied(self) -> dict[str, list[int]]:
        """The parameters that several stages have gradients of, with these stages."""
        names = dict.fromkeys(name for stage in self.trained for name in sorted(stage))
        holders = {name: [index for index, stage in enumerate(self.trained) if name in stage] for name in names}
        return {name: stages for name, stages in holders.items() if len(stages) > 1}

    def __str__(self) -> str:
        return "bit-equal" if not self.largest else f"equal within {self.relative:.1g}"


class GradientMismatch(NamedTuple):
    """A gradient that differs by more than the order of its sums explains.

    Attributes:
        expected: The largest absolute number of the gradient in the whole model; None: it has none.
        difference: The largest absolute difference of that of the stages; None: they have none.
    """

    name: str
    expected: float | None
    difference: float | None

    def __str__(self) -> str:
        if self.difference is None:
            return f"expected a gradient of {self.name}, got none"
        if self.expected is None:
            return f"expected no gradient of {self.name}, as in the whole model, got one"
        return (
            f"expected the gradient of {self.name}, of numbers up to {self.expected:.3g}, got one that differs by "
            f"{self.difference:.3g}"
        )


def compare_gradients(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    trained: tuple[frozenset[str], ...],
    precision: float = 0.0,
) -> GradientComparison | GradientMismatch:
    """Compare gradients by name; return the first that differs, if any does.

    Args:
        precision: The relative precision that the model computes with, where that is less than the gradients have, as
            under autocast.
    """
    if missing := sorted(expected.keys() - found.keys()):
        return GradientMismatch(missing[0], _largest(expected[missing[0]]), None)
    if extra := sorted(found.keys() - expected.keys()):
        return GradientMismatch(extra[0], None, _largest(found[extra[0]]))
    overall = max(map(_largest, expected.values()), default=0.0)
    largest = relative = 0.0
    for name, gradient in expected.items():
        other = found[name]
        if _is_equal(other, gradient):
            continue
        difference = _largest(other.to(gradient.device) - gradient)
        own = _largest(gradient)
        allowed = _MAX_UNITS * max(torch.finfo(gradient.dtype).eps, precision)
        is_lost = not _largest(other) and own > 0
        # A gradient that is 0 but for rounding errors, as that of a key's bias in attention, has the errors of others.
        if is_lost or not difference <= allowed * max(own, overall):
            return GradientMismatch(name, own, difference)
        largest = max(largest, difference)
        relative = max(relative, difference / own if difference <= allowed * own else difference / overall)
    return GradientComparison(largest, relative, trained)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.to(other.device), other, rtol=0, atol=0, equal_nan=True)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
