"""`microtome serve`: the tails of a model as a service."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from typing import Any

import click

from microtome.cli.options.model import model_options, working
from microtome.cli.options.stage import part_of

#: Numbers of glibc's malloc.h, and bytes: blocks up to the one come from memory that is kept, up to the other.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _LARGE = 64 << 20, 32 << 20


@click.command()
@model_options
@click.option("--listen", default="127.0.0.1:7070", metavar="HOST:PORT", help="Where; port 0 takes a free one.")
@click.option("--weights", type=click.Path(dir_okay=False), metavar="FILE", help="Load these weights.")
@click.option("--stages", metavar="FOLDER", help="Serve the last stage that `microtome split` wrote there, alone.")
@click.option("--device", metavar="D", help="Compute on this device, such as cuda.")
@click.option("--tls-cert", metavar="F", help="The server's certificate, PEM.")
@click.option("--tls-key", metavar="F", help="The key of that.")
@click.option("--client-ca", metavar="F", help="Who signs the certificates that clients must show.")
@click.option("--token-file", metavar="F", help="Clients must know the token in this file.")
@click.option("--max-message", default="256MB", metavar="SIZE", help="The most bytes of a request.")
@click.option("--concurrency", type=click.IntRange(min=1), default=1, metavar="N", help="Requests computed at once.")
@click.option(
    "--batch", type=click.IntRange(min=1), default=1, metavar="N", help="Compute up to N at the same cut together."
)
@click.option("--batch-window", default="2ms", metavar="T", help="How long the first of these waits for others.")
@click.option("--metrics", metavar=":PORT", help="Answer Prometheus there.")
@click.option("--grace", type=click.FloatRange(min=0), default=10.0, metavar="S", help="Seconds to drain on SIGTERM.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="warning", help="Say more or less."
)
def serve(
    model: str,
    inputs: str | None,
    args: dict[str, Any],
    *,
    weights: str | None,
    stages: str | None,
    device: str | None,
    token_file: str | None,
    metrics: str | None,
    grace: float,
    log_level: str,
    **options: Any,
) -> None:
    """Serve every cut of a model: a client runs the head, and this the rest.

    MODEL is as for `microtome profile`. It listens on loopback unless told otherwise, until SIGTERM or ctrl-C; then it
    answers what it has been asked, and ends.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else it writes what strangers send between the lines of the log
    from microtome.remote.credentials import read_token
    from microtome.remote.logs import log_to_stderr
    from microtome.remote.peers import raise_open_files
    from microtome.remote.server import serve as start

    _keep_memory()
    raise_open_files()
    log_to_stderr(log_level)
    token = None if token_file is None else read_token(token_file)
    target, given = part_of(model, inputs, args, weights=weights, stages=stages, index=-1, device=device)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with working(f"looking at {model}"):
        server = start(target, given, token=token, **options)
    try:
        if metrics is not None:
            server.metrics.listen(metrics)
        known = len(server.served.cuts)
        gc.freeze()  # what is there now stays: later collections need not look at it
        click.echo(f"{server.served.name} is served at {server.address}, from {known} places on")
        while not ended.wait(0.5) and not server.wait(0) and server.failure is None:
            pass
    finally:
        server.stop(grace if server.failure is None else 0.0)
    if server.failure is not None:
        raise click.ClickException(f"the device failed, and the process must be started again: {server.failure}")
    click.echo("ended")


def _keep_memory() -> None:
    """Take the buffers of a request from those of the one before, in this process, which is ours alone.

    glibc gives large ones back, and faulting them in again takes longer than filling them. With another C library
    nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
