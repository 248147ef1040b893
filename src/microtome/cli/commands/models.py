"""`microtome models`: list the models that can be named."""

from __future__ import annotations

import json

import click

from microtome import zoo
from microtome.cli.options.outputs import Outputs, output_options
from microtome.cli.progress import print_notes


@click.command()
@click.argument("pattern", required=False)
@output_options("json")
def models(pattern: str | None, *, outputs: Outputs) -> None:
    """List the available models.

    PATTERN: a word matches anywhere in the name; a pattern such as 'torchvision:resnet*' must match all of it. Models
    in Python code are not listed; name them package.module:Name or ./file.py:Name.
    """
    listing = zoo.listing(pattern)
    print_notes(listing.notes)
    outputs.write({"json": lambda: json.dumps(listing.names, indent=1) + "\n"}, lambda: "\n".join(listing.names))
