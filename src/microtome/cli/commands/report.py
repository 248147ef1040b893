"""`microtome report`: a profile as a page to look at."""

from __future__ import annotations

import click

from microtome.cli.options.page import open_page, refuse_unseen
from microtome.errors import BadFile
from microtome.load import load
from microtome.results.base import write
from microtome.results.profile import Profile


@click.command()
@click.argument("profile", metavar="PROFILE.json")
@click.option("-o", "--output", "html_file", required=True, metavar="F", help="The page; - for the terminal.")
@click.option("--cuts", metavar="F", help="What `microtome cuts --json F` wrote: with times, the page weighs the cuts.")
@click.option("--compare", metavar="F", help="Another profile, to be shown beside; with times it is the cloud, too.")
@click.option("--open", "is_opened", is_flag=True, help="Open the page in a browser.")
def report(profile: str, html_file: str, cuts: str | None, compare: str | None, *, is_opened: bool) -> None:
    """Make one page of what `microtome profile --json` wrote: it needs no network, and nothing beside it."""
    refuse_unseen(html_file, is_opened=is_opened)
    found = load(profile)
    if not isinstance(found, Profile):
        raise BadFile(f"{profile!r} holds no profile: give what `microtome profile --json` wrote")
    page = found.to_html(cuts=cuts, compare=compare)
    if html_file == "-":
        click.echo(page, nl=False)
        return
    write(page, html_file)
    click.echo(f"{html_file}: {len(page.encode()) / 1000:,.0f} kB, {found.model} on {found.inputs}")
    if is_opened:
        open_page(html_file)
