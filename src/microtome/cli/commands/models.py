"""`microtome models`: what can be named as a model."""

from __future__ import annotations

import json
from typing import TextIO

import click

from microtome import zoo
from microtome.cli.options.model import say


@click.command()
@click.argument("pattern", required=False)
@click.option(
    "--json", "json_file", type=click.File("w"), help="Write the names as JSON to this file; - for the terminal."
)
def models(pattern: str | None, json_file: TextIO | None) -> None:
    """List the models that can be named here.

    PATTERN is matched against the whole name, such as 'torchvision:resnet*'. Python code can be named too, as
    package.module:Name or ./file.py:Name.
    """
    found = zoo.listing(pattern)
    say(found.notes)
    if json_file is not None:
        json.dump(found.names, json_file, indent=1)
        json_file.write("\n")
    if json_file is None or json_file.name != "<stdout>":
        click.echo("\n".join(found.names))
