"""`microtome graph`: draw the calls of a model and the tensors between them."""

from __future__ import annotations

from functools import partial

import click

from microtome.cli.options.model import ModelOptions, model_options, wrap_model_errors
from microtome.cli.options.outputs import Outputs, output_options
from microtome.cli.progress import show_progress

_DEPTH = "Draw calls up to this depth (default: as deep as fits)."


@click.command()
@model_options("meta")
@output_options("svg", "dot")
@click.option("--depth", type=click.IntRange(min=0), metavar="N", help=_DEPTH)
@click.option("--at", metavar="ADDRESS", help="Draw this cut, an address that `microtome cuts` lists.")
def graph(*, model: ModelOptions, depth: int | None, at: str | None, outputs: Outputs) -> None:
    """Draw the calls of a model, and the bytes of the tensors between them, if possible without running the model.

    MODEL is as for `microtome profile`.
    """
    if not any(outputs.files.values()):
        raise click.UsageError("expected an output: --svg F or --dot F")
    resolved = model.resolve()
    import torch

    from microtome.split.cuts.cuts import cuts as find_cuts
    from microtome.trace import trace

    with show_progress(f"drawing {model.name}"), wrap_model_errors(resolved), torch.no_grad():
        run = trace(resolved.model, resolved.inputs)
        cut = None if at is None else find_cuts(resolved.model, resolved.inputs)[at]
    formats = {"svg": partial(run.to_svg, depth=depth, cut=cut), "dot": partial(run.to_dot, depth=depth, cut=cut)}
    outputs.write(formats, None)
