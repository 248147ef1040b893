"""The command line: `microtome COMMAND MODEL`, one file per command."""

from __future__ import annotations

from typing import Any

import click

from microtome import __version__
from microtome.cli.commands.cuts import cuts
from microtome.cli.commands.diff import diff
from microtome.cli.commands.doctor import doctor
from microtome.cli.commands.graph import graph
from microtome.cli.commands.models import models
from microtome.cli.commands.ping import ping
from microtome.cli.commands.plan import plan
from microtome.cli.commands.profile import profile
from microtome.cli.commands.record import record
from microtome.cli.commands.report import report
from microtome.cli.commands.run import run
from microtome.cli.commands.serve import serve
from microtome.cli.commands.split import split
from microtome.cli.commands.sweep import sweep
from microtome.cli.commands.top import top
from microtome.cli.commands.track import track
from microtome.errors import MicrotomeError, sanitize_text


class _CommandError(click.ClickException):
    exit_code = 2


class _Commands(click.Group):
    """Prints errors without a traceback and exits with 2, as click does for usage errors."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (MicrotomeError, OSError) as error:
            raise _CommandError(sanitize_text(str(error), keep="\n")) from error


_COMMANDS = (
    cuts,
    diff,
    doctor,
    graph,
    models,
    ping,
    plan,
    profile,
    record,
    report,
    run,
    serve,
    split,
    sweep,
    top,
    track,
)


_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=_Commands, commands=_COMMANDS, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="microtome")
def main() -> None:
    """Profile, trace, cut and serve a PyTorch model at any layer."""
