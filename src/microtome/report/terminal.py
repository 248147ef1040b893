"""Drawing for terminals and for Markdown, where a name may hold anything and a table must not."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from microtome.errors import printable

#: The width of text that goes to a file or a pipe.
_WIDTH = 140
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def plain_text(draw: Callable[[int], Any]) -> str:
    """What `draw` gives for a width, as text: coloured if the standard output is a terminal, unless NO_COLOR is set."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal or "COLUMNS" in os.environ else _WIDTH
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, legacy_windows=False)
    console.print(Printable(draw(width)))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


class Printable:
    """What rich draws, cleaned by `printable`: the colours are ours, and no text brings its own."""

    def __init__(self, drawn: Any) -> None:
        self._drawn = drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._drawn, options):
            yield Segment(printable(text, keep="\n"), style, control)


def escaped(text: str) -> str:
    """Text as Markdown that shows it as it is, in a table, too.

    >>> escaped("a<b>&amp; *c* | d")
    'a&lt;b&gt;&amp;amp; \\\\*c\\\\* \\\\| d'
    """
    safe = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", safe)


def code(name: str) -> str:
    """A name as a code span of Markdown, in a table, too.

    >>> code("layer1.0"), code("a|b"), code("`tick`")
    ('`layer1.0`', '`a\\\\|b`', '`` `tick` ``')
    """
    if not name:
        return ""
    safe = printable(name).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", safe)), default=0))
    return f"{fence} {safe} {fence}" if len(fence) > 1 else f"`{safe}`"


def bar(part: float | None, whole: float | None, width: int = 8) -> str:
    """A share as a bar.

    >>> bar(1, 2, width=4) + "|", bar(1, 16, width=4) + "|"
    ('██  |', '▎   |')
    >>> bar(-1, 2, width=4) + "|"
    '    |'
    """
    eighths = round(8 * width * min(max((part or 0) / whole, 0), 1)) if whole else 0
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def fitted(columns: Sequence[str], widths: dict[str, int], importance: Sequence[str], room: int) -> tuple[str, ...]:
    """The columns that fit side by side, the least important left out.

    >>> fitted("abc", {"a": 5, "b": 9, "c": 5}, importance="cab", room=18)
    ('a', 'c')
    """
    kept = list(importance)
    while kept and sum(widths[name] + 3 for name in kept) > room:
        kept.pop()
    return tuple(name for name in columns if name in kept)


def shortened(name: str, most: int) -> str:
    """A name with its middle left out where it is too long: addresses differ at their ends.

    >>> shortened("encoder.layer.11.attention.output", 20)
    'encode…ention.output'
    """
    if len(name) <= most:
        return name
    return f"{name[: most // 3]}…{name[len(name) - (most - most // 3 - 1) :]}"
