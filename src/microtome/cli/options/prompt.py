"""The prompt of a language model: `--prefill N`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from microtome.cli.options.model import ModelOptions

if TYPE_CHECKING:
    from microtome.inputs import Inputs
    from microtome.zoo import Resolved


def prefill_option(help_text: str) -> Callable[[Any], Any]:
    """Add `--prefill N` to a command, which receives it as `prefill`."""
    return click.option("--prefill", type=click.IntRange(min=1), metavar="N", help=help_text)


def check_prompt(option: str, model: ModelOptions, length: object) -> None:
    """Raise if an option for the length of the prompt and the prompt are both set."""
    if length is not None and model.inputs is not None:
        raise click.UsageError(f"choose one of {option}, the length of the prompt, and --input, the prompt")


def make_prompt(resolved: Resolved, length: int) -> Inputs:
    """Return the example inputs with a prompt of another length, for a run that returns a cache."""
    from microtome.trace.phases import Prompt

    return Prompt.of(resolved.model, resolved.inputs).resized(length).inputs
