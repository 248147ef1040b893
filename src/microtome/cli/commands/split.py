"""`microtome split`: cut a model, and write its stages to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

from microtome.cli.options.model import describe, model_options, resolve, running, working
from microtome.split import split as split_model
from microtome.units import size

if TYPE_CHECKING:
    from microtome.split.stages import Stages


@click.command()
@model_options
@click.option("--at", multiple=True, required=True, metavar="ADDRESS", help="Cut at the exit of this call; repeatable.")
@click.option("--to", required=True, type=click.Path(file_okay=False), metavar="FOLDER", help="Write to this folder.")
@click.option("--weights", type=click.Path(dir_okay=False), metavar="FILE", help="Load these weights.")
def split(
    model: str, inputs: str | None, args: dict[str, Any], *, at: tuple[str, ...], to: str, weights: str | None
) -> None:
    """Cut a model into stages that give together exactly what it gives, and write the weights of each to a folder.

    MODEL is as for `microtome profile`; `microtome cuts` lists the addresses. microtome.load_stage reads the folder.
    """
    found = resolve(model, inputs, args, weights=weights)
    found.model.eval()
    with working(f"splitting {model}"), running(found), torch.no_grad():
        stages = split_model(found.model, found.inputs, at)
        stages.save(to)
    click.echo(f"{found.name} cut at {', '.join(stages.at)}: {stages.verified}, on {describe(found)}")
    click.echo("\n".join(_lines(stages, Path(to))))


def _lines(stages: Stages, folder: Path) -> list[str]:
    lines = []
    for stage in stages:
        if stage.begins_at is not None:
            cut = stages.cuts[stage.begins_at]
            lines.append(f"  {size(cut.nbytes)} cross at {cut.at}")
        file = folder / f"stage{stage.index}.safetensors"
        start, end = stage.begins_at or "the input", stage.ends_at or "the output"
        lines.append(f"{file}: {size(file.stat().st_size)}, from {start} to {end}")
    return lines
