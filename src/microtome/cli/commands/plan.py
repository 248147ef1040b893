"""`microtome plan`: where to cut a model between two devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
import torch

from microtome.cli.options.model import model_options, resolve, running, working
from microtome.cli.options.outputs import output_options, put_result, refuse_same
from microtome.plan import plan as plan_cuts
from microtome.plan.codec_benchmark import codec_costs
from microtome.plan.plan import OBJECTIVES
from microtome.report.formats import text
from microtome.results.link import Link
from microtome.split.cuts import cuts as find_cuts
from microtome.zoo import Resolved


def _pairs(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in ("edge", "cloud") or not value:
            raise click.BadParameter(f"{word!r} is not edge=… or cloud=…")
        if name in found:
            raise click.BadParameter(f"{name} is there twice")
        found[name] = value
    return found


_CODEC = "How what crosses may be encoded, such as raw, zstd or fp16; may be given several times."
_COSTS = "Take the costs of codecs from this file, such as edge=F.json; may be given twice."


@click.command()
@model_options
@click.option("--edge", required=True, metavar="F", help="What `microtome profile --time --json F` wrote on the edge.")
@click.option("--cloud", required=True, metavar="F", help="The same from the cloud.")
@click.option("--bandwidth", required=True, metavar="B", help="Of the link between them, such as 20Mbps or 2MB/s.")
@click.option("--rtt", default="0s", metavar="T", help="How long the link takes there and back, such as 15ms.")
@click.option("--jitter", default="0s", metavar="T", help="By how much a message may be late.")
@click.option("--joules-per-byte", type=click.FloatRange(min=0), metavar="J", help="What the edge's radio takes.")
@click.option("--objective", type=click.Choice(OBJECTIVES), default="latency", help="What is to be the best.")
@click.option(
    "--limit", "limits", multiple=True, metavar="edge=512MB", callback=_pairs, help="The most memory there is."
)
@click.option("--codec", "codecs", multiple=True, default=("raw",), metavar="NAME", help=_CODEC)
@click.option("--codec-costs", "costs", multiple=True, metavar="edge=F", callback=_pairs, help=_COSTS)
@click.option("--measure-codecs", metavar="F", help="Measure codecs here, on this run of the model; write them to F.")
@click.option("--perfetto", metavar="F", help="Write the plan for https://ui.perfetto.dev.")
@click.option("--top", type=click.IntRange(min=1), default=8, metavar="K", help="Show the best K.")
@output_options
def plan(
    model: str,
    inputs: str | None,
    args: dict[str, Any],
    *,
    edge: str,
    cloud: str,
    bandwidth: str,
    rtt: str,
    jitter: str,
    joules_per_byte: float | None,
    objective: Any,
    limits: dict[str, str],
    codecs: tuple[str, ...],
    costs: dict[str, str],
    measure_codecs: str | None,
    top: int,
    perfetto: str | None,
    outputs: dict[str, str | None],
) -> None:
    """Say where to cut a model, from profiles of two devices and the link between them.

    MODEL and its inputs are those that were profiled, such as torchvision:resnet50. Neither device is needed.
    """
    outputs = outputs | {"--measure-codecs": measure_codecs, "--perfetto": perfetto}
    refuse_same(outputs)
    if costs and measure_codecs is not None:
        raise click.UsageError("choose one of --codec-costs and --measure-codecs")
    link = Link(bandwidth, rtt, jitter, joules_per_byte)
    found = resolve(model, inputs, args)
    found.model.eval()
    with working(f"planning {model}"):
        cuts, table = _cuts(found, codecs if measure_codecs is not None else ())
        result = plan_cuts(
            cuts,
            edge=edge,
            cloud=cloud,
            link=link,
            objective=objective,
            limits=limits,
            codec=codecs,
            costs=table if table is not None else costs or None,
        )
    put_result(
        outputs,
        result,
        partial(text, result, top),
        perfetto=result.to_perfetto,
        measure_codecs=lambda: table.to_json() if table is not None else "",
    )


def _cuts(found: Resolved, codecs: tuple[str, ...]) -> tuple[Any, Any]:
    """List the cuts; if codecs are named, also measure their costs here, those of the inputs included."""
    with running(found), torch.no_grad():
        cuts = find_cuts(found.model, found.inputs)
        if not codecs:
            return cuts, None
        names = tuple(dict.fromkeys(("raw", "zstd", *codecs)))
        return cuts, codec_costs(cuts, names, model=found.model, inputs=found.inputs)
