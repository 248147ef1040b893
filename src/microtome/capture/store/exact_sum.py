"""Sums of floats without rounding: integers times powers of two."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

#: The form in files, with as many digits and as large an exponent as sums of squares of float64 can have.
_TEXT = re.compile(r"(-?)0x([0-9a-f]{1,2000})p(-?[0-9]{1,4})")


@dataclass(slots=True, eq=False)
class ExactSum:
    """The number `mantissa * 2 ** exponent`.

    Sums are exact, so they do not depend on the order of the terms.

    >>> total = ExactSum()
    >>> for number in (1e100, 0.1, -1e100):
    ...     total.add(*split_float(number))
    >>> total.divide(1), total
    (0.1, 0xccccccccccccdp-55)
    """

    mantissa: int = 0
    exponent: int = 0

    def add(self, mantissa: int, exponent: int) -> None:
        """Add `mantissa * 2 ** exponent`."""
        if not self.mantissa:
            self.mantissa, self.exponent = mantissa, exponent
        elif exponent >= self.exponent:
            self.mantissa += mantissa << exponent - self.exponent
        else:
            self.mantissa, self.exponent = (self.mantissa << self.exponent - exponent) + mantissa, exponent

    def divide(self, divisor: int) -> float:
        """Return the quotient, rounded once; infinite if it is too large for a float."""
        try:
            return (self.mantissa << max(self.exponent, 0)) / (divisor << max(-self.exponent, 0))
        except OverflowError:
            return math.inf if self.mantissa > 0 else -math.inf

    def _normalized(self) -> tuple[int, int]:
        """Return the only form with an odd mantissa, or (0, 0)."""
        if not self.mantissa:
            return 0, 0
        zeros = (self.mantissa & -self.mantissa).bit_length() - 1
        return self.mantissa >> zeros, self.exponent + zeros

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExactSum) and self._normalized() == other._normalized()

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __repr__(self) -> str:
        """Return the form that `parse` reads: the only one of a number."""
        mantissa, exponent = self._normalized()
        return f"{mantissa:#x}p{exponent}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what `repr` returned.

        >>> ExactSum.parse("-0x3p-1").divide(1)
        -1.5
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"expected a number such as 0x3p-1, got {text!r:.80}")
        sign, digits, exponent = found.groups()
        return cls(int(sign + digits, 16), int(exponent))


def split_float(number: float) -> tuple[int, int]:
    """Return the mantissa and the exponent of a finite float, as integers."""
    mantissa, exponent = math.frexp(number)
    return int(mantissa * 2.0**53), exponent - 53
