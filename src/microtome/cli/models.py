"""`microtome models`: what can be named as a model."""

from __future__ import annotations

import click

from microtome import zoo


@click.command()
def models() -> None:
    """List the models that can be named here."""
    for name in zoo.names():
        click.echo(f"zoo:{name}")
