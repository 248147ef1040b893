"""What a recorder is asked for, and whether it makes sense."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from os import PathLike
from typing import Any, SupportsFloat, SupportsIndex

from microtome.errors import BadQuery


def check_wish(*, modules: bool, attention: bool, part: bool, to: Any, append: bool, last: Any) -> None:
    """Raise where what is asked for does not go together.

    Args:
        modules: Whether modules are named.
        part: Whether a part of attention is.
    """
    if modules == attention:
        raise BadQuery("say what to record: modules, or attention=True")
    if part and not attention:
        raise BadQuery("layers, heads and rows are of attention: add attention=True")
    if to is None and append:
        raise BadQuery("append goes on with a folder: say which with `to`")
    if to is not None and not isinstance(to, str | PathLike):
        raise BadQuery(f"`to` is the path of a folder, got {to!r}")
    if to is not None and last is not None:
        raise BadQuery("`last` keeps a ring in memory: leave out `to`, or `last`")


def check_kinds(*, last: Any, histogram: Any, progress: Any) -> None:
    """Raise where something is not of its kind."""
    if last is not None and not _is_count(last):
        raise BadQuery(f"`last` is how many tensors of each name are kept, from 1 on, got {last!r}")
    if histogram is not None and not _are_edges(histogram):
        raise BadQuery(f"a histogram is (bins, low, high), such as (10, -1.0, 1.0), got {histogram!r}")
    if progress is not None and not callable(progress):
        raise BadQuery(f"progress is a function of the Totals, got {progress!r}")


def _is_count(given: Any) -> bool:
    return isinstance(given, SupportsIndex) and index(given) >= 1


def _are_edges(given: Any) -> bool:
    three = isinstance(given, Sequence) and len(given) == 3
    return three and isinstance(given[0], SupportsIndex) and all(isinstance(edge, SupportsFloat) for edge in given[1:])
