"""Text for terminals: shortened names, and charts of stacked bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from rich.text import Text

from microtome.errors import sanitize_text
from microtome.units import Unit, write

#: The least characters of a bar for whose sake a name is shortened.
_BAR = 24
_CUT_OFF = "→"
Row = TypeVar("Row")


def shorten(name: str, most: int) -> str:
    """Shorten a name that is too long, and its indent: the parts of a path but its indices and its end.

    >>> shorten("encoder.layer.11.attention.output", 22)
    'enc…lay…11.att…output'
    >>> shorten("            attn", 10), shorten("a_very_long_name_without_parts", 12)
    ('     …attn', 'a_ve…t_parts')
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
    return begin + (_shorten_parts(bare, room) or f"{bare[: room // 3]}…{bare[len(bare) - (room - room // 3 - 1) :]}")


def _shorten_parts(path: str, most: int) -> str | None:
    """Shorten the parts of a path to the same length, except indices and the last; None if that is not enough."""
    *parts, last = path.split(".")

    def shortened(part: str, length: int) -> str:
        return f"{part}." if part.isdecimal() or len(part) <= length else f"{part[:length]}…"

    for length in range(max(map(len, parts), default=0), 0, -1):
        text = "".join(shortened(part, length) for part in parts) + last
        if len(text) <= most:
            return text
    return None


# -- charts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackedBar:
    """A bar with its name and its sum.

    Attributes:
        parts: The character, the amount, and whether a part above 0 has at least one character.
    """

    name: str
    mark: str
    total: float
    parts: tuple[tuple[str, float, bool], ...]


def stacked_bars(
    bars: Sequence[StackedBar], longest: float, width: int, colours: Mapping[str, str], unit: Unit = "seconds"
) -> list[Text]:
    """Draw bars below each other; those above `longest` are cut off.

    Args:
        colours: The colour of each character.
        unit: The unit of the sums.
    """
    marks = max(len(bar.mark) for bar in bars) + 1
    figures = marks + 11
    names = min(max(len(bar.name) for bar in bars), max(width - figures - _BAR, 12))  # whole, to be copied
    room = width - names - figures
    whole = min(max(bar.total for bar in bars), longest) or 1.0
    lines = []
    for bar in bars:
        name = shorten(sanitize_text(bar.name), names)
        line = Text(f"{bar.mark:<{marks}}{name:<{names}} {write(bar.total, unit):>8} ")
        lines.append(line.append_text(colour_characters(_draw(bar, whole, room), colours)))
        lines[-1].rstrip()
    return lines


def colour_characters(text: str, colours: Mapping[str, str]) -> Text:
    """Return the text with each of some characters in a colour."""
    runs = ("".join(run) for _, run in groupby(text))
    return Text.assemble(*((run, colours.get(run[0], "")) for run in runs))


def _draw(bar: StackedBar, whole: float, room: int) -> str:
    drawn, reached = "", 0.0
    for character, amount, is_visible in bar.parts:
        reached += amount
        end = round(min(room * reached / whole, room + 1))
        drawn += character * max(end - len(drawn), int(is_visible and amount > 0))
    return drawn[:room] if bar.total <= whole else drawn[: room - 1] + _CUT_OFF


def sample(rows: Sequence[Row], most: int, is_required: Callable[[Row], bool]) -> list[Row]:
    """Return all rows, or, of many, an even sample with the first, the last, and the required ones."""
    if len(rows) <= most:
        return list(rows)
    even = {round(step * (len(rows) - 1) / (most - 1)) for step in range(most)}
    return [row for index, row in enumerate(rows) if index in even or is_required(row)]
