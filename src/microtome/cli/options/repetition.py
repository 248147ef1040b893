"""Options that are given several times: lists are joined, and any other option is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from microtome.results.metrics import on_command_line


class Command(click.Command):
    """A command that refuses an option of one value that is given twice, of which click would use the last.

    Advice in its output names its own options, and those of others with the name of the command.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            *_, order = self.make_parser(ctx).parse_args(list(args))
            if not any(parameter.is_eager for parameter in order):  # such as --help
                self._refuse_repeated(ctx, order)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with on_command_line(option for parameter in self.params for option in parameter.opts):
            return super().invoke(ctx)

    def _refuse_repeated(self, ctx: click.Context, order: list[click.Parameter]) -> None:
        for parameter in self.params:
            has_one_value = isinstance(parameter, click.Option) and not parameter.multiple and not parameter.is_flag
            if has_one_value and order.count(parameter) > 1:
                raise click.UsageError(f"{max(parameter.opts, key=len)} was given twice", ctx)


def list_option(*names: str, callback: Callable[..., Any] | None = None, **settings: Any) -> Callable[[Any], Any]:
    """Add an option that takes a list separated by commas, and that may be repeated, to a command.

    The command, or the callback, receives the lists joined by commas; None if the option is not set.
    """

    def join(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> Any:
        text = ",".join(values) if values else None
        return text if callback is None else callback(context, parameter, text)

    return click.option(*names, multiple=True, callback=join, **settings)
