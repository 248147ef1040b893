"""Options that name the model and its inputs: MODEL, `--input`, `--arg`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from microtome import zoo
from microtome.errors import BadInputs, MicrotomeError, describe_error, sanitize_text
from microtome.zoo import Resolved

Command = TypeVar("Command", bound=Callable[..., Any])


def model_options(command: Command) -> Command:
    """Give a command the parameters of `resolve`: model, inputs, args."""
    for option in (
        click.option("--arg", "args", multiple=True, metavar="NAME=VALUE", callback=_read, help=_ARG),
        click.option("--input", "inputs", metavar="SPEC", help=_INPUT),
        click.argument("model"),
    ):
        command = option(command)
    return command


def resolve(model: str, inputs: str | None, args: dict[str, Any], **options: Any) -> Resolved:
    """The model as the command line names it, with a sign of life; what there is to say about it goes to stderr."""
    with working(f"building {model}"):
        found = zoo.resolve(model, inputs=inputs, args=args, **options)
    say(found.notes)
    return found


def run(found: Resolved) -> Any:
    """Run the model on its inputs."""
    with running(found):
        return found.inputs.run(found.model)


@contextmanager
def running(found: Resolved) -> Iterator[None]:
    """Say of an error in the model's own code that it comes from there, and on which inputs."""
    try:
        yield
    except MicrotomeError:
        raise
    except Exception as error:
        raise BadInputs(
            f"{found.name} does not run on {describe(found)}: {describe_error(error)}. Give others with --input"
        ) from error


def placed(found: Resolved, device: str | None) -> Resolved:
    """The model and its inputs on a device, if one is named."""
    if device is None:
        return found
    try:
        return replace(found, model=found.model.to(device), inputs=found.inputs.to(device))
    except Exception as error:
        raise BadInputs(f"--device {device}: {describe_error(error)}") from error


def describe(found: Resolved) -> str:
    """The inputs, in words."""
    return repr(found.inputs)


@contextmanager
def working(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Say on a terminal what takes its time, and, where that is known, how much of it is done."""
    console = Console(stderr=True, markup=False, emoji=False)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    with ExitStack() as stack:
        status = stack.enter_context(console.status(what))
        bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, refresh_per_second=4)
        task = bar.add_task(what)

        def tell(step: str, done: int, whole: int) -> None:
            if not bar.live.is_started:  # the two cannot be shown at once
                status.stop()
                stack.enter_context(bar)
            bar.update(task, description=f"{what}: {step}", completed=done, total=whole)

        yield tell


def say(notes: tuple[str, ...]) -> None:
    for note in notes:
        click.echo(sanitize_text(f"Note: {note}"), err=True)


def _read(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> dict[str, Any]:
    return dict(_pair(word) for word in words)


def _pair(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise click.BadParameter(f"{word!r} is not NAME=VALUE, such as num_classes=10")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


_INPUT = "Shapes of the inputs, such as 1x3x224x224 or input_ids=1x128:int64, commas between several; else guessed."
_ARG = "An argument for what builds the model, such as num_classes=10; may be given several times."
