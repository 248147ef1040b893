"""`microtome report`: write a profile as an HTML page."""

from __future__ import annotations

import click

from microtome.cli.completion import complete_file
from microtome.cli.options.outputs import check_opened, check_writable, open_option, open_page
from microtome.cli.options.profiles import load_profile
from microtome.cli.options.repetition import Command
from microtome.results.base import write
from microtome.units import size

_OUTPUT = "The page to write; - for stdout."
_CUTS = "Cuts from `microtome cuts --json`: with times, the page compares them."
_COMPARE = "Another profile to compare with; with times, also that of the cloud."


@click.command(cls=Command)
@click.argument("profile", metavar="PROFILE.json", shell_complete=complete_file)
@click.option("-o", "--output", "html_file", metavar="F", shell_complete=complete_file, help=_OUTPUT)
@click.option("--cuts", metavar="F", shell_complete=complete_file, help=_CUTS)
@click.option("--compare", metavar="F", shell_complete=complete_file, help=_COMPARE)
@open_option
def report(profile: str, html_file: str | None, cuts: str | None, compare: str | None, *, is_opened: bool) -> None:
    """Write a profile that `microtome profile --json` wrote as one self-contained HTML page."""
    if html_file is None:
        load_profile(profile)  # a wrong file is named first
        raise click.UsageError("Missing option '-o' / '--output': name the page to write, or - for stdout.")
    check_opened(html_file, "-o", is_opened=is_opened)
    if html_file != "-":
        check_writable(html_file)
    result = load_profile(profile)
    page = result.to_html(cuts=cuts, compare=compare)
    if html_file == "-":
        click.echo(page, nl=False)
        return
    write(page, html_file)
    click.echo(f"{html_file}: {size(len(page.encode()))}, {result.title} on {result.inputs}")
    if is_opened:
        open_page(html_file)
