"""`microtome plan`: choose where to cut a model between devices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from microtome.cli.completion import complete_file
from microtome.cli.interrupts import import_torch
from microtome.cli.options.choices import OBJECTIVES, SCHEDULES
from microtome.cli.options.model import ModelOptions, model_options
from microtome.cli.options.numbers import Number, WholeNumber
from microtome.cli.options.outputs import Outputs, output_options
from microtome.cli.options.profiles import note_busy_machines
from microtome.cli.options.prompt import check_prompt, find_cuts, note_base_model, prompt_errors
from microtome.cli.options.repetition import Command
from microtome.cli.progress import show_progress

if TYPE_CHECKING:
    from microtome.results.codec_costs import CodecCosts
    from microtome.results.cuts import Cuts
    from microtome.results.link import Link
    from microtome.zoo import Resolved


def _parse_sides(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> dict[str, str]:
    """Return a value by device; `--profile`, which is eager, names devices other than the edge and the cloud."""
    devices = context.params.get("profiles") or ("edge", "cloud")
    sides: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value or (parameter.name != "profiles" and name not in devices):
            expected = "NAME=F" if parameter.name == "profiles" else " or ".join(f"{one}=VALUE" for one in devices)
            raise click.BadParameter(f"expected {expected}, got {word!r}")
        if name in sides:
            raise click.BadParameter(f"{name} is set twice")
        sides[name] = value
    return sides


def _chain(edge: str | None, cloud: str | None, profiles: dict[str, str], link: Link) -> dict[str, Any]:
    """Return the devices and links as `microtome.plan` takes them."""
    if profiles:
        if edge is not None or cloud is not None:
            raise click.UsageError("choose --profile, or --edge and --cloud")
        return {"devices": profiles, "links": [link] * (len(profiles) - 1)}
    for name, file in (("--edge", edge), ("--cloud", cloud)):
        if file is None:
            raise click.UsageError(f"Missing option '{name}', or several of --profile NAME=F.")
    return {"edge": edge, "cloud": cloud, "link": link}


def _parse_factors(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> dict[str, float]:
    factors = {}
    for name, value in _parse_sides(context, parameter, words).items():
        try:
            factors[name] = float(value)
        except ValueError:
            raise click.BadParameter(f"expected a factor, such as {name}=10, got {value!r}") from None
    return factors


def _parse_tokens(context: click.Context, parameter: click.Parameter, word: str | None) -> tuple[int, int] | None:
    if word is None:
        return None
    prompt, comma, new = word.partition(",")
    if not comma or not prompt.strip().isdecimal() or not new.strip().isdecimal() or 0 in (int(prompt), int(new)):
        raise click.BadParameter(f"expected the tokens of the prompt and of the answer, such as 512,64, got {word!r}")
    return int(prompt), int(new)


def _split_codecs(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...] | None:
    if not words:
        return None
    return tuple(filter(None, (name.strip() for word in words for name in word.split(","))))


_EDGE = "Profile of the edge, from `microtome profile --time --json`."
_PROFILE = "Instead of --edge and --cloud: a device of a chain with its profile; repeatable. All links are alike."
_MICRO_BATCHES = "Of training: the number of micro-batches of a step, each of the inputs of the profiles."
_OPTIMIZER_STATE = "Of training: bytes of optimizer state per byte of weights: 2 for Adam, 0 for SGD (default: 2)."
_CODEC = (
    "Codecs to compare, such as raw,zstd,fp16, for what crosses a cut and for the inputs; repeatable. By default raw, "
    "and zstd for the inputs."
)
_TOKENS = "Plan a whole answer of a language model: tokens of the prompt and of the answer, such as 512,64."
_LIMIT = "Memory limit of a side; repeatable."
_SLOWER = (
    "Multiply the measured times of a side, for a device that is so many times slower; energy stays as measured; "
    "repeatable."
)
_TOP = "Show, and write to files, the best K candidates."
_COSTS = "Read the costs of codecs from this file, such as edge=F.json; repeatable."


@click.command(cls=Command)
@model_options()
@click.option("--edge", metavar="F", shell_complete=complete_file, help=_EDGE)
@click.option("--cloud", metavar="F", shell_complete=complete_file, help="Profile of the cloud.")
@click.option(
    "--profile", "profiles", multiple=True, is_eager=True, metavar="gpu0=F", callback=_parse_sides, help=_PROFILE
)
@click.option("--bandwidth", required=True, metavar="B", help="Bandwidth of the link, such as 20Mbps or 2MB/s.")
@click.option("--rtt", default="0s", metavar="T", help="Round-trip time of the link, such as 15ms.")
@click.option("--jitter", default="0s", metavar="T", help="Jitter of the link, such as 2ms.")
@click.option("--joules-per-byte", type=Number(min=0), metavar="J", help="Energy of the edge's radio.")
@click.option("--tokens", metavar="PROMPT,NEW", callback=_parse_tokens, help=_TOKENS)
@click.option("--objective", type=click.Choice(OBJECTIVES), default="latency", help="What to optimize.")
@click.option("--micro-batches", type=WholeNumber(1), metavar="N", help=_MICRO_BATCHES)
@click.option("--schedule", type=click.Choice(SCHEDULES), help="Of training: its schedule (default: 1f1b).")
@click.option("--optimizer-state", type=Number(min=0), metavar="X", help=_OPTIMIZER_STATE)
@click.option("--limit", "limits", multiple=True, metavar="edge=512MB", callback=_parse_sides, help=_LIMIT)
@click.option("--slower", multiple=True, metavar="edge=10", callback=_parse_factors, help=_SLOWER)
@click.option("--codec", "codecs", multiple=True, metavar="A,B,…", callback=_split_codecs, help=_CODEC)
@click.option("--codec-costs", "costs", multiple=True, metavar="edge=F", callback=_parse_sides, help=_COSTS)
@click.option("--top", type=WholeNumber(1), metavar="K", help=_TOP)
@output_options("json", "csv", "md", "measure_codecs", "perfetto")
def plan(
    *,
    model: ModelOptions,
    bandwidth: str,
    rtt: str,
    jitter: str,
    joules_per_byte: float | None,
    edge: str | None,
    cloud: str | None,
    profiles: dict[str, str],
    tokens: tuple[int, int] | None,
    codecs: tuple[str, ...] | None,
    costs: dict[str, str],
    top: int | None,
    outputs: Outputs,
    **options: Any,
) -> None:
    """Choose where to cut a model, from the profiles of devices and the links between them.

    MODEL and its inputs are those of the profiles, such as torchvision:resnet50. Neither device is needed. JSON has
    every candidate, for microtome.load; with --top, the rows of the best K.
    """
    check_prompt("--tokens", model, tokens)
    measures_codecs = outputs.files["measure_codecs"] is not None
    if costs and measures_codecs:
        raise click.UsageError("choose one of --codec-costs and --measure-codecs")
    import_torch()
    from microtome.load import load
    from microtome.plan import plan as plan_cuts
    from microtome.report.formats import csv, markdown, selected_json, text
    from microtome.report.plan import CandidateSelection
    from microtome.results.link import Link

    chain = _chain(edge, cloud, profiles, Link(bandwidth, rtt, jitter, joules_per_byte))
    prompt = None if tokens is None else tokens[0]
    if measures_codecs:
        resolved = model.resolve(one_pass=prompt is None)
        cuts, measured = _find_cuts(resolved, prompt, codecs or ("raw",))
    else:
        find = partial(_find_cuts, prompt=prompt)
        resolved, (cuts, measured) = model.count(find, how=lambda found: found[0].how, one_pass=prompt is None)
    if tokens is not None:
        note_base_model(model, resolved.model)
    files = profiles or {"edge": str(edge), "cloud": str(cloud)}
    note_busy_machines({file: load(file) for file in dict.fromkeys(files.values())})
    with show_progress(f"planning {model.name}"):
        result = plan_cuts(cuts, **chain, codec=codecs, costs=measured or costs or None, tokens=tokens, **options)
    formats = {"perfetto": result.to_perfetto}
    if measured is not None:
        formats["measure_codecs"] = measured.to_json
    selection = CandidateSelection(top=top)
    if top is not None:
        selected = {"json": selected_json, "csv": csv, "md": markdown}
        formats |= {name: partial(write, result, selection) for name, write in selected.items()}
    outputs.write_result(result, partial(text, result, selection), **formats)


def _find_cuts(resolved: Resolved, prompt: int | None, codecs: tuple[str, ...] = ()) -> tuple[Cuts, CodecCosts | None]:
    """List the cuts; if codecs are named, also measure their costs on this machine, those of the inputs included."""
    import torch

    from microtome.plan.codec_benchmark import codec_costs

    with show_progress(f"cutting {resolved.name}"), prompt_errors(resolved, prompt), torch.no_grad():
        cuts, inputs = find_cuts(resolved, prompt)
        if not codecs:
            return cuts, None
        names = tuple(dict.fromkeys(("raw", "zstd", *codecs)))
        return cuts, codec_costs(cuts, names, model=resolved.model, inputs=inputs)
