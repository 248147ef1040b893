"""`microtome split`: cut a model into stages, and write them to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from microtome.cli.options.model import ModelOptions, model_options, wrap_model_errors
from microtome.cli.options.repetition import Command
from microtome.cli.progress import show_progress
from microtome.units import size

if TYPE_CHECKING:
    from microtome.split.stages import Stages


@click.command(cls=Command)
@model_options("weights")
@click.option("--at", multiple=True, required=True, metavar="ADDRESS", help="Cut at the exit of this call; repeatable.")
@click.option(
    "--export",
    type=click.Choice(["pt2", "onnx", "pte"]),
    help="Also write each stage as a program of torch.export, ONNX or ExecuTorch.",
)
@click.option("--to", required=True, type=click.Path(file_okay=False), metavar="FOLDER", help="Write to this folder.")
@click.option("--int8", is_flag=True, help="Quantize programs of ONNX to 8 bits.")
def split(*, model: ModelOptions, at: tuple[str, ...], export: str | None, int8: bool, to: str) -> None:
    """Cut a model into stages that together compute exactly its output, and write the weights of each to a folder.

    MODEL is as for `microtome profile`; `microtome cuts` lists the addresses. microtome.load_stage reads the folder.
    Programs of --export need neither microtome nor the model's code; each is compared with its stage.
    """
    if "auto" in at:
        raise click.UsageError("--at auto is for microtome run: microtome plan finds the best cut, pass its address")
    if int8 and export != "onnx":
        raise click.UsageError("--int8 needs --export onnx, whose runtime quantizes")
    # Stages of a language model keep its cache, which programs cannot.
    resolved = model.resolve(uses_values=True, one_pass=export is not None)
    import torch

    from microtome.split import split as split_model

    with show_progress(f"splitting {model.name}"), wrap_model_errors(resolved), torch.no_grad():
        stages = split_model(resolved.model, resolved.inputs, at)
        stages.save(to)
    click.echo(f"{model.name} cut at {', '.join(stages.at)}: {stages.verified}, on {resolved.arguments}")
    click.echo("\n".join(_describe_stages(stages, Path(to))))
    for stage in stages if export is not None else ():
        file = Path(to) / f"stage{stage.index}.{export}"
        with show_progress(f"exporting {file}"):
            exported = stage.export(file, int8=int8)
        fixed = "".join(f"; {dim} is fixed: {why}" for dim, why in exported.metadata["static"].items())
        click.echo(f"{file}: {size(file.stat().st_size)}, {exported.verified}{fixed}")


def _describe_stages(stages: Stages, folder: Path) -> list[str]:
    lines = []
    for stage in stages:
        if stage.begins_at is not None:
            cut = stages.cuts[stage.begins_at]
            lines.append(f"  {size(cut.nbytes)} cross at {cut.at}")
        file = folder / f"stage{stage.index}.safetensors"
        start, end = stage.begins_at or "the input", stage.ends_at or "the output"
        lines.append(f"{file}: {size(file.stat().st_size)}, from {start} to {end}")
    return lines
