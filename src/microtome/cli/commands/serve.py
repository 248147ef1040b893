"""`microtome serve`: serve the tails of a model over gRPC."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from microtome.cli.interrupts import import_torch
from microtome.cli.options.connection import check_addresses, check_server, file_option
from microtome.cli.options.durations import duration
from microtome.cli.options.model import ModelOptions, model_options, wrap_model_errors
from microtome.cli.options.numbers import WholeNumber
from microtome.cli.options.repetition import Command
from microtome.cli.options.requirements import refuse_options
from microtome.cli.progress import show_progress
from microtome.units import plural

if TYPE_CHECKING:
    from microtome.remote.inference_backend import InferenceBackend

#: Parameters of mallopt in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 64 << 20, 32 << 20
_STAGE = "Number of the stage of --stages to serve, from 0; one before the last answers with what crosses its end."
_FORWARD = "Server of the next stage, to which this one may send what crosses the end of its own; repeatable."
_GRACE = "Time to drain on SIGTERM, in seconds or such as 1min."
_SESSIONS = "Maximum number of sessions, each with the state of one sequence, such as a KV cache; 0: none."


@click.command(cls=Command)
@model_options("stages", "weights", "device")
@click.option("--stage", type=WholeNumber(0), metavar="N", help=f"{_STAGE} (default: the last)")
@click.option(
    "--listen",
    default="127.0.0.1:7070",
    metavar="HOST:PORT",
    callback=check_server,
    help="Address to listen on; port 0 picks a free port.",
)
@file_option("--tls-cert", "Server certificate, PEM.")
@file_option("--tls-key", "Private key of --tls-cert, PEM.")
@file_option("--client-ca", "Require client certificates signed by this authority, PEM.")
@file_option("--token-file", "Require the token in this file from clients.")
@click.option("--max-message", default="256MB", metavar="SIZE", help="Maximum size of a request.")
@click.option("--concurrency", type=WholeNumber(1), default=1, metavar="N", help="Requests computed concurrently.")
@click.option("--batch", type=WholeNumber(1), default=1, metavar="N", help="Batch up to N requests at the same cut.")
@click.option(
    "--batch-window", default="2ms", metavar="T", help="How long the first request of a batch waits for others."
)
@click.option("--sessions", type=WholeNumber(0), default=64, metavar="N", help=_SESSIONS)
@click.option("--state-memory", default="1GB", metavar="SIZE", help="Maximum size of the states of all sessions.")
@click.option("--session-timeout", default="10min", metavar="T", help="How long a session lasts without a step.")
@click.option("--forward", multiple=True, metavar="HOST:PORT", callback=check_addresses, help=_FORWARD)
@file_option("--forward-token-file", "Token for the servers of --forward.")
@file_option("--forward-ca", "Authority that signed the certificates of the servers of --forward, PEM; encrypts.")
@file_option("--forward-cert", "Client certificate for the servers of --forward, PEM.")
@file_option("--forward-key", "Private key of --forward-cert, PEM.")
@click.option("--metrics", metavar=":PORT", help="Serve Prometheus metrics on this port.")
@click.option("--grace", type=duration, default=10.0, metavar="T", help=_GRACE)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    help="Minimum level of log messages.",
)
def serve(
    *,
    model: ModelOptions,
    stage: int | None,
    token_file: str | None,
    forward_token_file: str | None,
    metrics: str | None,
    grace: float,
    log_level: str,
    **options: Any,
) -> None:
    """Serve every cut of a model: clients run the head, the server runs the tail. Or serve one of its stages.

    MODEL is as for `microtome profile`, or an exported stage: a file that ends in .onnx or .pte. Listens on loopback by
    default. On SIGTERM or Ctrl-C, the server answers the requests that it has received, and exits.
    """
    if stage is not None and model.stages is None:
        raise click.UsageError("--stage is the number of a stage in a folder: add --stages FOLDER")
    if options["batch"] == 1:
        refuse_options(("batch_window",), "is how long a batch waits for others: add --batch")
    import_torch()
    from microtome.remote.logs import log_to_stderr
    from microtome.remote.peers import raise_descriptor_limit
    from microtome.remote.security import read_token
    from microtome.remote.server import serve as start

    _keep_freed_memory()
    raise_descriptor_limit()
    log_to_stderr(log_level)
    token = None if token_file is None else read_token(token_file)
    forward_token = None if forward_token_file is None else read_token(forward_token_file)
    options |= {"token": token, "forward_token": forward_token}
    if model.is_exported:
        server = start(model.load_exported(), **options)
    else:
        target, resolved = model.load(-1 if stage is None else stage)
        with show_progress(f"analysing {model.name}"), wrap_model_errors(resolved):
            server = start(target, resolved.inputs if model.stages is None else None, **options)
    ended = threading.Event()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        if metrics is not None:
            server.metrics.listen(metrics)
        gc.freeze()  # the model lives as long as the process: later collections can skip it
        click.echo(f"{model.name} is served at {server.address}, {_describe(server.served)}")
        while not ended.wait(0.5) and not server.wait(0) and server.failure is None:
            pass
    finally:
        server.stop(grace if server.failure is None else 0.0)
    if server.failure is not None:
        raise click.ClickException(f"the device failed, restart the server: {server.failure}")
    click.echo("ended")


def _describe(served: InferenceBackend) -> str:
    """Name the cuts that are served, or the only stage."""
    from microtome.remote.exported_backend import ExportedBackend
    from microtome.remote.served_model import ServedModel

    if isinstance(served, ExportedBackend):
        return f"an exported stage, {served.describe_stage()}"
    assert isinstance(served, ServedModel)
    if served.only is None:
        return plural(len(served.cuts), "cut")
    return f"stage {served.only.index}, {served.describe_stage()}"


def _keep_freed_memory() -> None:
    """Let glibc reuse the large buffers of earlier requests.

    By default it returns them to the system, and page faults take longer than filling them. A no-op with other C
    libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
