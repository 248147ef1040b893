"""A page to look at, as commands write it: its options, what it needs beside a profile, and opening it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch

from microtome.cli.options.model import placed, say, working
from microtome.errors import MicrotomeError
from microtome.split.cuts import cuts as find_cuts

if TYPE_CHECKING:
    from microtome.results.cuts import Cuts
    from microtome.zoo import Resolved


def page_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `--html` and `--open`, as its arguments `html_file` and `is_opened`."""
    for option in (
        click.option("--open", "is_opened", is_flag=True, help="Open the page in a browser."),
        click.option("--html", "html_file", metavar="F", help="Write a page to look at; - for the terminal."),
    ):
        command = option(command)
    return command


def refuse_unseen(file: str | None, *, is_opened: bool) -> None:
    """Raise where a page is to be opened that is in no file."""
    if is_opened and file in (None, "-"):
        raise click.UsageError("--open needs a page in a file: name one")


def page_cuts(found: Resolved, device: str | None) -> Cuts | None:
    """List the cuts of the model for the page; print a note and return None where that fails."""
    found = placed(found, device)
    try:
        with working(f"cutting {found.name}"), torch.no_grad():
            return find_cuts(found.model, found.inputs)
    except MicrotomeError as error:
        say((f"the page does not say where to cut: {error}",))
        return None


def open_page(file: str) -> None:
    """Show a page in the browser, where there is one."""
    import webbrowser

    if not webbrowser.open(Path(file).resolve().as_uri()):
        say((f"there is no browser to open {file} in",))
