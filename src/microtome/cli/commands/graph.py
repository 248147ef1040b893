"""`microtome graph`: draw the calls of a model and the tensors between them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from microtome.cli.interrupts import import_torch
from microtome.cli.options.model import ModelOptions, model_options, wrap_model_errors
from microtome.cli.options.numbers import WholeNumber
from microtome.cli.options.outputs import Outputs, output_options
from microtome.cli.options.repetition import Command
from microtome.cli.progress import show_progress

if TYPE_CHECKING:
    from microtome.results.cuts import Cuts
    from microtome.results.trace import Trace
    from microtome.zoo import Resolved

_DEPTH = "Draw calls up to this depth (default: as deep as fits)."


@click.command(cls=Command)
@model_options("meta")
@output_options("svg", "dot")
@click.option("--depth", type=WholeNumber(0), metavar="N", help=_DEPTH)
@click.option("--at", metavar="ADDRESS", help="Draw this cut, an address that `microtome cuts` lists.")
def graph(*, model: ModelOptions, depth: int | None, at: str | None, outputs: Outputs) -> None:
    """Draw the calls of a model, and the bytes of the tensors between them, if possible without running the model.

    MODEL is as for `microtome profile`.
    """
    if not any(outputs.files.values()):
        raise click.UsageError("expected an output: --svg F or --dot F")
    import_torch()
    import torch

    from microtome.split.cuts.cuts import cuts as find_cuts
    from microtome.trace import trace

    def record(resolved: Resolved) -> tuple[Trace, Cuts | None]:
        with show_progress(f"drawing {model.name}"), wrap_model_errors(resolved), torch.no_grad():
            cuts = None if at is None else find_cuts(resolved.model, resolved.inputs)
            return trace(resolved.model, resolved.inputs), cuts

    _, (run, cuts) = model.count(record, how=lambda recorded: recorded[1].how if recorded[1] else "meta")
    cut = None if cuts is None or at is None else cuts[at]
    formats = {"svg": partial(run.to_svg, depth=depth, cut=cut), "dot": partial(run.to_dot, depth=depth, cut=cut)}
    outputs.write(formats, None)
