"""Hints for options that a command does not have, and for words that belong to an option."""

from __future__ import annotations

import difflib
import re
import shlex

import click

#: Options of other commands and programs: the option that a command must have, and what to write instead.
_SYNONYMS = {
    "--batch": ("--input", "The batch is the first size of the input: --input 8x3x224x224."),
    "--cuda": ("--device", "Name the device: --device cuda."),
    "--gpu": ("--device", "Name the device: --device cuda."),
    "--host": ("--listen", "The address has both: --listen 127.0.0.1:8080."),
    "--html": ("--output", "The page is an HTML page: write it with -o FILE."),
    "--port": ("--listen", "The address has the port: --listen 127.0.0.1:8080."),
    "--shape": ("--input", "Write shapes as --input 1x3x224x224."),
    "--sort": ("-n", "It ranks layers by every metric; microtome profile has --sort."),
    "--top": ("-n", "The number of layers is -n."),
}
#: How alike two options of the same first letter are, without their dashes, if one may be meant by the other.
_ALIKE = 0.7
_EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)")
_SHAPE = re.compile(r"(\w+=)?\d+(x\d+)+(:\w+)?(,.*)?")


def explain_usage_error(error: click.UsageError) -> click.UsageError:
    """Return the error with a hint, if an option of the command is near to what was written."""
    options = [] if error.ctx is None else [option for one in error.ctx.command.params for option in one.opts]
    if isinstance(error, click.NoSuchOption):
        return _explain_option(error, options)
    extra = _EXTRA.fullmatch(error.message)
    option = None if extra is None else "--input" if _SHAPE.fullmatch(extra[1]) else "--prompt"
    if extra is None or option not in options:
        return error
    return click.UsageError(f"{error.message}. Did you mean {option} {shlex.quote(extra[1])}?", error.ctx)


def _explain_option(error: click.NoSuchOption, options: list[str]) -> click.UsageError:
    needed, hint = _SYNONYMS.get(error.option_name, ("", ""))
    if needed in options:
        return click.UsageError(f"No such option {error.option_name!r}. {hint}", error.ctx)
    name = error.option_name.lstrip("-")
    bare = {option.lstrip("-"): option for option in options if option.startswith(f"--{name[:1]}")}
    near = difflib.get_close_matches(name, bare, n=1, cutoff=_ALIKE)
    return click.NoSuchOption(error.option_name, possibilities=[bare[one] for one in near] or None, ctx=error.ctx)
