"""The outputs of a command: files, or the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from microtome.results.base import Result, write
from microtome.units import size


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `--json`, `--csv` and `--md`, and as its argument `outputs` the file that each names."""

    @wraps(command)
    def with_outputs(
        *args: Any, json_file: str | None, csv_file: str | None, md_file: str | None, **options: Any
    ) -> None:
        command(*args, outputs={"--json": json_file, "--csv": csv_file, "--md": md_file}, **options)

    for option in (
        click.option("--md", "md_file", metavar="F", help="Write a Markdown table; - for the terminal."),
        click.option("--csv", "csv_file", metavar="F", help="Write CSV, raw numbers; - for the terminal."),
        click.option(
            "--json", "json_file", metavar="F", help="Write JSON that microtome.load reads; - for the terminal."
        ),
    ):
        with_outputs = option(with_outputs)
    return with_outputs


def refuse_same(outputs: Mapping[str, str | None]) -> None:
    """Raise if an option has no file, or two have the same."""
    seen: dict[str, str] = {}
    for option, file in outputs.items():
        if file == "":
            raise click.UsageError(f"{option} needs the name of a file, or - for the terminal")
        if file in seen:
            raise click.UsageError(f"{seen[file]} and {option} both write to {file!r}")
        if file is not None:
            seen[file] = option


def put_result(
    outputs: Mapping[str, str | None],
    result: Result,
    shown: Callable[[], str] | None = None,
    **others: Callable[[], str],
) -> None:
    """Write a result to the files that options name, or show it.

    Args:
        shown: Makes the text for the terminal, where it is not that of the whole result.
        others: Make the text for other options, such as `html`, or for `csv` and `md` with a selection of rows.
    """
    make = {"json": result.to_json, "csv": result.to_csv, "md": result.to_markdown, **others}
    put(outputs, {f"--{name.replace('_', '-')}": one for name, one in make.items()}, shown or partial(str, result))


def put(outputs: Mapping[str, str | None], make: Mapping[str, Callable[[], str]], shown: Callable[[], str]) -> None:
    """Write what options ask for, and name the files; if nothing went to the terminal, show the result there."""
    for option, file in outputs.items():
        if file == "-":
            click.echo(make[option](), nl=False)
        elif file is not None:
            write(make[option](), file)
    if "-" not in outputs.values():
        click.echo(shown())
    files = [Path(file) for file in outputs.values() if file is not None and file != "-" and Path(file).is_file()]
    if files:
        click.echo(f"written: {', '.join(f'{file} ({size(file.stat().st_size)})' for file in files)}", err=True)
