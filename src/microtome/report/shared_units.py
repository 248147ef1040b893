"""One unit for all numbers of a column, so that they can be compared by their length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from microtome.units import UNKNOWN, Unit

_UP = {"count": (1000.0, ("", "k", "M", "G", "T", "P", "E")), "bytes": (1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))}
_DOWN = {"seconds": "s", "joules": "J", "watts": "W"}
#: Units that are scaled by powers of ten or of 1024.
SCALED = {*_UP, *_DOWN}


class Scale(NamedTuple):
    """A unit, and the number of digits after the point.

    Attributes:
        size: The value of one unit.
        unit: Its name; empty for plain numbers.
    """

    size: float
    unit: str
    digits: int

    def write(self, number: float | None) -> str:
        """A number in the unit; one that would round to 0 is written as less than the last digit."""
        if not number:
            return UNKNOWN if number is None else "0"
        least = 10.0**-self.digits
        scaled = number / self.size
        if 0 < scaled <= least / 2:
            return f"<{least:.{self.digits}f}"
        return f"{scaled:,.{self.digits}f}"


def scale_of_largest(numbers: Iterable[float | None], unit: Unit) -> Scale:
    """The unit in which the largest of several numbers has three digits.

    >>> scale = scale_of_largest([9_355_584, 73_728, 12], "count")
    >>> scale.unit, [scale.write(number) for number in (9_355_584, 73_728, 12)]
    ('M', ['9.36', '0.07', '<0.01'])
    >>> scale_of_largest([0.0023, 0.0000041], "seconds").write(0.0000041)
    '<0.01'
    >>> Scale(1000.0, "k", 0).write(500)
    '<1'
    """
    known = [abs(number) for number in numbers if number is not None]
    most = max(known, default=0.0)
    size, name = _down(most, _DOWN[unit]) if unit in _DOWN else _up(most, *_UP[unit])
    if size == 1.0 and unit in _UP:
        return Scale(size, name, 0)
    scaled = most / size
    return Scale(size, name, 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0)


#: The most characters of a number in a unit smaller than its own.
_WIDEST = 8


def scale_of_all(numbers: Iterable[float | None], unit: Unit) -> Scale | None:
    """The unit in which the least of several numbers has two digits, or one; None where the most then has no room.

    >>> scale = scale_of_all([9_355_584, 73_728, 640], "count")
    >>> scale.unit, [scale.write(number) for number in (9_355_584, 73_728, 640)]
    ('k', ['9,355.58', '73.73', '0.64'])
    >>> scale_of_all([0.00013, 0.0000072], "seconds").write(0.0000072)
    '7.2'
    >>> scale_of_all([9_355_584_000, 640], "count") is None
    True
    """
    known = [abs(number) for number in numbers if number]
    first = scale_of_largest(known, unit)
    if not known or (first.size == 1.0 and unit in _UP):
        return first
    smaller = [Scale(*one, digits) for one in _units(unit) if one[0] <= first.size for digits in (0, 1, 2)]
    fitting = [scale for scale in (first, *smaller) if len(scale.write(max(known))) <= _WIDEST]
    for least in (10, 1):
        for scale in fitting:
            if min(known) / scale.size >= least * 10.0**-scale.digits:
                return scale
    return None


def _units(unit: Unit) -> list[tuple[float, str]]:
    """The multiples of a unit, the largest first."""
    if unit in _DOWN:
        return [(size, letter + _DOWN[unit]) for letter, size in (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9))]
    step, names = _UP[unit]
    return [(step**at, name) for at, name in reversed(list(enumerate(names)))]


def _up(most: float, step: float, units: tuple[str, ...]) -> tuple[float, str]:
    at = 0
    while most >= (step - 0.5) * step**at and at < len(units) - 1:
        at += 1
    return step**at, units[at]


def _down(most: float, unit: str) -> tuple[float, str]:
    for letter, size in (("", 1.0), ("m", 1e-3), ("u", 1e-6)):
        if most >= size:
            return size, letter + unit
    return (1e-9, f"n{unit}") if most else (1.0, unit)
