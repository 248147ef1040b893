"""Text for terminals: shortened names, and charts of stacked bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from microtome.errors import sanitize_text
from microtome.units import seconds

#: The most characters of a name.
_NAME = 34
_CUT_OFF = "→"
Row = TypeVar("Row")


def shorten(name: str, most: int) -> str:
    """Leave out the middle of a name that is too long, since addresses differ at their ends; its indent, too.

    >>> shorten("encoder.layer.11.attention.output", 20)
    'encode…ention.output'
    >>> shorten("            attn", 10)
    '     …attn'
    """
    if len(name) <= most:
        return name
    bare = name.lstrip(" ")
    full_indent = len(name) - len(bare)
    indent = min(full_indent, max(most - len(bare) - 1, most // 3))
    begin = " " * indent + ("…" if indent < full_indent else "")
    room = most - len(begin)
    if len(bare) <= room:
        return begin + bare
    return f"{begin}{bare[: room // 3]}…{bare[len(bare) - (room - room // 3 - 1) :]}"


# -- charts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackedBar:
    """A bar with its name and its sum.

    Attributes:
        parts: The character, the seconds, and whether a part above 0 s has at least one character.
    """

    name: str
    mark: str
    total_s: float
    parts: tuple[tuple[str, float, bool], ...]


def stacked_bars(bars: Sequence[StackedBar], longest_s: float, width: int) -> list[str]:
    """Draw bars below each other; those above `longest_s` are cut off."""
    marks = max(len(bar.mark) for bar in bars) + 1
    names = min(max(len(bar.name) for bar in bars), max(2 * width // 5, 12), _NAME)
    room = width - names - marks - 11
    whole = min(max(bar.total_s for bar in bars), longest_s) or 1.0
    return [
        f"{bar.mark:<{marks}}{shorten(sanitize_text(bar.name), names):<{names}} {seconds(bar.total_s):>8} "
        f"{_draw(bar, whole, room)}".rstrip()
        for bar in bars
    ]


def _draw(bar: StackedBar, whole: float, room: int) -> str:
    drawn, at_s = "", 0.0
    for character, spent, is_visible in bar.parts:
        at_s += spent
        end = round(min(room * at_s / whole, room + 1))
        drawn += character * max(end - len(drawn), int(is_visible and spent > 0))
    return drawn[:room] if bar.total_s <= whole else drawn[: room - 1] + _CUT_OFF


def sample(rows: Sequence[Row], most: int, is_required: Callable[[Row], bool]) -> list[Row]:
    """Return all rows, or, of many, an even sample with the first, the last, and the required ones."""
    if len(rows) <= most:
        return list(rows)
    even = {round(step * (len(rows) - 1) / (most - 1)) for step in range(most)}
    return [row for index, row in enumerate(rows) if index in even or is_required(row)]
