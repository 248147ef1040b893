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
    """Print warnings in the block as a line each, without the source line that Python adds."""

    def print_warning(message: Warning | str, *_: object, **__: object) -> None:
        click.echo(sanitize_text(f"Warning: {message}"), err=True)

    with warnings.catch_warnings():
        warnings.showwarning = print_warning
        yield
