"""`microtome record`: record the outputs of layers for many inputs in a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from microtome.cli.completion import complete_file
from microtome.cli.options.choices import REDUCTIONS
from microtome.cli.options.model import ModelOptions, model_options, wrap_model_errors
from microtome.cli.options.numbers import WholeNumber
from microtome.cli.options.repetition import Command
from microtome.cli.progress import print_notes, show_progress
from microtome.errors import BadFile, MicrotomeError, Unsupported
from microtome.units import plural, seconds, size

if TYPE_CHECKING:
    from microtome.capture.record import ActivationRecorder, RecordTotals


@click.command(cls=Command)
@model_options("weights", "device")
@click.argument("select", nargs=-1, required=True)
@click.option(
    "--data",
    required=True,
    metavar="FOLDER_OR_NPY",
    shell_complete=complete_file,
    help=".npy of (samples, …), or a folder of .npy or images.",
)
@click.option("--to", required=True, type=click.Path(file_okay=False), metavar="FOLDER", help="Write to this folder.")
@click.option("--batch", type=WholeNumber(1), default=32, help="Batch size.")
@click.option("--reduce", type=click.Choice(REDUCTIONS), help="Record this reduction of each output.")
@click.option("--limit", metavar="SIZE", help="Record at most this many bytes, such as 4GB.")
@click.option("--keep", type=click.Choice(["all", "stats"]), default="all", help="Record tensors, or only statistics.")
@click.option("--append", is_flag=True, help="Append to the recording in the folder.")
def record(*, model: ModelOptions, select: tuple[str, ...], data: str, batch: int, **options: Any) -> None:
    """Run a model on data and record the outputs of the selected layers in a folder.

    MODEL is as for `microtome profile`; SELECT are paths or globs of its modules, such as 'blocks.*'. microtome.load
    reads the folder.
    """
    model.check_has_values()
    resolved = model.resolve(uses_values=True)
    import torch

    from microtome.capture.record import ActivationRecorder
    from microtome.cli.samples import count_samples, describe_images, read_batches, single_tensor

    like = single_tensor(resolved.inputs, "record others from Python, with mt.record")
    samples = count_samples(data)
    total = -(-samples // batch)
    print_notes(describe_images(data, like))
    with show_progress(f"recording {model.name}") as progress:

        def update(totals: RecordTotals) -> None:
            progress(f"{size(totals.nbytes)}, {_rate(totals)}", totals.runs, total)

        recorder = ActivationRecorder(resolved.model, list(select), progress=update, **options)
        note_kept = _note_if_ended_early(recorder, batch, samples, options["to"])
        with _rename_options(), note_kept, recorder, torch.no_grad():
            for x in read_batches(data, batch, like):
                with wrap_model_errors(resolved, partial(tuple, x.shape), hint=""):
                    resolved.model(x)
    totals = recorder.totals
    what = "outputs, only their statistics kept, " if options["keep"] == "stats" else ""
    kept = totals.records - recorder.dropped
    records = f"{kept} of " * bool(recorder.dropped) + plural(totals.records, "record")
    click.echo(
        f"{records} of {plural(len(recorder), 'layer')} in {plural(totals.runs, 'run')}, "
        f"{size(totals.nbytes)} {what}in {seconds(totals.seconds)} ({_rate(totals)}), in {options['to']}"
    )
    if recorder.dropped:
        print_notes([_describe_dropped(totals.records, recorder.dropped, options["limit"])])


@contextmanager
def _note_if_ended_early(recorder: ActivationRecorder, batch: int, samples: int, folder: str) -> Iterator[None]:
    """Print a note on what was recorded before Ctrl-C or an error, and how to continue."""
    try:
        yield
    except (KeyboardInterrupt, MicrotomeError) as error:
        runs = recorder.totals.runs
        recorded = min(runs * batch, samples)
        if 0 < recorded < samples:
            kept = (
                f"{plural(runs, 'run')} of the model ended: the first {recorded} of {samples} samples are in {folder}"
            )
            print_notes([f"{kept}. To continue, pass the others as --data, with --append"])
        elif not runs and isinstance(error, KeyboardInterrupt):
            print_notes(["no run of the model ended: nothing was recorded"])
        raise


def _describe_dropped(records: int, dropped: int, limit: str) -> str:
    if dropped == records:
        why = f"the first, with those of before, exceeds --limit {limit}"
        return f"none of the records was written, only their statistics: {why}"
    written = f"{records - dropped} of {records} records were written"
    return f"{written}: the others, above --limit {limit}, are in the statistics"


def _rate(totals: RecordTotals) -> str:
    return f"{size(round(totals.bytes_per_s))}/s"


@contextmanager
def _rename_options() -> Iterator[None]:
    """Replace the names of Python arguments in errors by those of options."""
    try:
        yield
    except (BadFile, Unsupported) as error:
        text = str(error).replace("append=True", "--append").replace(": pass a function", ": take another, or Python")
        raise type(error)(re.sub(r"\b(reduce|keep)='(\w+)'", r"--\1 \2", text)) from error
