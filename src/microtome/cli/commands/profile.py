"""`microtome profile`: the cost of each layer of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from microtome.cli.interrupts import import_torch
from microtome.cli.options.choices import CONVENTIONS, DEVICE_TIMES, SOURCES
from microtome.cli.options.model import ModelOptions, model_options, wrap_model_errors
from microtome.cli.options.numbers import Number, WholeNumber
from microtome.cli.options.outputs import Outputs, check_opened, open_option, open_page, output_options
from microtome.cli.options.prompt import check_prompt, make_prompt, note_base_model, prefill_option, prompt_errors
from microtome.cli.options.repetition import Command, list_option
from microtome.cli.options.requirements import refuse_options
from microtome.cli.progress import print_notes, show_progress
from microtome.errors import MicrotomeError

if TYPE_CHECKING:
    from microtome.report.row_selection import RowSelection
    from microtome.results.cuts import Cuts
    from microtome.results.phases import Phases
    from microtome.results.profile import Profile
    from microtome.zoo import Resolved

_BUDGET = "Maximum time for each quantity, in seconds."
_SORT = "Sort by this column, largest first; also in files."
_PREFILL = "Profile the run of a language model over a prompt of N tokens, which fills its cache."
_WARMUP = "Warm-up passes (default: until times are stable)."
_ENERGY_METHOD = "Distribute the model's energy by time, or replay each layer separately."
_ENERGY_MODEL = "Estimate energy from coefficients in joules, such as flop=0.5e-12,byte=20e-12,watts=3."


@click.command(cls=Command)
@model_options("weights", "meta", "device")
@click.option("--depth", type=WholeNumber(0), help="Show and measure calls up to this depth.")
@click.option("--granularity", type=WholeNumber(1), help="Show calls of this height; 1 for single layers.")
@click.option("--by", type=click.Choice(["module", "type", "op"]), help="Group by module, module type or operator.")
@click.option("--sort", metavar="COLUMN", help=_SORT)
@click.option("--top", type=WholeNumber(1), metavar="K", help="Show the first K rows, also in files.")
@list_option("--columns", metavar="A,B,…", help="Show these columns, such as params,macs,time.")
@click.option("--all", "expand", is_flag=True, help="Show each of several identical blocks.")
@click.option("--convention", type=click.Choice(CONVENTIONS), default="microtome", help="What counts as a FLOP.")
@prefill_option(_PREFILL)
@click.option("--decode", is_flag=True, help="Profile the run for the next token of a language model.")
@click.option("--backward", is_flag=True, help="Include the backward pass, and the tensors saved for it.")
@click.option("--train", is_flag=True, help="Profile the model in training mode.")
@click.option("--strict", is_flag=True, help="Fail if an operator has no FLOP formula.")
@click.option("--time", is_flag=True, help="Measure the time of each call.")
@click.option("--memory", is_flag=True, help="Measure peak memory.")
@click.option("--energy", is_flag=True, help="Measure the energy of each call, if there is a sensor.")
@click.option("--load", is_flag=True, help="Sample the utilization of CPU, GPU and memory.")
@click.option("--warmup", type=WholeNumber(0), metavar="N", help=_WARMUP)
@click.option("--repeat", type=WholeNumber(3), default=30, help="Measured passes.")
@click.option("--budget", "budget_s", type=Number(min=0, min_open=True), default=20.0, metavar="S", help=_BUDGET)
@click.option("--device-time", type=click.Choice(DEVICE_TIMES), default="kernels", help="How to time a GPU.")
@click.option("--energy-method", type=click.Choice(["share", "replay"]), default="share", help=_ENERGY_METHOD)
@list_option("--energy-model", metavar="COEFFICIENTS", help=_ENERGY_MODEL)
@click.option("--meter", metavar="NAME", help="Read energy from this meter, such as nvml or csv:FILE.")
@output_options("json", "csv", "md", "html", "perfetto", "speedscope")
@open_option
def profile(
    *,
    model: ModelOptions,
    depth: int | None,
    granularity: int | None,
    by: str | None,
    sort: str | None,
    top: int | None,
    columns: str | None,
    expand: bool,
    prefill: int | None,
    decode: bool,
    train: bool,
    energy_method: str,
    energy_model: str | None,
    outputs: Outputs,
    is_opened: bool,
    **options: Any,
) -> None:
    """Show the cost of each layer of a model, if possible without running it.

    MODEL is a name that `microtome models` lists, such as torchvision:resnet50, or Python code: package.module:Name or
    ./file.py:Name. JSON has every call, for microtome.load and `microtome plan`; with --granularity, --by, --sort,
    --top or --columns, the selected rows alone, as CSV and Markdown. Perfetto and speedscope need --time.
    With --prefill and --decode, the phases of generation; options that select rows also show the layers of each.
    """
    if sum(choice is not None for choice in (depth, granularity, by)) > 1:
        raise click.UsageError("choose one of --depth, --granularity and --by")
    from microtome.report.row_selection import RowSelection, resolve_columns

    selected = tuple(filter(None, map(str.strip, (columns or "").split(","))))
    selection = RowSelection(depth, granularity, by, sort, top, selected, expand=expand)
    if model.name.partition(":")[0] in SOURCES:  # importing Python code may register columns
        resolve_columns(selection)
    options["energy"] |= energy_model is not None
    measure = [name for name in ("time", "memory", "energy", "load") if options.pop(name)]
    _check_measured(measure, is_estimated=energy_model is not None)
    html_file = outputs.files["html"]
    check_opened(html_file, "--html", is_opened=is_opened)
    if "time" not in measure and (outputs.files["perfetto"] or outputs.files["speedscope"]):
        raise click.UsageError("--perfetto and --speedscope need times: measure them with --time")
    phases = [name for name, is_chosen in (("prefill", prefill is not None), ("decode", decode)) if is_chosen]
    check_prompt("--prefill", model, prefill)
    _check_phases(phases, outputs, backward=options["backward"])
    if model.meta and model.device is not None:
        raise click.UsageError("choose one of --meta and --device")
    runs = [f"--{name}" for name in measure if name != "energy" or energy_model is None]  # an estimate needs no run
    if model.meta and runs:
        why = f"--meta builds a model without data, which cannot run for {', '.join(runs)}"
        raise click.UsageError(f"{why}: leave out --meta")
    import_torch()
    import torch

    from microtome.profile import profile as profile_any

    profile_model: Callable[..., Profile | Phases] = profile_any  # whichever overload the options select
    from microtome.profile.energy import EnergyModel

    options["energy"] = energy_method if energy_model is None else EnergyModel.parse(energy_model)

    def run(resolved: Resolved) -> Any:
        resolve_columns(selection)
        resolved.model.train(train)
        description = f"{'measuring' if measure else 'counting'} {model.name}"
        with (
            show_progress(description) as progress,
            prompt_errors(resolved, prefill),
            torch.set_grad_enabled(options["backward"]),
        ):
            inputs = resolved.inputs if prefill is None else make_prompt(resolved, prefill).inputs
            return profile_model(
                resolved.model,
                inputs,
                phases=phases or None,
                measure=measure,
                depth=depth,
                progress=progress,
                **options,
            )

    if runs:
        result = run(resolved := model.resolve(one_pass=not phases))
    else:
        resolved, result = model.count(run, one_pass=not phases)
    if phases:
        note_base_model(model, resolved.model)
    result = replace(result, name=model.name)
    is_selected = any((granularity is not None, by, sort, top is not None, selected))
    if phases:
        shows_layers = is_selected or depth is not None or expand
        outputs.write_result(
            result, partial(_phases_text, result, selection if shows_layers else None), html=result.to_html
        )
    else:
        cuts = _find_cuts(resolved) if html_file is not None and "time" in measure else None
        _write_profile(result, selection, outputs, cuts, is_selected=is_selected)
    if html_file is not None and is_opened:
        open_page(html_file)


def _check_measured(measure: list[str], *, is_estimated: bool) -> None:
    """Raise if an option of measurements is set that nothing of what is measured uses."""
    if not {"time", "energy", "load"} & set(measure):
        why = (
            "is of repeated passes, and --memory measures one" if "memory" in measure else "needs something to measure"
        )
        refuse_options(("warmup", "repeat", "budget_s"), f"{why}: add --time")
    if not {"time", "energy"} & set(measure):
        refuse_options(("device_time",), "needs something to measure: add --time")
    if "energy" not in measure:
        refuse_options(("energy_method",), "needs energy to distribute: add --energy")
    if is_estimated:
        refuse_options(("energy_method",), "is of measured energy: leave out --energy-model")
    if "load" not in measure and (is_estimated or "energy" not in measure):
        hint = "leave out --energy-model" if is_estimated else "add --energy"
        refuse_options(("meter",), f"needs something to measure: {hint}")


def _check_phases(phases: list[str], outputs: Outputs, *, backward: bool) -> None:
    """Raise if other options do not go with phases."""
    if not phases:
        return
    if backward:
        raise click.UsageError("--prefill and --decode are phases of generation, which has no backward")
    for name in ("perfetto", "speedscope"):
        if outputs.files[name] is not None:
            raise click.UsageError(f"--{name} is of one run: profile it without --prefill and --decode")


def _phases_text(phases: Phases, selection: RowSelection | None) -> str:
    """Render the phases, and with a selection the layers of each."""
    from microtome.report.formats import text

    layers = [] if selection is None else [replace(one, name=f"{phases.title}, {phase}") for phase, one in phases]
    return "\n\n".join([text(phases), *(text(one, selection) for one in layers)])


def _write_profile(
    result: Profile, selection: RowSelection, outputs: Outputs, cuts: Cuts | None, *, is_selected: bool
) -> None:
    from microtome.report.formats import csv, markdown, selected_json, text

    outputs.write_result(
        result,
        partial(text, result, selection),
        json=partial(selected_json, result, selection) if is_selected else result.to_json,
        csv=partial(csv, result, selection),
        md=partial(markdown, result, selection),
        perfetto=result.to_perfetto,
        speedscope=result.to_speedscope,
        html=partial(result.to_html, cuts=cuts),
    )


def _find_cuts(resolved: Resolved) -> Cuts | None:
    """List the cuts of the model for the page; print a note and return None if that fails."""
    import torch

    from microtome.split.cuts.cuts import cuts as find_cuts

    try:
        with show_progress(f"cutting {resolved.name}"), wrap_model_errors(resolved), torch.no_grad():
            return find_cuts(resolved.model, resolved.inputs)
    except MicrotomeError as error:
        print_notes([f"the page does not show cuts: {error}"])
        return None
