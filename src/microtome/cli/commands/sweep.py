"""`microtome sweep`: measure the latency of each cut with a server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from microtome.cli.interrupts import import_torch
from microtome.cli.options.connection import connection_options, server_option
from microtome.cli.options.model import ModelOptions, model_options, wrap_model_errors
from microtome.cli.options.numbers import WholeNumber
from microtome.cli.options.outputs import Outputs, output_options
from microtome.cli.options.repetition import Command, list_option
from microtome.cli.progress import show_progress

if TYPE_CHECKING:
    from microtome.remote.security import Security

_CUTS = "all; dominating: cuts that send fewer bytes than every earlier one; or comma-separated addresses."


@click.command(cls=Command)
@model_options("weights", "device")
@server_option
@list_option("--cuts", default=("dominating",), metavar="WHICH", help=_CUTS)
@click.option("--repeat", type=WholeNumber(1), default=10, metavar="N", help="Timed requests per cut.")
@click.option("--codec", default="raw", metavar="NAME", help="Codec of the boundary, such as raw, zstd or fp16.")
@output_options("json", "csv", "md", "html", "perfetto")
@connection_options
def sweep(*, model: ModelOptions, server: str, cuts: str, outputs: Outputs, security: Security, **options: Any) -> None:
    """Measure the latency of each cut, and of no cut, with a server; compare the best with the planned cut.

    MODEL is as for `microtome profile`, and must be the model that the server has. JSON, CSV and HTML list every cut;
    the trace has one request per cut.
    """
    import_torch()
    from microtome.remote.sweep import sweep as measure

    target, resolved = model.load(0)
    is_word = cuts in ("all", "dominating")
    selected = cuts if is_word else [address.strip() for address in cuts.split(",")]
    with show_progress(f"sweeping {model.name}") as progress, wrap_model_errors(resolved):
        result = measure(target, resolved.inputs, server, selected, security=security, progress=progress, **options)
    result = replace(result, name=model.name)
    outputs.write_result(result, perfetto=result.to_perfetto, html=result.to_html)
