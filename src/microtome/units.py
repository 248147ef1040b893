"""Numbers as text for people: the one place where that is done.

>>> count(1_814_073_344), count(999), count(0)
('1.81 G', '999', '0')
>>> size(605_152), size(512)
('591 KiB', '512 B')
>>> seconds(0.00123), seconds(2.5)
('1.23 ms', '2.5 s')
>>> joules(0.00123), watts(687.4)
('1.23 mJ', '687 W')
>>> rate(2_500_000), rate(125)
('20 Mbps', '1 Kbps')
>>> share(1, 3), shape((1, 3, 224, 224))
('33.3 %', '1x3x224x224')
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from microtome.errors import BadQuery

Unit = Literal["count", "bytes", "seconds", "joules", "watts", "ratio", "fraction"]

UNKNOWN = "–"  # noqa: RUF001


def count(number: float | None) -> str:
    """With three digits, and a letter for thousands, millions and so on."""
    return _scaled(number, 1000, ("", " k", " M", " G", " T", " P", " E"))


def size(nbytes: float | None) -> str:
    """Bytes, in steps of 1024."""
    return _scaled(nbytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"))


def parse_size(text: int | str) -> int:
    """Bytes, from a number or a text: KB, MB, GB, TB are powers of 1000, KiB, MiB, GiB, TiB of 1024.

    >>> parse_size("4GB"), parse_size("1.5 MiB"), parse_size(10)
    (4000000000, 1572864, 10)
    """
    if isinstance(text, int) and text > 0:
        return text
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?\s*", str(text), re.IGNORECASE)
    nbytes = 0
    if found:
        power = " kmgt".index((found[2] or " ").lower())
        nbytes = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if nbytes <= 0:
        raise BadQuery(f"{text!r} is no number of bytes: write such as 4GB or 256MiB")
    return nbytes


def rate(bytes_per_s: float | None) -> str:
    """A speed of a link, in bits, with three digits."""
    if bytes_per_s is None:
        return UNKNOWN
    bits, at = 8.0 * bytes_per_s, 0
    while bits >= 999.5 and at < 4:
        bits /= 1000
        at += 1
    return f"{bits:.3g} {('', 'K', 'M', 'G', 'T')[at]}bps"


def parse_rate(text: float | str) -> float:
    """Bytes a second, from a text; a number is that of bits a second. `b` is a bit and `B` is a byte.

    >>> parse_rate("20Mbps"), parse_rate("20 Mbit/s"), parse_rate("2.5MB/s"), parse_rate(8000)
    (2500000.0, 2500000.0, 2500000.0, 1000.0)
    """
    if isinstance(text, int | float) and 0 < text < float("inf"):
        return text / 8
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)([bB]|bit)(?:ps|/s)\s*", str(text))
    speed = 0.0
    if found:
        step = 1024 if found[3] else 1000
        speed = float(found[1]) * step ** " kmgt".index((found[2] or " ").lower()) / (1 if found[4] == "B" else 8)
    if speed <= 0:
        raise BadQuery(f"{text!r} is no speed of a link: write such as 20Mbps, in bits, or 2.5MB/s, in bytes")
    return speed


def parse_seconds(text: float | str) -> float:
    """A time, from a text; a number is that of seconds.

    >>> parse_seconds("15ms"), parse_seconds("0.5 s"), parse_seconds(2)
    (0.015, 0.5, 2.0)
    """
    if isinstance(text, int | float) and 0 <= text < float("inf"):
        return float(text)
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s|min)\s*", str(text))
    if not found:
        raise BadQuery(f"{text!r} is no time: write such as 15ms or 0.2s")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}[found[2]]


def seconds(number: float | None) -> str:
    """A time, in the unit that fits it."""
    return UNKNOWN if number is None else _scaled_down(number, "s")


def joules(number: float | None) -> str:
    """An energy, in the unit that fits it."""
    return UNKNOWN if number is None else _scaled_down(number, "J")


def watts(number: float | None) -> str:
    return UNKNOWN if number is None else _scaled_down(number, "W")


def share(part: float | None, whole: float | None) -> str:
    return UNKNOWN if part is None or not whole else f"{100 * part / whole:.1f} %"


def ratio(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def fraction(part: float | None) -> str:
    """A part of a whole, in per cent."""
    return UNKNOWN if part is None else f"{100 * part:.0f} %"


def write(value: Any, unit: Unit | None) -> str:
    """A value in its unit; without one, a number as a count, and anything else as it is.

    >>> write(2048, "bytes"), write(0.5, "fraction"), write(None, "joules") == UNKNOWN, write("launch", None)
    ('2.00 KiB', '50 %', True, 'launch')
    """
    if unit is None:
        return count(value) if value is None or isinstance(value, int | float) else str(value)
    return _WRITERS[unit](value)


def shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


def _scaled(number: float | None, step: int, units: Sequence[str]) -> str:
    if number is None:
        return UNKNOWN
    at = 0
    while abs(number) >= step - 0.5 and at < len(units) - 1:
        number /= step
        at += 1
    if at == 0:
        return f"{number:,}{units[0]}"
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{digits}f}{units[at]}"


def _scaled_down(number: float, unit: str) -> str:
    """With three digits, in the unit or in thousandths, millionths and so on of it."""
    if abs(number) < 0.5e-9:
        return f"0 {unit}"
    for letter, size_ in (("", 1.0), ("m", 1e-3), ("u", 1e-6)):
        if abs(number) >= size_:
            return f"{number / size_:.3g} {letter}{unit}"
    return f"{number / 1e-9:.0f} n{unit}"


_WRITERS: dict[Unit, Callable[[Any], str]] = {
    "count": count,
    "bytes": size,
    "seconds": seconds,
    "joules": joules,
    "watts": watts,
    "ratio": ratio,
    "fraction": fraction,
}
