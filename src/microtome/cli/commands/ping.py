"""`microtome ping`: identify a server and measure the link to it."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from microtome import __version__
from microtome.addresses import INPUT, OUTPUT
from microtome.cli.interrupts import import_torch
from microtome.cli.options.connection import check_server, connection_options
from microtome.cli.options.outputs import Outputs, output_options
from microtome.cli.options.repetition import Command
from microtome.cli.progress import show_progress
from microtome.errors import sanitize_text
from microtome.units import count, rate, seconds, size, some

if TYPE_CHECKING:
    from microtome.remote.security import Security

#: Cuts to list by name.
_MAX_CUTS = 5
#: Bytes of the largest message of a bandwidth measurement.
_MAX_MESSAGE = 8 << 20


@click.command(cls=Command)
@click.argument("server", metavar="HOST:PORT", callback=check_server)
@output_options("json")
@connection_options
def ping(server: str, *, outputs: Outputs, security: Security, timeout: float) -> None:
    """Show what a server serves, and the latency and bandwidth of the link to it.

    Needs no model on this machine. JSON lists every cut.
    """
    import_torch()
    with show_progress(f"asking {server}"):
        reply = _ask(server, security, timeout)
    outputs.write({"json": lambda: json.dumps(reply, indent=1) + "\n"}, partial(_text, reply))


def _ask(server: str, security: Security, timeout: float) -> dict[str, Any]:
    import torch

    from microtome.remote import protocol
    from microtome.remote.connection import Connection
    from microtome.remote.server_probe import measure_link

    with closing(Connection(server, security)) as connection:
        hello = protocol.HelloRequest(protocol=protocol.PROTOCOL, microtome=__version__, torch=torch.__version__)
        connection.call("Hello", hello, timeout)  # opens the connection
        start = perf_counter()
        reply = connection.call("Hello", hello, timeout)
        handshake_s = perf_counter() - start
        measured = measure_link(connection, max_bytes=min(_MAX_MESSAGE, reply.max_message))
    return {
        "kind": "ping",
        "schema": 1,
        "server": server,
        "model": reply.model,
        "params": reply.params or None,
        "fingerprint": reply.fingerprint,
        "device": reply.device,
        "protocol": reply.protocol,
        "microtome": reply.microtome,
        "torch": reply.torch,
        "handshake_s": handshake_s,
        "rtt_s": measured.rtt_s,
        "rtt_median_s": measured.rtt_s + measured.jitter_s,
        "up_bytes_per_s": measured.up_bytes_per_s,
        "down_bytes_per_s": measured.down_bytes_per_s,
        "max_message": reply.max_message,
        "batch": reply.batch,
        "codecs": list(reply.codecs),
        "cuts": list(reply.cuts),
        "any_stage": reply.any_stage,
        "ends_at": reply.ends_at or None,
    }


def _text(reply: dict[str, Any]) -> str:
    lines = {
        "versions": f"microtome {reply['microtome']}, torch {reply['torch']}, protocol {reply['protocol']}",
        "handshake": seconds(reply["handshake_s"]),
        "round trip": f"{seconds(reply['rtt_s'])} min / {seconds(reply['rtt_median_s'])} median",
        "bandwidth": f"{rate(reply['up_bytes_per_s'])} up / {rate(reply['down_bytes_per_s'])} down",
        "codecs": ", ".join(reply["codecs"]),
        "cuts": _cuts(reply),
        "limits": f"max request {size(reply['max_message'])}{_batch(reply['batch'])}",
        "parameters": count(reply["params"]),
        "model": reply["fingerprint"],
    }
    head = f"{reply['server']} serves {reply['model']} on {reply['device']}"
    text = [head, *(f"  {name:<11} {value}" for name, value in lines.items())]
    import torch

    if reply["torch"].partition("+")[0] != torch.__version__.partition("+")[0]:
        text.append(f"Note: this machine has torch {torch.__version__}: clients must allow another version")
    return "\n".join(map(sanitize_text, text))


def _cuts(reply: dict[str, Any]) -> str:
    """List the cuts where stages begin and, if they end in one place, where."""
    cuts = reply["cuts"]
    ends = "" if reply["any_stage"] else f", up to {reply['ends_at'] or OUTPUT}"
    return f"{len(cuts)}: {some([at or INPUT for at in cuts], _MAX_CUTS)}{ends}"


def _batch(most: int) -> str:
    return f", batches of up to {most}" if most > 1 else ""
