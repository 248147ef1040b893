"""`microtome ping`: identify a server and measure the link to it."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
import torch

from microtome import __version__
from microtome.cli.options.connection import connection_options
from microtome.cli.options.model import working
from microtome.cli.options.outputs import put, refuse_same
from microtome.errors import sanitize_text
from microtome.units import rate, seconds, size

if TYPE_CHECKING:
    from microtome.remote.channel import Security

#: The most cuts to list by name.
_FEW = 5
#: Bytes of the longest message of a bandwidth measurement.
_LONGEST = 8 << 20


@click.command()
@click.argument("server", metavar="HOST:PORT")
@click.option("--json", "json_file", metavar="F", help="Write JSON, with every cut; - for stdout.")
@connection_options
def ping(server: str, json_file: str | None, security: Security, timeout: float) -> None:
    """Show what a server serves, and the latency and bandwidth of the link to it.

    Needs no model on this machine.
    """
    outputs = {"--json": json_file}
    refuse_same(outputs)
    with working(f"asking {server}"):
        found = _ask(server, security, timeout)
    put(outputs, {"--json": lambda: json.dumps(found, indent=1) + "\n"}, partial(_text, found))


def _ask(server: str, security: Security, timeout: float) -> dict[str, Any]:
    from microtome.remote import protocol
    from microtome.remote.connection import Connection
    from microtome.remote.link_probe import probe

    with closing(Connection(server, security)) as connection:
        hello = protocol.HelloRequest(protocol=protocol.PROTOCOL, microtome=__version__, torch=torch.__version__)
        connection.ask("Hello", hello, timeout)  # which opens the connection
        start = perf_counter()
        reply = connection.ask("Hello", hello, timeout)
        handshake_s = perf_counter() - start
        measured = probe(connection, most=min(_LONGEST, reply.max_message))
    return {
        "kind": "ping",
        "schema": 1,
        "server": server,
        "model": reply.model,
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
    }


def _text(found: dict[str, Any]) -> str:
    lines = {
        "versions": f"microtome {found['microtome']}, torch {found['torch']}, protocol {found['protocol']}",
        "handshake": seconds(found["handshake_s"]),
        "round trip": f"{seconds(found['rtt_s'])} at least, {seconds(found['rtt_median_s'])} median",
        "bandwidth": f"{rate(found['up_bytes_per_s'])} there, {rate(found['down_bytes_per_s'])} back",
        "codecs": ", ".join(found["codecs"]),
        "cuts": _cuts(found["cuts"]),
        "takes": f"{size(found['max_message'])} a request at most{_batch(found['batch'])}",
        "model": found["fingerprint"],
    }
    head = f"{found['server']} serves {found['model']} on {found['device']}"
    text = [head, *(f"  {name:<11} {value}" for name, value in lines.items())]
    if found["torch"].partition("+")[0] != torch.__version__.partition("+")[0]:
        text.append(f"Note: here is torch {torch.__version__}: a client is refused unless it allows another version")
    return "\n".join(map(sanitize_text, text))


def _cuts(cuts: list[str]) -> str:
    names = [at or "(the inputs)" for at in cuts[:_FEW]]
    return f"{len(cuts)}: {', '.join(names)}{', …' if len(cuts) > _FEW else ''}"


def _batch(most: int) -> str:
    return f", up to {most} computed together" if most > 1 else ""
