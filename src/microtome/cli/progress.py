"""Progress, notes and warnings on stderr."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import click

from microtome.errors import sanitize_text


@contextmanager
def show_progress(description: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a spinner on a terminal; it becomes a bar when the yielded callback gets a step, its count and the total."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, markup=False, emoji=False)
    if not console.is_terminal:  # rich would print an empty line
        yield lambda step, done, total: None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    with ExitStack() as stack:
        spinner = stack.enter_context(console.status(description))
        bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, refresh_per_second=4)
        task = bar.add_task(description)

        def update(step: str, done: int, total: int) -> None:
            if not bar.live.is_started:  # rich shows only one live display at a time
                spinner.stop()
                stack.enter_context(bar)
            bar.update(task, description=f"{description}: {step}", completed=done, total=total)

        yield update


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
