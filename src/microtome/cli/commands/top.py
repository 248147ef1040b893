"""`microtome top`: the most expensive layers of a model by each metric."""

from __future__ import annotations

from dataclasses import replace
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
    from microtome.results.profile import Profile
    from microtome.zoo import Resolved


@click.command(cls=Command)
@model_options("device")
@click.option("-n", "n", type=WholeNumber(1), default=10, metavar="K", help="Show K layers.")
@click.option("--time", is_flag=True, help="Also measure the time of each layer.")
@output_options("json")
def top(*, model: ModelOptions, n: int, time: bool, outputs: Outputs) -> None:
    """Show the most expensive layers of a model by parameters, MACs, memory, and with --time by time.

    MODEL is as for `microtome profile`, which shows every layer.
    """
    import_torch()
    import torch

    from microtome.profile import profile as profile_model
    from microtome.report.top import as_json, text

    def run(resolved: Resolved) -> Profile:
        description = f"{'measuring' if time else 'counting'} {model.name}"
        with show_progress(description) as progress, wrap_model_errors(resolved), torch.no_grad():
            measure = ["time"] if time else []
            return profile_model(resolved.model, resolved.inputs, measure=measure, progress=progress)

    result = replace(run(model.resolve()) if time else model.count(run)[1], name=model.name)
    outputs.write({"json": partial(as_json, result, n)}, partial(text, result, n))
