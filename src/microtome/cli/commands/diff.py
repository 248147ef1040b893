"""`microtome diff`: compare two profiles."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import click

from microtome.cli.completion import complete_file
from microtome.cli.options.numbers import WholeNumber
from microtome.cli.options.outputs import Outputs, check_opened, open_option, open_page, output_options
from microtome.cli.options.profiles import load_profile, note_busy_machines
from microtome.cli.options.repetition import Command
from microtome.errors import BadQuery
from microtome.results.diff import parse_limit
from microtome.results.metrics import find_compared

_DEPTH = "Show layers down to this depth, with the changes of all calls inside them."
_FAIL_OVER = "Exit with 1 if a total grew by more than this, such as macs=5% or macs=5%,time=10%."


def _parse_limits(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> dict[str, str]:
    limits: dict[str, str] = {}
    for word in filter(None, re.split(r"\s*,\s*|(?<=%)\s+", ",".join(words).strip())):
        title, _, value = word.partition("=")
        try:
            name = find_compared(title)
        except BadQuery as error:
            raise click.BadParameter(f"expected METRIC=N%, got {word!r}: {error}") from error
        if name in limits:
            raise click.BadParameter(f"{name} is set twice")
        try:
            parse_limit(name, value)
        except BadQuery as error:
            raise click.BadParameter(f"expected a percentage of at least 0, such as {name}=5%, got {word!r}") from error
        limits[name] = value
    if words and not limits:
        raise click.BadParameter("expected METRIC=N%, such as macs=5%, got an empty string")
    return limits


class _DiffCommand(Command):
    """Accepts several limits after one `--fail-over`, as in `--fail-over macs=5% time=10%`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words: list[str] = []
        for word in args:
            follows = words[-1].startswith("--fail-over=") or words[-2:-1] == ["--fail-over"] if words else False
            words += ["--fail-over", word] if follows and re.fullmatch(r"[A-Za-z_ ]+=[^=]*%(,.*)?", word) else [word]
        return super().parse_args(ctx, words)


@click.command(cls=_DiffCommand)
@click.argument("before", metavar="A.json", shell_complete=complete_file)
@click.argument("after", metavar="B.json", shell_complete=complete_file)
@click.option("--fail-over", "limits", multiple=True, metavar="NAME=N%...", callback=_parse_limits, help=_FAIL_OVER)
@click.option("--all", "expand", is_flag=True, help="Show each call inside added and removed modules.")
@click.option("--depth", type=WholeNumber(1), metavar="N", help=_DEPTH)
@click.option("--top", type=WholeNumber(1), metavar="K", help="Show the K layers with the largest changes.")
@output_options("json", "csv", "md", "html")
@open_option
@click.pass_context
def diff(
    context: click.Context,
    /,
    before: str,
    after: str,
    *,
    limits: dict[str, str],
    outputs: Outputs,
    is_opened: bool,
    **selected: Any,
) -> None:
    """Compare two profiles that `microtome profile --json` wrote, in total and per layer.

    A time that differs by less than the spread of repeated passes is noise and exceeds no limit. Markdown is for pull
    requests; the HTML page shows A beside B.
    """
    from microtome.report.diff import ChangeSelection, growth, name_of
    from microtome.report.formats import markdown, text
    from microtome.results.diff import diff as compare

    html_file = outputs.files["html"]
    check_opened(html_file, "--html", is_opened=is_opened)
    profiles = {file: load_profile(file) for file in (before, after)}
    note_busy_machines(profiles)
    result = compare(profiles[before], profiles[after])
    exceeded = result.over(limits)
    view = ChangeSelection(**selected)
    html = partial(profiles[before].to_html, compare=profiles[after])
    outputs.write_result(result, partial(text, result, view), md=partial(markdown, result, view), html=html)
    if html_file is not None and is_opened:
        open_page(html_file)
    for change in exceeded:
        limit = limits[change.quantity].replace("%", " %")
        click.echo(f"Over the limit: {name_of(change)} {growth(change)}, expected at most {limit}", err=True)
    if exceeded:
        context.exit(1)
