"""`microtome run`: run a model on data, split between this machine and a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import repeat as again
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from microtome.cli.options.connection import connection_options
from microtome.cli.options.model import model_options, working
from microtome.cli.options.outputs import output_options, put_result, refuse_same
from microtome.cli.options.stage import part_of
from microtome.cli.samples import batches, count_of, lone_tensor
from microtome.cli.tensor_files import open_tensors
from microtome.engine.pytree import accelerators_in, tensors_in
from microtome.errors import BadInputs, MicrotomeError, RemoteError, SensorFailed, describe_error
from microtome.inputs import Inputs

if TYPE_CHECKING:
    from microtome.remote.channel import Security
    from microtome.remote.client import Remote
    from microtome.results.requests import RequestRecord

_DATA = ".npy of (samples, …), or a folder of .npy or images (default: the example inputs, --repeat times)."
_DEADLINE = "Seconds that a request may take; after that, this machine computes the output."
_AT = "Cut: an address of `microtome cuts`; auto: the fastest; '': send the inputs."


@click.command()
@model_options
@click.option("--server", required=True, metavar="HOST:PORT", help="Address of the server.")
@click.option("--data", metavar="FOLDER_OR_NPY", help=_DATA)
@click.option(
    "--repeat", type=click.IntRange(min=1), metavar="N", help="Number of requests without --data (default: 100)."
)
@click.option("--batch", type=click.IntRange(min=1), default=1, metavar="N", help="Samples per request.")
@click.option("--at", default="auto", metavar="ADDRESS", help=_AT)
@click.option("--codec", default="auto", metavar="NAME", help="Codec of the boundary, such as raw, zstd or fp16.")
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True), metavar="S", help=_DEADLINE)
@click.option("--max-reply", metavar="SIZE", help="Maximum size of a reply, such as 256MB, if it depends on values.")
@click.option(
    "--window", type=click.IntRange(min=1), default=8, metavar="N", help="Maximum number of requests in flight."
)
@click.option("--warmup", type=click.IntRange(min=0), default=1, metavar="N", help="Warm-up requests, not counted.")
@click.option("--stages", metavar="FOLDER", help="Run the first stage that `microtome split` wrote there.")
@click.option("--weights", type=click.Path(dir_okay=False), metavar="FILE", help="Load weights from this file.")
@click.option("--device", metavar="D", help="Compute the head on this device, such as cuda.")
@click.option("--perfetto", metavar="F", help="Write a trace of every request for https://ui.perfetto.dev.")
@click.option("--to", metavar="FOLDER", help="Write the outputs: one file per request, or one F.safetensors.")
@output_options
@connection_options
def run(
    model: str,
    inputs: str | None,
    args: dict[str, Any],
    *,
    server: str,
    data: str | None,
    repeat: int | None,
    batch: int,
    at: str,
    codec: str,
    deadline: float | None,
    max_reply: str | None,
    window: int,
    warmup: int,
    stages: str | None,
    weights: str | None,
    device: str | None,
    to: str | None,
    perfetto: str | None,
    outputs: dict[str, str | None],
    security: Security,
    timeout: float,
) -> None:
    """Run a model on data, the head here and the tail on a server, and time each phase of a request.

    MODEL is as for `microtome profile`, and must be the model that the server has. JSON and CSV list every request.
    """
    from microtome.remote.client import connect
    from microtome.results.requests import RequestLog, moved

    if data is not None and repeat is not None:
        raise click.UsageError("choose one of --data and --repeat")
    outputs = outputs | {"--perfetto": perfetto}
    refuse_same(outputs | {"--to": to})
    target, example = part_of(model, inputs, args, weights=weights, stages=stages, device=device)
    items, whole = _items(data, repeat or 100, batch, example)
    with working(f"connecting to {server}"):
        remote = connect(
            target,
            example,
            server,
            at,
            deadline=deadline,
            codec=codec,
            max_reply=max_reply,
            timeout=timeout,
            **asdict(security),
        )
    with remote, open_tensors(to) as keep, working(f"running {model}") as tell:
        _warm(remote, example, warmup)
        began = len(remote.history)
        with _measured(example) as energy:
            start = perf_counter()
            requests, samples = _streamed(remote, items, window, keep, partial(_tell, tell, whole, start))
            wall_s = perf_counter() - start
        moves = moved(remote.history[0 if began == 1 else began :])
    ran = RequestLog(
        model=remote.server.model,
        server=server,
        device=remote.server.device,
        window=window,
        wall_s=wall_s,
        samples=samples,
        requests=tuple(requests),
        moves=moves,
        **energy,
    )
    put_result(outputs, ran, perfetto=ran.to_perfetto)


def _items(data: str | None, repeat: int, batch: int, example: Inputs) -> tuple[Iterator[Inputs], int]:
    """The inputs of each request, and the number of requests."""
    if data is None:
        return again(example, repeat), repeat
    like = lone_tensor(example, "run others from Python, with mt.connect")
    whole = -(-count_of(data) // batch)
    return (Inputs(x.to(like.device)) for x in batches(data, batch, like)), whole


def _warm(remote: Remote, example: Inputs, times: int) -> None:
    """Send warm-up requests; those that exceed the deadline count too."""
    for _ in range(times):
        try:
            remote(*example.args, **example.kwargs)
        except RemoteError as error:
            if error.kind != "DEADLINE":
                raise


def _streamed(
    remote: Remote,
    items: Iterator[Inputs],
    window: int,
    keep: Callable[[Any], None],
    tell: Callable[[int], None],
) -> tuple[list[RequestRecord], int]:
    """Run all requests; return their records and the number of samples."""
    requests: list[RequestRecord] = []
    counts: list[int] = []
    last: list[Inputs] = []

    def counted() -> Iterator[Inputs]:
        for given in items:
            counts.append(_samples(given))
            last[:] = [given]
            yield given

    try:
        for output in remote.stream(counted(), window):
            requests.append(remote.requests[-1])
            keep(output)
            tell(len(requests))
    except MicrotomeError:
        raise
    except Exception as error:
        raise BadInputs(
            f"the model does not run on {last[0] if last else 'the data'!r}: {describe_error(error)}"
        ) from error
    return requests, sum(counts)


def _samples(given: Inputs) -> int:
    first = next(tensors_in((given.args, given.kwargs)), None)
    return 1 if first is None or not first.ndim else len(first)


def _tell(tell: Callable[[str, int, int], None], whole: int, start: float, done: int) -> None:
    tell(f"{done / max(perf_counter() - start, 1e-9):.1f} a second", done, whole)


@contextmanager
def _measured(example: Inputs) -> Iterator[dict[str, Any]]:
    """Measure the energy of this device, as the energy fields of `RequestLog`, filled in when the block ends."""
    from microtome.devices.meters import Window, pick

    found: dict[str, Any] = {}
    try:
        meter = pick(None, accelerators_in((example.args, example.kwargs)))
    except SensorFailed as error:
        found["energy"] = str(error)
        yield found
        return
    with meter:
        with Window(meter) as window:
            yield found
        energy = window.energy()
        found.update(energy_j=energy.joules, energy=energy.reason or f"{meter.what}: {energy.method}")
