"""`microtome track`: the order in which a model's modules run, forward and backward."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from microtome.cli.options.model import ModelOptions, model_options, wrap_model_errors
from microtome.cli.options.outputs import Outputs, output_options
from microtome.cli.options.repetition import Command
from microtome.units import UNKNOWN

if TYPE_CHECKING:
    from microtome.engine import Call
    from microtome.results.trace import Phase


@dataclass(frozen=True)
class _TrackRow:
    """A call, and the position of its forward and of its backward, from 1; None if no backward ran."""

    address: str
    type: str
    depth: int
    forward: int
    backward: int | None


@click.command(cls=Command)
@model_options()
@output_options("json")
def track(*, model: ModelOptions, outputs: Outputs) -> None:
    """Show the order in which modules run, forward and backward.

    MODEL is as for `microtome profile`.
    """
    rows = _run(model)
    data = [asdict(row) for row in rows]
    outputs.write({"json": lambda: json.dumps(data, indent=1) + "\n"}, lambda: _text(model.name, rows))


def _run(model: ModelOptions) -> list[_TrackRow]:
    """Run the model forward and backward once."""
    resolved = model.resolve()
    import torch

    from microtome.addresses import number_calls
    from microtome.engine import tensors_in
    from microtome.track import track as track_model

    order: dict[Phase, dict[Call, int]] = {"forward": {}, "backward": {}}

    def number(call: Call, phase: Phase) -> None:
        order[phase].setdefault(call, len(order[phase]) + 1)

    with track_model(resolved.model, on_enter=number), wrap_model_errors(resolved):
        output = resolved.inputs.run(resolved.model)
        losses = [tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad]
        if losses:  # none if the model returns indices, or runs without gradients
            torch.stack(losses).sum().backward()
    addresses = number_calls(call.address for call in order["forward"])
    return [
        _TrackRow(address, type(call.module).__name__, call.depth, position, order["backward"].get(call))
        for (call, position), address in zip(order["forward"].items(), addresses, strict=True)
    ]


def _text(name: str, rows: list[_TrackRow]) -> str:
    from microtome.report.table import Column, Report, Table
    from microtome.report.table import text as render_text

    columns = (
        Column("call", lambda row: "  " * row.depth + (row.address or "(root)"), "left"),
        Column("module", lambda row: row.type, "left"),
        Column("forward", lambda row: str(row.forward)),
        Column("backward", lambda row: UNKNOWN if row.backward is None else str(row.backward)),
    )
    note = "backward: the order in which autograd reached each call"
    if any(row.backward is None for row in rows):
        note += (
            f"; {UNKNOWN}: it did not, as the call runs no operator that autograd records (nn.Identity), its output "
            "needs no gradient, or none flows back through it"
        )
    return render_text(Report(f"{name}: the order of calls", (Table.of(columns, rows),), (note,)))
