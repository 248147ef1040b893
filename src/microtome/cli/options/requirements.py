"""Options that have no effect without another one."""

from __future__ import annotations

from collections.abc import Collection

import click
from click.core import ParameterSource


def refuse_options(names: Collection[str], reason: str) -> None:
    """Raise if one of the parameters is set on the command line, although nothing would use it.

    Args:
        names: The names of the parameters, as the command receives them.
        reason: What they need, and what to do: it follows the name of the option.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        is_set = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if is_set and parameter.name in names:
            raise click.UsageError(f"{max(parameter.opts, key=len)} {reason}")
