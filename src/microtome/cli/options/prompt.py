"""The prompt of a language model: `--prefill N`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from microtome.cli.options.model import ModelOptions, wrap_model_errors
from microtome.cli.options.numbers import WholeNumber
from microtome.cli.progress import print_notes

if TYPE_CHECKING:
    from torch import nn

    from microtome.inputs import Inputs
    from microtome.results.cuts import Cuts
    from microtome.trace.phases import Prompt
    from microtome.zoo import Resolved


def prefill_option(help_text: str) -> Callable[[Any], Any]:
    """Add `--prefill N` to a command, which receives it as `prefill`."""
    return click.option("--prefill", type=WholeNumber(1), metavar="N", help=help_text)


def check_prompt(option: str, model: ModelOptions, length: object) -> None:
    """Raise if an option for the length of the prompt and the prompt are both set."""
    if length is not None and model.inputs is not None:
        raise click.UsageError(f"choose one of {option}, the length of the prompt, and --input, the prompt")


def note_base_model(model: ModelOptions, built: nn.Module) -> None:
    """Print a note on a model of transformers without the head that gives logits, which its costs then lack."""
    if not model.name.startswith("hf:") or callable(getattr(built, "generate", None)):
        return
    from microtome.zoo.sources.hf import causal_class

    if name := causal_class(type(built)):
        print_notes(
            [
                f"{model.name} is a {type(built).__name__}, without the head that gives logits, whose costs are not "
                f"included: add it with --arg \"architectures=['{name}']\""
            ]
        )


def make_prompt(resolved: Resolved, length: int) -> Prompt:
    """Return the example inputs with a prompt of another length, for a run that returns a cache."""
    from microtome.trace.phases import Prompt

    return Prompt.of(resolved.model, resolved.inputs).resized(length)


def prompt_errors(resolved: Resolved, length: int | None) -> AbstractContextManager[None]:
    """Do as `wrap_model_errors`, for a run on the model's inputs, or on a prompt of so many tokens."""
    if length is None:
        return wrap_model_errors(resolved)
    from microtome.engine.argument_names import describe_arguments

    return wrap_model_errors(
        resolved, lambda: describe_arguments(resolved.model, make_prompt(resolved, length).inputs), hint=""
    )


def find_cuts(resolved: Resolved, length: int | None) -> tuple[Cuts, Inputs]:
    """List the cuts of a model, and return the inputs that it ran on: its own, or a prompt of so many tokens.

    Raises:
        Unsupported: The model returns no cache for a token after the prompt.
    """
    from microtome.split.cuts.cuts import cuts

    if length is None:
        return replace(cuts(resolved.model, resolved.inputs), name=resolved.name), resolved.inputs
    prompt = make_prompt(resolved, length)
    found = replace(cuts(resolved.model, prompt.inputs), name=resolved.name)
    if found.prompt_tokens is None:  # calls extend no object that it returns
        prompt.check_returns_state()
        reason = "the state that the model returns is not an object that its calls extend, such as a DynamicCache"
        found = replace(found, prompt_tokens=length, no_decode=reason)
    return found, prompt.inputs
