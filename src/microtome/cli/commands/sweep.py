"""`microtome sweep`: what each cut takes, measured on a server."""

from __future__ import annotations

from typing import Any

import click

from microtome.cli.options.connection import connection_options
from microtome.cli.options.model import model_options, working
from microtome.cli.options.outputs import output_options, put_result, refuse_same
from microtome.cli.options.stage import part_of

_CUTS = "all; dominating: those that send less than all before them; or addresses with commas between."


@click.command()
@model_options
@click.option("--server", required=True, metavar="HOST:PORT", help="Who runs the rest.")
@click.option("--cuts", default="dominating", metavar="WHICH", help=_CUTS)
@click.option("--repeat", type=click.IntRange(min=1), default=10, metavar="N", help="Requests that count at each cut.")
@click.option("--codec", default="raw", metavar="NAME", help="How what crosses is encoded, such as raw, zstd or fp16.")
@click.option("--weights", type=click.Path(dir_okay=False), metavar="FILE", help="Load these weights.")
@click.option("--device", metavar="D", help="Compute the heads on this device, such as cuda.")
@click.option("--perfetto", metavar="F", help="Write a request at each cut for https://ui.perfetto.dev.")
@click.option("--html", "html_file", metavar="F", help="Write a page with bars and a table; - for the terminal.")
@output_options
@connection_options
def sweep(
    model: str,
    inputs: str | None,
    args: dict[str, Any],
    *,
    server: str,
    cuts: str,
    repeat: int,
    codec: str,
    weights: str | None,
    device: str | None,
    html_file: str | None,
    perfetto: str | None,
    outputs: dict[str, str | None],
    reach: dict[str, Any],
) -> None:
    """Measure what each cut takes with a server, and no cut at all; say which is the best, and which the plan takes.

    MODEL is as for `microtome profile`, and the one that the server has. JSON, CSV and the page have every cut.
    """
    from microtome.remote.connection import Security
    from microtome.remote.sweep import sweep as measure

    outputs = outputs | {"--html": html_file, "--perfetto": perfetto}
    refuse_same(outputs)
    timeout = reach.pop("timeout")
    which = cuts if cuts in ("all", "dominating") else [word.strip() for word in cuts.split(",")]
    target, example = part_of(model, inputs, args, weights=weights, device=device)
    with working(f"sweeping {model}") as tell:
        found = measure(
            target,
            example,
            server,
            which,
            repeat=repeat,
            codec=codec,
            security=Security(**reach),
            timeout=timeout,
            progress=tell,
        )
    put_result(outputs, found, perfetto=found.to_perfetto, html=found.to_html)
