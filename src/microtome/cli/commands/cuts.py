"""`microtome cuts`: where a model can be cut, and what crosses there."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import click
import torch

from microtome.cli.options.model import model_options, resolve, running, working
from microtome.cli.options.outputs import output_options, put_result, refuse_same
from microtome.report.cuts import CutSelection, details
from microtome.report.formats import markdown, text
from microtome.results.cuts import By
from microtome.split.cuts import cuts as find_cuts


@click.command()
@model_options
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Show cuts at calls down to here.")
@click.option("--all", "every", is_flag=True, help="Show every cut, however many there are.")
@click.option("--best", type=click.Choice(list(get_args(By))), help="Show the one with the least of this, in full.")
@click.option("--meta", is_flag=True, help="Build the model without allocating its weights.")
@output_options
def cuts(
    model: str,
    inputs: str | None,
    args: dict[str, Any],
    *,
    depth: int | None,
    every: bool,
    best: By | None,
    meta: bool,
    outputs: dict[str, str | None],
) -> None:
    """Say where a model can be cut in two exactly, and what crosses there.

    MODEL is as for `microtome profile`. A cut is at the exit of a call; its address goes to `microtome split --at`.
    JSON and CSV have every cut, and the places that are refused.
    """
    if (depth is not None) + every + (best is not None) > 1:
        raise click.UsageError("choose one of --depth, --all and --best")
    refuse_same(outputs)
    found = resolve(model, inputs, args, meta=meta)
    found.model.eval()
    with working(f"cutting {model}"), running(found), torch.no_grad():
        result = find_cuts(found.model, found.inputs)
    view = CutSelection(depth, every=every)
    shown = partial(text, result, view) if best is None else partial(details, result.best(best), result)
    put_result(outputs, result, shown, md=partial(markdown, result, view))
