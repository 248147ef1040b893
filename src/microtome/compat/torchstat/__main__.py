"""`python -m microtome.compat.torchstat -f FILE.py -m MODEL [-s 3x224x224]`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from torch import nn

from microtome.compat.torchstat import stat
from microtome.engine.selectors import check_model
from microtome.errors import MicrotomeError, NoMatch, describe_error
from microtome.inputs import RAN_ON
from microtome.user_code import import_file, on_path


class _UsageError(click.ClickException):
    exit_code = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-f", "--file", "file", required=True, metavar="FILE.py", help="The file that defines the model.")
@click.option("-m", "--model", "name", required=True, help="The class or function in it that returns the model.")
@click.option("-s", "--size", default="3x224x224", show_default=True, help="Channels x height x width of one image.")
def main(file: str, name: str, size: str) -> None:
    """Print the costs of a model's layers."""
    sizes = _sizes(size)
    with on_path(Path(file).resolve().parent, first=True):
        try:
            model = _build(file, name)
        except MicrotomeError as error:
            raise _UsageError(str(error)) from error
        with _report_error(f"{name} does not run on an image of {size}"):
            stat(model, sizes)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise _UsageError(f"expected a size as channels x height x width, such as 3x224x224, got {text!r}")
    return tuple(map(int, sizes))


def _build(file: str, name: str) -> nn.Module:
    module = import_file(Path(file))
    if not hasattr(module, name):
        models = [
            key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)
        ]
        raise NoMatch(f"{file} has no {name!r}; its models are: {', '.join(models) or 'none'}")
    target = getattr(module, name)
    with _report_error(f"{name}() of {file} returns no model"):
        return check_model(target if isinstance(target, nn.Module) else target())


@contextmanager
def _report_error(problem: str) -> Iterator[None]:
    """Exit with a one-line message if the user's code raises."""
    try:
        yield
    except (Exception, SystemExit) as error:
        text = str(error) if isinstance(error, MicrotomeError) else describe_error(error)
        named = (note for note in getattr(error, "__notes__", []) if not note.startswith(RAN_ON))
        notes = "".join(f" ({note})" for note in named)
        raise _UsageError(f"{problem}: {text}{notes}") from error


if __name__ == "__main__":
    main(prog_name="python -m microtome.compat.torchstat")
