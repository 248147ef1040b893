"""The outputs of a command: `--json`, `--csv`, `--html` and others write files, or `-` for stdout."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from microtome.cli.completion import complete_file
from microtome.cli.progress import print_notes
from microtome.errors import BadFile
from microtome.results.base import Result, write
from microtome.units import size

_HELP = {
    "json": "Write JSON; - for stdout.",
    "csv": "Write CSV with raw numbers; - for stdout.",
    "md": "Write a Markdown table; - for stdout.",
    "html": "Write a self-contained HTML page; - for stdout.",
    "perfetto": "Write a trace for https://ui.perfetto.dev; - for stdout.",
    "speedscope": "Write a trace for https://www.speedscope.app; - for stdout.",
    "svg": "Write an SVG picture; - for stdout.",
    "dot": "Write a Graphviz graph; - for stdout.",
    "measure_codecs": "Measure codecs on this machine, and write their costs as JSON.",
}

#: The suffixes of the formats that output options write; perfetto and speedscope are JSON.
_SUFFIXES = {
    "json": (".json",),
    "csv": (".csv",),
    "md": (".md", ".markdown"),
    "html": (".html", ".htm"),
    "svg": (".svg",),
    "dot": (".dot", ".gv"),
}
#: The suffixes of formats that no option writes.
_OTHER_SUFFIXES = {".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".pdf", ".ps", ".eps"}

open_option = click.option("--open", "is_opened", is_flag=True, help="Open the page in a browser.")


class Outputs:
    """The file of each output option, None where it is not set."""

    def __init__(self, files: Mapping[str, str | None]) -> None:
        self.files = dict(files)
        check_distinct(files)
        for name, file in files.items():
            if file not in (None, "-"):
                check_suffix(name, file)
                check_writable(file)

    def write_result(
        self, result: Result, shown: Callable[[], str] | None = None, **formats: Callable[[], str]
    ) -> None:
        """Write a result to files, or print it.

        Args:
            shown: Returns the text to print, if it is not `str(result)`.
            formats: Return the text of other outputs than JSON, CSV and Markdown, or of these for selected rows.
        """
        defaults = {"json": result.to_json, "csv": result.to_csv, "md": result.to_markdown}
        self.write({**defaults, **formats}, shown or partial(str, result))

    def write(self, formats: Mapping[str, Callable[[], str]], shown: Callable[[], str] | None) -> None:
        """Write each output whose option is set and name the files; print `shown` unless an output went to stdout."""
        for name, file in self.files.items():
            if file == "-":
                click.echo(formats[name](), nl=False)
            elif file is not None:
                write(formats[name](), file)
        if shown is not None and "-" not in self.files.values():
            click.echo(shown())
        files = [Path(file) for file in self.files.values() if file not in (None, "-") and Path(file).is_file()]
        if files:
            click.echo(f"written: {', '.join(f'{file} ({size(file.stat().st_size)})' for file in files)}", err=True)


def output_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add output options to a command, which receives them as `outputs`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapper(*args: Any, **options: Any) -> None:
            files = {name: options.pop(f"{name}_file") for name in names}
            command(*args, outputs=Outputs(files), **options)

        for name in reversed(names):
            option = click.option(
                _flag(name), f"{name}_file", metavar="F", help=_HELP[name], shell_complete=complete_file
            )
            wrapper = option(wrapper)
        return wrapper

    return decorate


def check_distinct(files: Mapping[str, str | None]) -> None:
    """Raise if two options write to the same file, or if the name of one is empty."""
    options: dict[str, str] = {}
    for name, file in files.items():
        if file == "":
            raise click.UsageError(f"{_flag(name)}: expected the name of a file, or - for stdout")
        if file in options:
            raise click.UsageError(f"{options[file]} and {_flag(name)} both write to {file!r}")
        if file is not None:
            options[file] = _flag(name)


def check_suffix(name: str, file: str) -> None:
    """Raise if the suffix of a file is that of another format; one of no format is as good as any."""
    own, suffix = _SUFFIXES.get(name, (".json",)), Path(file).suffix.lower()
    if suffix not in own and suffix in _OTHER_SUFFIXES.union(*_SUFFIXES.values()):
        expected = Path(file).with_suffix(own[0]).name
        raise click.UsageError(f"{_flag(name)} writes {own[0]}: expected a file such as {expected}, got {file!r}")


def check_writable(file: str) -> None:
    """Raise if a file cannot be written, before the run whose results it is for."""
    path = Path(file)
    if path.is_dir():
        code = errno.EISDIR
    elif not path.parent.is_dir():
        code = errno.ENOENT
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        code = errno.EACCES
    else:
        return
    advice = f": create the folder {str(path.parent)!r} first" if code == errno.ENOENT else ""
    raise BadFile(f"cannot write {file!r}: {os.strerror(code)}{advice}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_opened(file: str | None, option: str, *, is_opened: bool) -> None:
    """Raise if `--open` is set and the page is not written to a file."""
    if is_opened and file in (None, "-"):
        raise click.UsageError(f"--open needs a page in a file: expected {option} FILE, got {file or 'none'}")


def open_page(file: str) -> None:
    """Open a page in a browser, if there is one."""
    import webbrowser

    if not webbrowser.open(Path(file).resolve().as_uri()):
        print_notes([f"there is no browser to open {file} in"])
