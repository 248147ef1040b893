"""`microtome run`: data through a model of which a server runs the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from microtome.errors import BadInputs, MicrotomeError, RemoteError, SensorFailed, said
from microtome.inputs import Inputs

if TYPE_CHECKING:
    from microtome.remote.client import Remote
    from microtome.results.requests import RequestRecord

_DATA = ".npy of (samples, …), or a folder of .npy or images; else the model's example inputs, --repeat times."
_DEADLINE = "Seconds that a request may take; then it ends here."
_AT = "Where to cut: an address of `microtome cuts`; auto: where it is the fastest; '': the inputs are sent."


@click.command()
@model_options
@click.option("--server", required=True, metavar="HOST:PORT", help="Who runs the rest.")
@click.option("--data", metavar="FOLDER_OR_NPY", help=_DATA)
@click.option("--repeat", type=click.IntRange(min=1), metavar="N", help="Without --data, so many requests: else 100.")
@click.option("--batch", type=click.IntRange(min=1), default=1, metavar="N", help="Samples of the data in a request.")
@click.option("--at", default="auto", metavar="ADDRESS", help=_AT)
@click.option("--codec", default="auto", metavar="NAME", help="How what crosses is encoded, such as raw, zstd or fp16.")
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True), metavar="S", help=_DEADLINE)
@click.option(
    "--max-reply", metavar="SIZE", help="The most bytes of a reply, such as 256MB, if values decide its size."
)
@click.option("--window", type=click.IntRange(min=1), default=8, metavar="N", help="Requests on their way at most.")
@click.option("--warmup", type=click.IntRange(min=0), default=1, metavar="N", help="Requests before, not counted.")
@click.option("--stages", metavar="FOLDER", help="Run the first stage that `microtome split` wrote there.")
@click.option("--weights", type=click.Path(dir_okay=False), metavar="FILE", help="Load these weights.")
@click.option("--device", metavar="D", help="Compute the head on this device, such as cuda.")
@click.option("--perfetto", metavar="F", help="Write every request for https://ui.perfetto.dev.")
@click.option("--to", metavar="FOLDER", help="Write what the model returns: a file a request, or one F.safetensors.")
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
    reach: dict[str, Any],
) -> None:
    """Run a model on data, its head here and the rest on a server; say what each part of a request takes.

    MODEL is as for `microtome profile`, and the one that the server has. JSON and CSV have every request.
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
        remote = connect(target, example, server, at, deadline=deadline, codec=codec, max_reply=max_reply, **reach)
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
    """What is sent, and how many requests that is."""
    if data is None:
        return again(example, repeat), repeat
    like = lone_tensor(example, "run others from Python, with mt.connect")
    whole = -(-count_of(data) // batch)
    return (Inputs(x.to(like.device)) for x in batches(data, batch, like)), whole


def _warm(remote: Remote, example: Inputs, times: int) -> None:
    """Have both sides make what they keep."""
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
    """What became of each request, and how many samples there were."""
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
        raise BadInputs(f"the model does not run on {last[0] if last else 'the data'!r}: {said(error)}") from error
    return requests, sum(counts)


def _samples(given: Inputs) -> int:
    first = next(tensors_in((given.args, given.kwargs)), None)
    return 1 if first is None or not first.ndim else len(first)


def _tell(tell: Callable[[str, int, int], None], whole: int, start: float, done: int) -> None:
    tell(f"{done / max(perf_counter() - start, 1e-9):.1f} a second", done, whole)


@contextmanager
def _measured(example: Inputs) -> Iterator[dict[str, Any]]:
    """What `RequestLog` says of the energy of this device, once the block has ended."""
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
