"""Numbers as text for people: the one place where that is done.

>>> count(1_814_073_344), count(999), count(0)
('1.81 G', '999', '0')
>>> size(605_152), size(512)
('591 KiB', '512 B')
>>> seconds(0.00123), seconds(2.5)
('1.23 ms', '2.5 s')
>>> joules(0.00123), watts(687.4)
('1.23 mJ', '687 W')
>>> share(1, 3), shape((1, 3, 224, 224))
('33.3 %', '1x3x224x224')
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from microtome.errors import BadQuery

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
