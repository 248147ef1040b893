"""`microtome record`: what layers give for many inputs, written to a folder."""

from __future__ import annotations

from typing import Any

import click
import torch

from microtome.capture.record import Recorder, Totals
from microtome.cli.data import batches, count_of
from microtome.cli.model import model_options, resolve, working
from microtome.errors import BadInputs, MicrotomeError, said
from microtome.inputs import Inputs
from microtome.units import seconds, size


@click.command()
@model_options
@click.argument("select", nargs=-1, required=True)
@click.option(
    "--data", required=True, metavar="FOLDER_OR_NPY", help=".npy of (samples, …), or a folder of .npy or images."
)
@click.option("--to", required=True, type=click.Path(file_okay=False), metavar="FOLDER", help="Write to this folder.")
@click.option("--batch", type=click.IntRange(min=1), default=32, help="How many samples go through at once.")
@click.option("--reduce", metavar="HOW", help="Keep the mean, max, cls or last of each output.")
@click.option("--limit", metavar="SIZE", help="Keep at most so much, such as 4GB.")
@click.option("--keep", type=click.Choice(["all", "stats"]), default="all", help="Keep tensors, or statistics alone.")
@click.option("--append", is_flag=True, help="Go on with what the folder holds.")
@click.option("--device", metavar="D", help="Run on this device, such as cuda.")
@click.option("--weights", type=click.Path(dir_okay=False), metavar="F.safetensors", help="Load these weights.")
def record(
    model: str,
    inputs: str | None,
    args: dict[str, Any],
    *,
    select: tuple[str, ...],
    data: str,
    to: str,
    batch: int,
    reduce: str | None,
    limit: str | None,
    keep: Any,
    append: bool,
    device: str | None,
    weights: str | None,
) -> None:
    """Run a model on data and write what the selected layers give to a folder.

    MODEL is as for `microtome profile`; SELECT are paths or globs of its modules, such as 'blocks.*'. microtome.load
    reads the folder.
    """
    found = resolve(model, inputs, args, weights=weights)
    target = found.model.eval()
    like = _lone_tensor(found.inputs)
    if device is not None:
        try:
            target = target.to(device)
        except Exception as error:
            raise BadInputs(f"--device {device}: {said(error)}") from error
    whole = -(-count_of(data) // batch)
    how: Any = reduce
    with working(f"recording {model}") as progress:

        def tell(totals: Totals) -> None:
            rate = f"{size(totals.nbytes)}, {size(totals.bytes_per_s)}/s"
            progress(rate, totals.runs, whole)

        recorder = Recorder(
            target, list(select), to=to, reduce=how, limit=limit, keep=keep, append=append, progress=tell
        )
        with recorder, torch.no_grad():
            for x in batches(data, batch, like):
                _run(target, x.to(device) if device is not None else x, found.name)
    totals = recorder.totals
    dropped = f"; {recorder.dropped} over the limit are not kept" if recorder.dropped else ""
    click.echo(
        f"{totals.records} records of {len(recorder)} layers in {totals.runs} runs, {size(totals.nbytes)} "
        f"in {seconds(totals.seconds)} ({size(totals.bytes_per_s)}/s), in {to}{dropped}"
    )


def _lone_tensor(inputs: Inputs) -> torch.Tensor:
    tensors = [value for value in (*inputs.args, *inputs.kwargs.values()) if isinstance(value, torch.Tensor)]
    if len(tensors) != 1 or inputs.kwargs:
        raise BadInputs("data goes to models with one positional input: record others from Python, with mt.record")
    return tensors[0]


def _run(model: torch.nn.Module, x: torch.Tensor, name: str) -> None:
    try:
        model(x)
    except MicrotomeError:
        raise
    except Exception as error:
        raise BadInputs(f"{name} does not run on {tuple(x.shape)}: {said(error)}") from error
