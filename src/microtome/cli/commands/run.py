"""`microtome run`: run a model on data, split between this machine and a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import repeat as repeat_item
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from microtome.cli.completion import complete_file
from microtome.cli.interrupts import import_torch
from microtome.cli.options.connection import check_servers, connection_options
from microtome.cli.options.durations import positive_duration
from microtome.cli.options.model import ModelOptions, model_options, wrap_model_errors
from microtome.cli.options.numbers import WholeNumber
from microtome.cli.options.outputs import Outputs, check_distinct, output_options
from microtome.cli.options.repetition import Command
from microtome.cli.options.requirements import refuse_options
from microtome.cli.progress import print_notes, show_progress
from microtome.errors import RemoteError, SensorFailed

if TYPE_CHECKING:
    from microtome.inputs import Inputs
    from microtome.remote.client import Remote
    from microtome.remote.security import Security
    from microtome.results.requests import RequestRecord
    from microtome.zoo import Resolved

_DATA = ".npy of (samples, …), or a folder of .npy or images (default: the example inputs, --repeat times)."
_TO = "Write the outputs: one file per request, or one F.safetensors."
_DEADLINE = "Time that a request may take, in seconds or such as 100ms; after that, this machine computes the output."
_NO_FALLBACK = "Fail if the server goes away or misses the deadline: compute nothing of its part here."
_AT = "Cut: an address of `microtome cuts`; auto: the fastest; (input): send the inputs. Repeat it for a chain."
_SERVER = (
    "Address of the server. Repeat it for a chain, once for each --at; with one less, the last stage runs here. "
    "A,B: several servers of one stage."
)


@click.command(cls=Command)
@model_options("stages", "weights", "device")
@click.option(
    "--server", "servers", required=True, multiple=True, metavar="HOST:PORT", callback=check_servers, help=_SERVER
)
@click.option("--data", metavar="FOLDER_OR_NPY", shell_complete=complete_file, help=_DATA)
@click.option("--repeat", type=WholeNumber(1), metavar="N", help="Number of requests without --data (default: 100).")
@click.option("--batch", type=WholeNumber(1), default=1, metavar="N", help="Samples per request.")
@click.option("--at", multiple=True, metavar="ADDRESS", help=f"{_AT} (default: auto)")
@click.option("--codec", default="auto", metavar="NAME", help="Codec of the boundary, such as raw, zstd or fp16.")
@click.option("--deadline", type=positive_duration, metavar="T", help=_DEADLINE)
@click.option("--no-fallback", is_flag=True, help=_NO_FALLBACK)
@click.option("--max-reply", metavar="SIZE", help="Maximum size of a reply, such as 256MB, if it depends on values.")
@click.option("--window", type=WholeNumber(1), default=8, metavar="N", help="Maximum number of requests in flight.")
@click.option("--warmup", type=WholeNumber(0), default=1, metavar="N", help="Warm-up requests, not counted.")
@click.option("--to", metavar="FOLDER", shell_complete=complete_file, help=_TO)
@output_options("json", "csv", "md", "perfetto")
@connection_options
def run(
    *,
    model: ModelOptions,
    servers: list[list[str]],
    at: tuple[str, ...],
    data: str | None,
    repeat: int | None,
    batch: int,
    window: int,
    warmup: int,
    no_fallback: bool,
    to: str | None,
    outputs: Outputs,
    security: Security,
    **options: Any,
) -> None:
    """Run a model on data, the head here and the tail on a server or several, and time each phase of a request.

    MODEL is as for `microtome profile`, and must be the model that the servers have. If a server goes away, this
    machine computes the rest, and a note says how many requests; --no-fallback fails instead. JSON, CSV and the trace
    contain every request.
    """
    if data is not None and repeat is not None:
        raise click.UsageError("choose one of --data and --repeat")
    if data is None:
        refuse_options(("batch",), "is the batch of --data: of the example inputs, set that of --input")
    check_distinct(outputs.files | {"to": to})
    import_torch()
    from microtome.cli.tensor_files import describe_tensors, open_tensors
    from microtome.remote.connect import connect
    from microtome.results.requests import RequestLog, cut_moves

    target, cuts, resolved = _load(model, at, len(servers))
    example = resolved.inputs
    items, total = _make_items(data, repeat or 100, batch, example)
    server = " → ".join(map(", ".join, servers))
    with show_progress(f"connecting to {server}"), wrap_model_errors(resolved):
        fallback = None if no_fallback else "local"
        remote = connect(target, example, servers=servers, at=cuts, fallback=fallback, **options, **asdict(security))
    with remote, open_tensors(to) as write_output, show_progress(f"running {model.name}") as progress:
        with wrap_model_errors(resolved):
            _warm_up(remote, example, warmup)
        began, known = len(remote.history), remote.down_reasons
        with _measure_energy(example) as energy:
            start = perf_counter()

            def update(done: int) -> None:
                progress(f"{done / max(perf_counter() - start, 1e-9):.1f} requests/s", done, total)

            requests, samples = _stream(remote, items, window, write_output, update, resolved)
            wall_s = perf_counter() - start
        down = [f"not used: {reason}" for reason in remote.down_reasons if reason not in known]
        moves = cut_moves(remote.history[0 if began == 1 else began :])
    log = RequestLog(
        model=remote.server.model,
        server=server,
        device=remote.server.device,
        window=window,
        wall_s=wall_s,
        samples=samples,
        requests=tuple(requests),
        moves=moves,
        name=model.name,
        **energy,
    )
    outputs.write_result(log, perfetto=log.to_perfetto)
    print_notes(down)
    if to is not None:
        click.echo(f"written: {describe_tensors(to)}", err=True)


def _load(model: ModelOptions, at: tuple[str, ...], num_servers: int) -> tuple[Any, Any, Resolved]:
    """Return the model, or the stages that run here, the cuts, and what was built."""
    cuts: Any = list(at) if len(at) > 1 else at[0] if at else "auto"
    if model.stages is None:
        whole, resolved = model.load(0)
        return whole, cuts, resolved
    from microtome.split.checkpoint import saved_cuts

    cuts = cuts if at else saved_cuts(model.stages)
    first, resolved = model.load(0)
    if not isinstance(cuts, list) or num_servers >= len(cuts):
        return first, cuts, resolved
    return [first, model.load(-1)[0]], cuts, resolved


def _make_items(data: str | None, repeat: int, batch: int, example: Inputs) -> tuple[Iterator[Inputs], int]:
    """Return the inputs of each request, and the number of requests."""
    if data is None:
        return repeat_item(example, repeat), repeat
    from microtome.cli.samples import count_samples, describe_images, read_batches, single_tensor
    from microtome.inputs import Inputs

    like = single_tensor(example, "run others from Python, with mt.connect")
    print_notes(describe_images(data, like))
    return map(Inputs, read_batches(data, batch, like)), -(-count_samples(data) // batch)


def _warm_up(remote: Remote, example: Inputs, count: int) -> None:
    """Send warm-up requests; those that exceed the deadline count too."""
    for _ in range(count):
        try:
            remote(*example.args, **example.kwargs)
        except RemoteError as error:
            if error.kind != "DEADLINE":
                raise


def _stream(
    remote: Remote,
    items: Iterator[Inputs],
    window: int,
    write_output: Callable[[Any], None],
    update: Callable[[int], None],
    resolved: Resolved,
) -> tuple[list[RequestRecord], int]:
    """Run all requests; return their records and the number of samples."""
    requests: list[RequestRecord] = []
    samples = 0
    last: Inputs = resolved.inputs

    def count_samples_of_items() -> Iterator[Inputs]:
        nonlocal samples, last
        for last in items:
            samples += _batch_size(last)
            yield last

    with wrap_model_errors(resolved, lambda: last, hint=""):
        for output in remote.stream(count_samples_of_items(), window):
            requests.append(remote.requests[-1])
            write_output(output)
            update(len(requests))
    return requests, samples


def _batch_size(inputs: Inputs) -> int:
    from microtome.engine.pytree import tensors_in

    first = next(tensors_in((inputs.args, inputs.kwargs)), None)
    return 1 if first is None or not first.ndim else len(first)


@contextmanager
def _measure_energy(example: Inputs) -> Iterator[dict[str, Any]]:
    """Measure the energy of this device, as the energy fields of `RequestLog`, filled in when the block ends."""
    from microtome.devices.meters import Window, pick
    from microtome.engine.pytree import accelerators_in

    fields: dict[str, Any] = {}
    try:
        meter = pick(None, accelerators_in((example.args, example.kwargs)))
    except SensorFailed as error:
        fields["energy"] = str(error)
        yield fields
        return
    with meter:
        with Window(meter) as window:
            yield fields
        energy = window.energy()
        fields.update(energy_j=energy.joules, energy=energy.reason or f"{meter.what}: {energy.method}")
