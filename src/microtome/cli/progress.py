"""Notes and warnings on stderr, and the progress bar of commands."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import click

from microtome.errors import sanitize_text
from microtome.report.progress import show_progress

__all__ = ["print_notes", "print_warnings", "show_progress"]


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        click.echo(sanitize_text(f"Note: {note}"), err=True)


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print each different warning in the block once, as a line without the source line that Python adds."""
    printed: set[str] = set()

    def print_warning(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in printed:
            printed.add(str(message))
            click.echo(sanitize_text(f"Warning: {message}"), err=True)

    with warnings.catch_warnings():
        warnings.showwarning = print_warning
        yield
