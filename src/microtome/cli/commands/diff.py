"""`microtome diff`: what changed between two profiles."""

from __future__ import annotations

import re
from math import isfinite
from pathlib import Path

import click

from microtome.cli.options.outputs import output_options, put_result, refuse_same
from microtome.errors import BadFile
from microtome.load import load
from microtome.report.diff import growth, name_of
from microtome.results.diff import diff as compare
from microtome.results.metrics import compared_metrics
from microtome.results.profile import Profile

_FAIL = "Exit with 1 if the whole grew by more, such as macs=5% or macs=5%,time=10%."


def _limits(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in ",".join(words).replace(" ", ",").split(",") if words else ():
        name, _, value = word.partition("=")
        if name not in compared_metrics():
            raise click.BadParameter(f"{word!r} is no limit: write such as macs=5%, of {', '.join(compared_metrics())}")
        if name in found:
            raise click.BadParameter(f"{name} is there twice")
        try:
            found[name] = float(value.removesuffix("%")) / 100
        except ValueError:
            found[name] = -1.0
        if not value.endswith("%") or not isfinite(found[name]) or found[name] < 0:
            raise click.BadParameter(f"{word!r} is no limit: write per cent from 0 on, such as {name}=5%")
    return found


class _Limited(click.Command):
    """Takes all limits that follow `--fail-over`, as in `--fail-over macs=5% time=10%`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words: list[str] = []
        for word in args:
            last = words[-1].startswith("--fail-over=") or words[-2:-1] == ["--fail-over"] if words else False
            words += ["--fail-over", word] if last and re.fullmatch(r"[a-z_]+=[^=]*%(,.*)?", word) else [word]
        return super().parse_args(ctx, words)


@click.command(cls=_Limited)
@click.argument("before", metavar="A.json")
@click.argument("after", metavar="B.json")
@click.option("--fail-over", "limits", multiple=True, metavar="NAME=N%...", callback=_limits, help=_FAIL)
@output_options
@click.pass_context
def diff(
    context: click.Context, before: str, after: str, *, limits: dict[str, float], outputs: dict[str, str | None]
) -> None:
    """Say what changed between two profiles that `microtome profile --json` wrote, in all and by layer.

    Times that differ within what repeated passes spread by are noise, and exceed no limit. Markdown is for pull
    requests.
    """
    refuse_same(outputs)
    result = compare(_profile(before), _profile(after))
    over = result.over(limits)
    put_result(outputs, result)
    for change in over:
        limit = f"{100 * limits[change.quantity]:g} %"
        click.echo(f"Over the limit: {name_of(change)} {growth(change)}, and {limit} are allowed", err=True)
    if over:
        context.exit(1)


def _profile(file: str) -> Profile:
    found = load(file)
    if not isinstance(found, Profile):
        kind = getattr(found, "kind", "recording")
        kind = kind if kind.endswith("s") else f"a {kind}"
        raise BadFile(f"{str(Path(file))!r} holds {kind}, not a profile: `microtome profile --json` writes one")
    return found
