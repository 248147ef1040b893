"""Format numbers and lists for people, and parse numbers: the only code that does.

>>> count(1_814_073_344), count(999), count(0)
('1.81 G', '999', '0')
>>> size(605_152), size(512)
('591 KiB', '512 B')
>>> seconds(0.00123), seconds(2.5)
('1.23 ms', '2.5 s')
>>> seconds(-1e-10), seconds(-2e-9)
('0 s', '-2 ns')
>>> seconds(0.02), seconds(4321)
('20 ms', '4321 s')
>>> joules(0.00123), watts(687.4)
('1.23 mJ', '687 W')
>>> rate(2_500_000), rate(125)
('20 Mbps', '1 Kbps')
>>> share(1, 3), shape((1, 3, 224, 224))
('33.3 %', '1x3x224x224')
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from microtome.errors import BadQuery

Unit = Literal["count", "bytes", "seconds", "joules", "watts", "ratio", "fraction"]

UNKNOWN = "–"  # noqa: RUF001


def _multiples(step: float, names: Sequence[str]) -> list[tuple[float, str]]:
    """Return the multiples of a unit, the largest first."""
    return [(float(step**power), name) for power, name in reversed(list(enumerate(names)))]


def _fractions(unit: str) -> list[tuple[float, str]]:
    return [(1.0, unit), (1e-3, f"m{unit}"), (1e-6, f"u{unit}"), (1e-9, f"n{unit}")]


_MULTIPLES = {
    "count": _multiples(1000, ("", "k", "M", "G", "T", "P", "E")),
    "bytes": _multiples(1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")),
    "bits": _multiples(1000, ("bps", "Kbps", "Mbps", "Gbps", "Tbps")),
}
_FRACTIONS = {"seconds": _fractions("s"), "joules": _fractions("J"), "watts": _fractions("W")}


def _choose_unit(number: float, unit: str) -> tuple[float, str]:
    """Return the value and the name of the multiple or fraction of a unit that suits a number."""
    if unit in _FRACTIONS:
        units, rounding = _FRACTIONS[unit], 1.0
    else:
        units, rounding = _MULTIPLES[unit], 1 - 0.5 / (1024 if unit == "bytes" else 1000)
    if not number:
        return units[0] if unit in _FRACTIONS else units[-1]
    for one in units:
        if abs(number) >= one[0] * rounding:
            return one
    return units[-1]


def _digits(scaled: float) -> int:
    """Return the digits after the point with which a number below 1000 has three digits."""
    return 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0


def _multiple(number: float | None, unit: str) -> str:
    if number is None:
        return UNKNOWN
    value, name = _choose_unit(number, unit)
    scaled = number / value
    return (f"{number:,} {name}" if value == 1.0 else f"{scaled:.{_digits(scaled)}f} {name}").rstrip()


def _fraction(number: float | None, unit: str, *, pads: bool = False) -> str:
    """Format a number with three digits.

    Args:
        pads: Keep zeros at the end, for columns.
    """
    if number is None:
        return UNKNOWN
    number = 0.0 if abs(number) < 0.5e-9 else number  # less than a half would be written as "-0 s"
    value, name = _choose_unit(number, unit)
    scaled = number / value
    digits = 0 if value == 1e-9 or not number else _digits(scaled)
    text = f"{scaled:.{digits}f}"
    return f"{text if pads or not digits else text.rstrip('0').rstrip('.')} {name}"


def count(number: float | None) -> str:
    """Format a number with three digits and a letter for thousands, millions and so on."""
    return _multiple(number, "count")


def size(nbytes: float | None) -> str:
    """Format bytes in powers of 1024."""
    return _multiple(nbytes, "bytes")


def rate(bytes_per_s: float | None) -> str:
    """Format a bandwidth in bits per second."""
    if bytes_per_s is None:
        return UNKNOWN
    value, name = _choose_unit(8.0 * bytes_per_s, "bits")
    return f"{8.0 * bytes_per_s / value:.3g} {name}"


def seconds(number: float | None) -> str:
    return _fraction(number, "seconds")


def joules(number: float | None) -> str:
    return _fraction(number, "joules")


def watts(number: float | None) -> str:
    return _fraction(number, "watts")


def share(part: float | None, whole: float | None) -> str:
    return UNKNOWN if part is None or not whole else f"{100 * part / whole:.1f} %"


def ratio(number: float | None, *, pads: bool = False) -> str:
    if number is None or number >= 999.5:
        return UNKNOWN if number is None else f"{number:,.0f}"
    return f"{number:#.3g}".rstrip(".") if pads else f"{number:.3g}"


def fraction(part: float | None) -> str:
    """Format a part of a whole in per cent."""
    return UNKNOWN if part is None else f"{100 * part:.0f} %"


_WRITERS: dict[Unit, Callable[[Any], str]] = {
    "count": count,
    "bytes": size,
    "seconds": partial(_fraction, unit="seconds", pads=True),
    "joules": partial(_fraction, unit="joules", pads=True),
    "watts": partial(_fraction, unit="watts", pads=True),
    "ratio": partial(ratio, pads=True),
    "fraction": fraction,
}


def write(value: Any, unit: Unit | None) -> str:
    """Format a value of a column in its unit; without one, a number with three digits, and anything else by `str`.

    Numbers of a column have the same number of digits; in sentences, `seconds` and the like drop zeros at the end.

    >>> write(2048, "bytes"), write(0.003, "seconds"), write(0, "seconds"), write(5.2, "ratio"), write(0.5, "fraction")
    ('2.00 KiB', '3.00 ms', '0 s', '5.20', '50 %')
    >>> write(None, "joules") == UNKNOWN, write("launch", None)
    (True, 'launch')
    >>> write(30.71618, None), write(5, None), write(30716.18, None)
    ('30.7', '5', '30.7 k')
    """
    if unit is None and isinstance(value, float) and abs(value) < 999.5:
        return ratio(value, pads=True)
    if unit is None:
        return count(value) if value is None or isinstance(value, int | float) else str(value)
    return _WRITERS[unit](value)


def shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


# -- one unit for the numbers of a column ------------------------------------------------------------------------------

#: Units that have multiples or fractions.
SCALED = {"count", "bytes", *_FRACTIONS}


class Scale(NamedTuple):
    """A multiple of a unit and a number of digits, for numbers that are compared by their length.

    Attributes:
        size: The value of one unit.
        unit: Its name; empty for plain numbers.
        digits: The digits after the point.
    """

    size: float
    unit: str
    digits: int

    def write(self, number: float | None) -> str:
        """Format a number; one that would round to 0 as less than the last digit."""
        if not number:
            return UNKNOWN if number is None else "0"
        least = 10.0**-self.digits
        scaled = number / self.size
        if 0 < scaled <= least / 2:
            return f"<{least:.{self.digits}f}"
        return f"{scaled:,.{self.digits}f}"


def scale_of_largest(numbers: Iterable[float | None], unit: Unit) -> Scale:
    """Return the scale in which the largest of several numbers is below 1000, with two digits after the point.

    >>> scale = scale_of_largest([9_355_584, 73_728, 12], "count")
    >>> scale.unit, [scale.write(number) for number in (9_355_584, 73_728, 12)]
    ('M', ['9.36', '0.07', '<0.01'])
    >>> scale_of_largest([0.0023, 0.0000041], "seconds").write(0.0000041)
    '<0.01'
    >>> Scale(1000.0, "k", 0).write(500)
    '<1'
    """
    largest = max((abs(number) for number in numbers if number is not None), default=0.0)
    value, name = _choose_unit(largest, unit)
    return Scale(value, name, 0 if value == 1.0 and unit in _MULTIPLES else 2)


# -- words -------------------------------------------------------------------------------------------------------------


def plural(number: int, noun: str) -> str:
    """
    >>> plural(1, "cut"), plural(2000, "cut"), plural(2, "pass")
    ('1 cut', '2,000 cuts', '2 passes')
    """
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith(('s', 'ch')) else 's'}"


#: A name that is repeated as an item of a list, without a value.
_REPEATED = re.compile(r"\b(\w+)(?:, \1\b(?![=(.\[]))+")


def merge_repeats(text: str) -> str:
    """Write a name that is repeated in a list once, with its count.

    >>> merge_repeats("DynamicCache(layers=[DynamicLayer, DynamicLayer, DynamicLayer])")
    'DynamicCache(layers=[3 x DynamicLayer])'
    """
    return _REPEATED.sub(lambda match: f"{match[0].count(',') + 1} x {match[1]}", text)


def some(names: Sequence[str], most: int, rest: str = ", …") -> str:
    """Join the first names; `rest` stands for the others.

    >>> some(["a", "b", "c"], 2), some(["a", "b", "c"], 1, " and {} more")
    ('a, b, …', 'a and 2 more')
    """
    return ", ".join(names[:most]) + (rest.format(len(names) - most) if len(names) > most else "")


# -- parsing -----------------------------------------------------------------------------------------------------------

_NUMBER = r"\s*([0-9]+(?:\.[0-9]+)?)\s*"


def parse_size(text: int | str) -> int:
    """Parse bytes: KB, MB, GB, TB are powers of 1000, KiB, MiB, GiB, TiB of 1024.

    >>> parse_size("4GB"), parse_size("1.5 MiB"), parse_size(10)
    (4000000000, 1572864, 10)
    """
    if isinstance(text, int) and text > 0:
        return text
    match = re.fullmatch(_NUMBER + r"(?:([kmgt])(i?))?b?\s*", str(text), re.IGNORECASE)
    nbytes = int(float(match[1]) * _prefix(match[2], match[3])) if match else 0
    if nbytes <= 0:
        raise BadQuery(f"expected a number of bytes, such as 4GB or 256MiB, got {text!r}")
    return nbytes


def parse_rate(text: float | str) -> float:
    """Parse bytes per second; a number is in bits per second. `b` is a bit and `B` is a byte.

    >>> parse_rate("20Mbps"), parse_rate("20 Mbit/s"), parse_rate("2.5MB/s"), parse_rate(8000)
    (2500000.0, 2500000.0, 2500000.0, 1000.0)
    """
    if isinstance(text, int | float) and 0 < text < float("inf"):
        return text / 8
    match = re.fullmatch(_NUMBER + r"([kKmMgGtT]?)(i?)([bB]|bit)(?:ps|/s)\s*", str(text))
    speed = float(match[1]) * _prefix(match[2], match[3]) / (1 if match[4] == "B" else 8) if match else 0.0
    if speed <= 0:
        raise BadQuery(f"expected a bandwidth, such as 20Mbps (bits) or 2.5MB/s (bytes), got {text!r}")
    return speed


def _prefix(letter: str | None, binary: str | None) -> float:
    return float((1024 if binary else 1000) ** " kmgt".index((letter or " ").lower()))


def parse_seconds(text: float | str) -> float:
    """Parse a time; a number is in seconds.

    >>> parse_seconds("15ms"), parse_seconds("0.5 s"), parse_seconds(2)
    (0.015, 0.5, 2.0)
    """
    if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < float("inf"):
        return float(text)
    match = re.fullmatch(_NUMBER + r"(us|ms|s|min)\s*", str(text))
    if not match:
        raise BadQuery(f"expected a time, such as 15ms or 0.2s, got {text!r}")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}[match[2]]
