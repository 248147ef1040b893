"""Times on the command line: a number of seconds, or one with a unit, such as 100ms."""

from __future__ import annotations

import click

from microtome.errors import BadQuery
from microtome.units import parse_seconds


def positive_duration(text: str | float) -> float:
    """Return the seconds of `2`, `100ms` or `1min`; raise for 0."""
    return _parse(text, "of more than 0", is_positive=True)


def duration(text: str | float) -> float:
    """Return the seconds of `0`, `2`, `100ms` or `1min`."""
    return _parse(text, "of 0 or more", is_positive=False)


def _parse(text: str | float, bound: str, *, is_positive: bool) -> float:
    try:
        seconds = parse_seconds(_number(text))
    except BadQuery:
        seconds = -1.0
    if seconds < 0 or (is_positive and not seconds):
        raise click.BadParameter(f"expected a time {bound}, such as 100ms or 2, in seconds, got {text!r}")
    return seconds


def _number(text: str | float) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text
