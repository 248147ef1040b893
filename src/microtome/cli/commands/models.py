"""`microtome models`: list the models that can be named."""

from __future__ import annotations

import json

import click

from microtome.cli.completion import cache_names
from microtome.cli.interrupts import import_torch
from microtome.cli.options.outputs import Outputs, output_options
from microtome.cli.options.repetition import Command
from microtome.cli.progress import print_notes, show_progress


@click.command(cls=Command)
@click.argument("pattern", required=False)
@output_options("json")
def models(pattern: str | None, *, outputs: Outputs) -> None:
    """List the available models.

    PATTERN: a word matches anywhere in the name; a pattern such as 'torchvision:resnet*' must match all of it. Models
    in Python code are not listed; name them package.module:Name or ./file.py:Name. Without PATTERN, shell completion
    learns the names.
    """
    import_torch()
    with show_progress("listing models"):
        from microtome import zoo

        listing = zoo.listing(pattern)
    if pattern is None:
        cache_names(listing.names)
    print_notes(listing.notes)
    outputs.write({"json": lambda: json.dumps(listing.names, indent=1) + "\n"}, lambda: "\n".join(listing.names))
