"""`microtome record`: what layers give for many inputs, written to a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import click
import torch

from microtome.capture.options import Reduction
from microtome.capture.record import ActivationRecorder, RecordTotals
from microtome.cli.options.model import model_options, placed, resolve, working
from microtome.cli.samples import batches, count_of, lone_tensor
from microtome.errors import BadFile, BadInputs, MicrotomeError, Unsupported, describe_error
from microtome.units import seconds, size


@click.command()
@model_options
@click.argument("select", nargs=-1, required=True)
@click.option(
    "--data", required=True, metavar="FOLDER_OR_NPY", help=".npy of (samples, …), or a folder of .npy or images."
)
@click.option("--to", required=True, type=click.Path(file_okay=False), metavar="FOLDER", help="Write to this folder.")
@click.option("--batch", type=click.IntRange(min=1), default=32, help="How many samples go through at once.")
@click.option("--reduce", type=click.Choice(list(get_args(Reduction))), help="Keep this of each output.")
@click.option("--limit", metavar="SIZE", help="Keep at most so much, such as 4GB.")
@click.option("--keep", type=click.Choice(["all", "stats"]), default="all", help="Keep tensors, or statistics alone.")
@click.option("--append", is_flag=True, help="Go on with what the folder holds.")
@click.option("--device", metavar="D", help="Run on this device, such as cuda.")
@click.option("--weights", type=click.Path(dir_okay=False), metavar="FILE", help="Load these weights.")
def record(
    model: str,
    inputs: str | None,
    args: dict[str, Any],
    *,
    select: tuple[str, ...],
    data: str,
    to: str,
    batch: int,
    reduce: Reduction | None,
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
    if device is not None and device.partition(":")[0] == "meta":
        raise BadInputs("--device meta has no values: there is nothing to record on it")
    found = resolve(model, inputs, args, weights=weights)
    like = lone_tensor(found.inputs, "record others from Python, with mt.record")
    target = placed(found, device).model.eval()
    whole = -(-count_of(data) // batch)
    with working(f"recording {model}") as progress:

        def tell(totals: RecordTotals) -> None:
            progress(f"{size(totals.nbytes)}, {_rate(totals)}", totals.runs, whole)

        recorder = ActivationRecorder(
            target, list(select), to=to, reduce=reduce, limit=limit, keep=keep, append=append, progress=tell
        )
        with _as_options(), recorder, torch.no_grad():
            for x in batches(data, batch, like):
                _run(target, x.to(device) if device is not None else x, found.name)
    totals = recorder.totals
    dropped = f"; {recorder.dropped} over the limit are not kept" if recorder.dropped else ""
    click.echo(
        f"{_count(totals.records, 'record')} of {_count(len(recorder), 'layer')} in {_count(totals.runs, 'run')}, "
        f"{size(totals.nbytes)} in {seconds(totals.seconds)} ({_rate(totals)}), in {to}{dropped}"
    )


def _rate(totals: RecordTotals) -> str:
    return f"{size(round(totals.bytes_per_s))}/s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@contextmanager
def _as_options() -> Iterator[None]:
    """Have errors name options as they are on the command line."""
    try:
        yield
    except (BadFile, Unsupported) as error:
        text = str(error).replace("append=True", "--append").replace(": pass a function", ": take another, or Python")
        raise type(error)(re.sub(r"reduce='(\w+)'", r"--reduce \1", text)) from error


def _run(model: torch.nn.Module, x: torch.Tensor, name: str) -> None:
    try:
        model(x)
    except MicrotomeError:
        raise
    except Exception as error:
        raise BadInputs(f"{name} does not run on {tuple(x.shape)}: {describe_error(error)}") from error
