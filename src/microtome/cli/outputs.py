"""Where a command's result goes: to files, or to the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import click

from microtome.results import write


def refuse_same(outputs: Mapping[str, str | None]) -> None:
    """Raise where options have no file, or two have the same."""
    seen: dict[str, str] = {}
    for option, file in outputs.items():
        if file == "":
            raise click.UsageError(f"{option} needs the name of a file, or - for the terminal")
        if file in seen:
            raise click.UsageError(f"{seen[file]} and {option} both write to {file!r}")
        if file is not None:
            seen[file] = option


def put(outputs: Mapping[str, str | None], make: Mapping[str, Callable[[], str]], shown: Callable[[], str]) -> None:
    """Write what options ask for; if none of it went to the terminal, show the result there."""
    for option, file in outputs.items():
        if file == "-":
            click.echo(make[option](), nl=False)
        elif file is not None:
            write(make[option](), file)
    if "-" not in outputs.values():
        click.echo(shown())
