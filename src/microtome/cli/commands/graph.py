"""`microtome graph`: a picture of the calls of a model, and what they make for each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
import torch

from microtome.cli.options.model import model_options, resolve, running, working
from microtome.cli.options.outputs import refuse_same
from microtome.results.base import write
from microtome.split.cuts import cuts as find_cuts
from microtome.trace import trace


@click.command()
@model_options
@click.option("--svg", metavar="F", help="Write a picture; - for the terminal.")
@click.option("--dot", metavar="F", help="Write the language of Graphviz; - for the terminal.")
@click.option("--depth", type=click.IntRange(min=0), metavar="N", help="Open the calls above it; else what fits.")
@click.option("--at", metavar="ADDRESS", help="Draw a cut through it, at an address that `microtome cuts` lists.")
@click.option("--meta", is_flag=True, help="Build the model without allocating its weights.")
def graph(
    model: str,
    inputs: str | None,
    args: dict[str, Any],
    *,
    svg: str | None,
    dot: str | None,
    depth: int | None,
    at: str | None,
    meta: bool,
) -> None:
    """Draw the calls of a model, with the bytes of what they make for each other, without running it where that can be.

    MODEL is as for `microtome profile`.
    """
    outputs = {"--svg": svg, "--dot": dot}
    refuse_same(outputs)
    if svg is None and dot is None:
        raise click.UsageError("say where the picture goes: --svg F or --dot F")
    found = resolve(model, inputs, args, meta=meta)
    found.model.eval()
    with working(f"drawing {model}"), running(found), torch.no_grad():
        run = trace(found.model, found.inputs)
        cut = None if at is None else find_cuts(found.model, found.inputs)[at]
    make = {"--svg": partial(run.to_svg, depth=depth, cut=cut), "--dot": partial(run.to_dot, depth=depth, cut=cut)}
    for option, file in outputs.items():
        if file == "-":
            click.echo(make[option](), nl=False)
        elif file is not None:
            write(make[option](), file)
