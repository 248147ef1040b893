"""`microtome top`: the costliest layers of a model, by each metric."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
import torch

from microtome.cli.options.model import model_options, placed, resolve, running, working
from microtome.cli.options.outputs import put, refuse_same
from microtome.profile import profile as profile_model
from microtome.report.top import as_json, text


@click.command()
@model_options
@click.option("-n", "n", type=click.IntRange(min=1), default=10, metavar="K", help="Show the first K; else ten.")
@click.option("--time", is_flag=True, help="Measure the time of each layer too.")
@click.option("--device", metavar="D", help="Put the model and its inputs on this device, such as cuda.")
@click.option("--json", "json_file", metavar="F", help="Write JSON, raw numbers; - for the terminal.")
def top(
    model: str,
    inputs: str | None,
    args: dict[str, Any],
    *,
    n: int,
    time: bool,
    device: str | None,
    json_file: str | None,
) -> None:
    """Say which layers of a model cost the most: parameters, MACs, memory, and with --time the time they take.

    MODEL is as for `microtome profile`, which says what all of them cost.
    """
    outputs = {"--json": json_file}
    refuse_same(outputs)
    found = resolve(model, inputs, args)
    found.model.eval()
    found = placed(found, device)
    with working(f"{'measuring' if time else 'counting'} {model}") as tell, running(found), torch.no_grad():
        result = profile_model(found.model, found.inputs, measure=["time"] if time else [], progress=tell)
    put(outputs, {"--json": partial(as_json, result, n)}, partial(text, result, n))
