"""The command line: `microtome COMMAND MODEL`, one file per command.

A command is imported when it is called, and torch when it runs: `--help`, `--version`, completion and usage errors do
not import torch.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

import click

from microtome import __version__
from microtome.cli import completion
from microtome.cli.interrupts import translate_interrupts
from microtome.cli.progress import print_warnings
from microtome.cli.usage_errors import explain_usage_error
from microtome.errors import MicrotomeError, sanitize_text
from microtome.results.metrics import on_command_line

#: Each is a function of the same name in its file in `commands/`.
_COMMANDS = (
    "cuts",
    "diff",
    "doctor",
    "generate",
    "graph",
    "models",
    "ping",
    "plan",
    "profile",
    "record",
    "report",
    "run",
    "serve",
    "split",
    "sweep",
    "top",
    "track",
)


class _CommandError(click.ClickException):
    exit_code = 2


class _Commands(click.Group):
    """Imports commands when they are called; errors and Ctrl-C end the program without a traceback.

    Errors exit with 2, as usage errors do, and Ctrl-C with 130.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        completion.register()
        return super().main(*args, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.commands.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List each command with its whole first sentence, which click would truncate to one line."""
        commands = [(name, self.get_command(ctx, name)) for name in _COMMANDS]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=200)) for name, command in commands if command])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, _COMMANDS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Expected one of {', '.join(_COMMANDS)}."
            raise click.UsageError(f"No such command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with translate_interrupts():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with translate_interrupts(), on_command_line(), print_warnings():
                return super().invoke(ctx)
        except BrokenPipeError:  # click exits quietly
            raise
        except click.UsageError as error:
            raise explain_usage_error(error) from error
        except (MicrotomeError, OSError) as error:
            raise _CommandError(sanitize_text(str(error), keep="\n")) from error


_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="microtome")
def main() -> None:
    """Profile, trace, cut and serve a PyTorch model at any layer."""
