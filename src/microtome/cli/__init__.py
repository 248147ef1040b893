"""The command line: `microtome VERB MODEL`, one file a command."""

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
    """Says a microtome error in one line and exits with 2, as for any wrong word on the command line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.FileError as error:
            raise _CommandError(sanitize_text(error.format_message(), keep="\n")) from error
        except (MicrotomeError, OSError) as error:
            raise _CommandError(sanitize_text(str(error), keep="\n")) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="microtome")
def main() -> None:
    """Open a PyTorch model at any layer."""


main.add_command(cuts)
main.add_command(diff)
main.add_command(doctor)
main.add_command(graph)
main.add_command(models)
main.add_command(ping)
main.add_command(plan)
main.add_command(profile)
main.add_command(record)
main.add_command(report)
main.add_command(run)
main.add_command(serve)
main.add_command(split)
main.add_command(sweep)
main.add_command(top)
main.add_command(track)
