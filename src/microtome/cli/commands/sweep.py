"""`microtome sweep`: measure the latency of each cut with a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from microtome.cli.options.connection import connection_options
from microtome.cli.options.model import model_options, working
from microtome.cli.options.outputs import output_options, put_result, refuse_same
from microtome.cli.options.stage import part_of

if TYPE_CHECKING:
    from microtome.remote.channel import Security

_CUTS = "all; dominating: cuts that send fewer bytes than every earlier one; or comma-separated addresses."


@click.command()
@model_options
@click.option("--server", required=True, metavar="HOST:PORT", help="Address of the server.")
@click.option("--cuts", default="dominating", metavar="WHICH", help=_CUTS)
@click.option("--repeat", type=click.IntRange(min=1), default=10, metavar="N", help="Timed requests per cut.")
@click.option("--codec", default="raw", metavar="NAME", help="Codec of the boundary, such as raw, zstd or fp16.")
@click.option("--weights", type=click.Path(dir_okay=False), metavar="FILE", help="Load weights from this file.")
@click.option("--device", metavar="D", help="Compute the heads on this device, such as cuda.")
@click.option("--perfetto", metavar="F", help="Write a trace of one request per cut for https://ui.perfetto.dev.")
@click.option("--html", "html_file", metavar="F", help="Write an HTML page with a bar chart and a table; - for stdout.")
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
    security: Security,
    timeout: float,
) -> None:
    """Measure the latency of each cut, and of no cut, with a server; compare the best with the planned cut.

    MODEL is as for `microtome profile`, and must be the model that the server has. JSON, CSV and HTML list every cut.
    """
    from microtome.remote.sweep import sweep as measure

    outputs = outputs | {"--html": html_file, "--perfetto": perfetto}
    refuse_same(outputs)
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
            security=security,
            timeout=timeout,
            progress=tell,
        )
    put_result(outputs, found, perfetto=found.to_perfetto, html=found.to_html)
