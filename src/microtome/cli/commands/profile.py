"""`microtome profile`: what each layer of a model costs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click
import torch

from microtome.cli.options.model import describe, model_options, placed, resolve, working
from microtome.cli.options.outputs import output_options, put_result, refuse_same
from microtome.cli.options.page import open_page, page_cuts, page_options, refuse_unseen
from microtome.errors import BadInputs, MicrotomeError, describe_error
from microtome.flops.conventions import CONVENTIONS
from microtome.profile import profile as profile_model
from microtome.profile.device import METHODS, DeviceTimeMethod
from microtome.profile.energy import EnergyModel
from microtome.report.formats import csv, markdown, text
from microtome.report.row_selection import RowSelection, check
from microtome.zoo.sources import SOURCES

if TYPE_CHECKING:
    from microtome.results.profile import Profile
    from microtome.zoo import Resolved

_ENERGY_METHOD = "Share the whole model's energy by time, or replay each layer alone."
_ENERGY_MODEL = "Estimate energy, from such as flop=0.5e-12,byte=20e-12,watts=3, in joules."


@click.command()
@model_options
@click.option("--depth", type=click.IntRange(min=0), help="Show the tree of calls down to here, and measure no deeper.")
@click.option("--granularity", type=click.IntRange(min=1), help="Show calls of this height; 1 for single layers.")
@click.option("--by", type=click.Choice(["module", "type", "op"]), help="Show modules, kinds of them, or operators.")
@click.option("--sort", metavar="COLUMN", help="Order by this column, the largest first.")
@click.option("--top", type=click.IntRange(min=1), metavar="K", help="Show the first K rows.")
@click.option("--columns", metavar="A,B,…", help="Show these columns.")
@click.option("--convention", type=click.Choice(list(CONVENTIONS)), default="microtome", help="What counts as a FLOP.")
@click.option("--backward", is_flag=True, help="Count the backward too, and what is kept for it.")
@click.option("--train", is_flag=True, help="Count the model in training mode.")
@click.option("--meta", is_flag=True, help="Build the model without allocating its weights.")
@click.option("--weights", type=click.Path(dir_okay=False), metavar="FILE", help="Load these weights.")
@click.option("--device", metavar="D", help="Put the model and its inputs on this device, such as cuda.")
@click.option("--time", is_flag=True, help="Measure the time of each call too.")
@click.option("--memory", is_flag=True, help="Measure how much memory is in use at most.")
@click.option("--energy", is_flag=True, help="Measure the energy of each call, where there is a sensor.")
@click.option("--load", is_flag=True, help="Sample how busy CPU, GPU and memory are.")
@click.option(
    "--warmup", type=click.IntRange(min=0), metavar="N", help="How many passes to make before; else until stable."
)
@click.option("--repeat", type=click.IntRange(min=3), default=30, help="How many passes to measure.")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    metavar="S",
    help="Seconds for each quantity.",
)
@click.option(
    "--device-time", type=click.Choice(list(METHODS)), default="kernels", help="How the times of a GPU are taken."
)
@click.option("--energy-method", type=click.Choice(["share", "replay"]), default="share", help=_ENERGY_METHOD)
@click.option("--energy-model", metavar="COEFFICIENTS", help=_ENERGY_MODEL)
@click.option("--meter", metavar="NAME", help="Read energy from this meter, such as nvml or csv:FILE.")
@click.option("--perfetto", metavar="F", help="Write what was timed for https://ui.perfetto.dev; needs --time.")
@click.option("--speedscope", metavar="F", help="Write what was timed for https://www.speedscope.app; needs --time.")
@click.option("--strict", is_flag=True, help="Fail where an operator has no formula.")
@page_options
@output_options
def profile(
    model: str,
    inputs: str | None,
    args: dict[str, Any],
    *,
    depth: int | None,
    granularity: int | None,
    by: str | None,
    sort: str | None,
    top: int | None,
    columns: str | None,
    convention: str,
    backward: bool,
    train: bool,
    meta: bool,
    weights: str | None,
    device: str | None,
    time: bool,
    memory: bool,
    energy: bool,
    load: bool,
    warmup: int | None,
    device_time: DeviceTimeMethod,
    energy_method: str,
    energy_model: str | None,
    meter: str | None,
    repeat: int,
    budget: float,
    perfetto: str | None,
    speedscope: str | None,
    strict: bool,
    html_file: str | None,
    is_opened: bool,
    outputs: dict[str, str | None],
) -> None:
    """Say what each layer of a model costs, without running it where that can be.

    MODEL is a name that `microtome models` lists, such as torchvision:resnet50, or Python code: package.module:Name or
    ./file.py:Name.
    """
    if sum(choice is not None for choice in (depth, granularity, by)) > 1:
        raise click.UsageError("choose one of --depth, --granularity and --by")
    chosen = tuple(name.strip() for name in columns.split(",")) if columns else ()
    view = RowSelection(depth, granularity, by, sort, top, chosen)
    if model.partition(":")[0] in SOURCES:  # Python code may register columns of its own when it is imported
        check(view)
    outputs = outputs | {"--perfetto": perfetto, "--speedscope": speedscope, "--html": html_file}
    refuse_same(outputs)
    refuse_unseen(html_file, is_opened=is_opened)
    if not time and (perfetto is not None or speedscope is not None):
        raise click.UsageError("--perfetto and --speedscope write when each call ran: measure that with --time")
    if meta and device is not None:
        raise click.UsageError("--meta builds a model on no device: leave out --device")
    found = resolve(model, inputs, args, meta=meta, weights=weights)
    check(view)
    found.model.train(train)
    options: dict[str, Any] = {"backward": backward, "convention": convention, "strict": strict}
    wanted = {"time": time, "memory": memory, "energy": energy or energy_model is not None, "load": load}
    options["measure"] = [name for name, wants in wanted.items() if wants]
    options |= {"depth": depth, "warmup": warmup, "repeat": repeat, "budget_s": budget, "device_time": device_time}
    options["energy"] = energy_method if energy_model is None else EnergyModel.parse(energy_model)
    with working(f"{'measuring' if options['measure'] else 'counting'} {model}") as progress:
        result = _run(found, device, progress=progress, meter=meter, **options)
    places = page_cuts(found, device) if html_file is not None and time else None
    put_result(
        outputs,
        result,
        partial(text, result, view),
        csv=partial(csv, result, view),
        md=partial(markdown, result, view),
        perfetto=result.to_perfetto,
        speedscope=result.to_speedscope,
        html=partial(result.to_html, cuts=places),
    )
    if html_file is not None and is_opened:
        open_page(html_file)


def _run(found: Resolved, device: str | None, **options: Any) -> Profile:
    found = placed(found, device)
    try:
        with torch.set_grad_enabled(options["backward"]):
            return profile_model(found.model, found.inputs, **options)
    except MicrotomeError:
        raise
    except Exception as error:
        where = "\n  ".join([f"{describe_error(error)}. Give others with --input", *getattr(error, "__notes__", [])])
        raise BadInputs(f"{found.name} does not run on {describe(found)}: {where}") from error
