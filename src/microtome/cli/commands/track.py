"""`microtome track`: the order in which a model's modules run, forward and backward."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click
import torch
from rich.console import Console
from rich.table import Table

from microtome.addresses import number_calls
from microtome.cli.options.model import model_options, resolve, run
from microtome.engine import tensors_in
from microtome.track import track as track_model

if TYPE_CHECKING:
    from microtome.engine import Call
    from microtome.results.trace import Phase
    from microtome.zoo import Resolved


@dataclass(frozen=True)
class _TrackRow:
    """One call: its place in the forward and the place of its backward, counted from 1; None where no backward ran."""

    address: str
    type: str
    depth: int
    forward: int
    backward: int | None


@click.command()
@model_options
@click.option(
    "--json", "json_file", type=click.File("w"), help="Write the rows as JSON to this file; - for the terminal."
)
def track(model: str, inputs: str | None, args: dict[str, Any], json_file: TextIO | None) -> None:
    """Show which module runs when, in the forward and in the backward.

    MODEL is a name that `microtome models` lists, such as zoo:tiny-resnet, or Python code: package.module:Name or
    ./file.py:Name.
    """
    rows = _run(resolve(model, inputs, args))
    if json_file is not None:
        json.dump([asdict(row) for row in rows], json_file, indent=1)
        json_file.write("\n")
    if json_file is None or json_file.name != "<stdout>":
        Console(markup=False, emoji=False).print(_table(model, rows))


def _run(found: Resolved) -> list[_TrackRow]:
    """Run the model forward and backward once."""
    order: dict[Phase, dict[Call, int]] = {"forward": {}, "backward": {}}

    def number(call: Call, phase: Phase) -> None:
        order[phase].setdefault(call, len(order[phase]) + 1)

    with track_model(found.model, on_enter=number):
        output = run(found)
        losses = [tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad]
        if losses:  # none where the model gives indices, or runs without gradients
            torch.stack(losses).sum().backward()
    addresses = number_calls(call.address for call in order["forward"])
    return [
        _TrackRow(address, type(call.module).__name__, call.depth, place, order["backward"].get(call))
        for (call, place), address in zip(order["forward"].items(), addresses, strict=True)
    ]


def _table(name: str, rows: list[_TrackRow]) -> Table:
    table = Table(
        title=f"{name}: which module runs when", caption="backward: the order in which autograd reached each call"
    )
    table.add_column("call")
    table.add_column("module")
    table.add_column("forward", justify="right")
    table.add_column("backward", justify="right")
    for row in rows:
        call = "  " * row.depth + (row.address or "(root)")
        table.add_row(call, row.type, str(row.forward), "–" if row.backward is None else str(row.backward))  # noqa: RUF001
    return table
