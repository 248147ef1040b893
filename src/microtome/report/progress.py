"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


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
