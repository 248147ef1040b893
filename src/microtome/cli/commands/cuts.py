"""`microtome cuts`: list the cuts of a model, and the bytes that cross each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, get_args

import click

from microtome.cli.interrupts import import_torch
from microtome.cli.options.model import ModelOptions, model_options
from microtome.cli.options.numbers import WholeNumber
from microtome.cli.options.outputs import Outputs, output_options
from microtome.cli.options.prompt import check_prompt, find_cuts, note_base_model, prefill_option, prompt_errors
from microtome.cli.options.repetition import Command
from microtome.cli.progress import show_progress
from microtome.results.cuts import By

if TYPE_CHECKING:
    from microtome.results.cuts import Cuts
    from microtome.zoo import Resolved


@click.command(cls=Command)
@model_options("meta")
@prefill_option("Price a prompt of N tokens of a language model, and each token after it.")
@click.option("--depth", type=WholeNumber(1), metavar="N", help="Show cuts at calls up to this depth.")
@click.option("--all", "every", is_flag=True, help="Show every cut.")
@click.option("--best", type=click.Choice(list(get_args(By))), help="Show details of the cut with the least of this.")
@output_options("json", "csv", "md")
def cuts(
    *, model: ModelOptions, prefill: int | None, depth: int | None, every: bool, best: By | None, outputs: Outputs
) -> None:
    """List where a model can be cut in two exactly, and the tensors that cross each cut.

    MODEL is as for `microtome profile`. A cut is at the exit of a call; pass its address to `microtome split --at`.
    JSON and CSV list every cut, and the refused ones with the reason; Markdown has the details of --best.
    """
    check_prompt("--prefill", model, prefill)
    if (depth is not None) + every + (best is not None) > 1:
        raise click.UsageError("choose one of --depth, --all and --best")
    import_torch()
    import torch

    from microtome.report.cuts import CutSelection, details
    from microtome.report.formats import markdown, report_markdown, text
    from microtome.report.table import text as report_text

    def find(resolved: Resolved) -> Cuts:
        with show_progress(f"cutting {model.name}"), prompt_errors(resolved, prefill), torch.no_grad():
            return find_cuts(resolved, prefill)[0]

    resolved, result = model.count(find, how=lambda found: found.how, one_pass=prefill is None)
    if prefill is not None:
        note_base_model(model, resolved.model)
    if best is not None:
        report = details(result.best(best), result)
        outputs.write_result(result, partial(report_text, report), md=partial(report_markdown, report))
        return
    selection = CutSelection(depth, every=every)
    outputs.write_result(result, partial(text, result, selection), md=partial(markdown, result, selection))
