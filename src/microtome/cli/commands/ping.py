"""`microtome ping`: who answers at an address, and how fast the way there is."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import Any

import click
import torch

from microtome import __version__
from microtome.cli.options.connection import connection_options
from microtome.cli.options.model import working
from microtome.cli.options.outputs import put, refuse_same
from microtome.errors import printable
from microtome.units import rate, seconds, size

#: How many cuts are named.
_FEW = 5
#: Bytes of the longest message that speed is measured with.
_LONGEST = 8 << 20


@click.command()
@click.argument("server", metavar="HOST:PORT")
@click.option("--json", "json_file", metavar="F", help="Write it as JSON, with every cut; - for the terminal.")
@connection_options
def ping(server: str, json_file: str | None, reach: dict[str, Any]) -> None:
    """Say who answers at an address, what it serves, and how fast the way there is.

    No model is needed on this side.
    """
    outputs = {"--json": json_file}
    refuse_same(outputs)
    with working(f"asking {server}"):
        found = _ask(server, **reach)
    put(outputs, {"--json": lambda: json.dumps(found, indent=1) + "\n"}, partial(_text, found))


def _ask(server: str, timeout: float, **security: Any) -> dict[str, Any]:
    from microtome.remote import protocol
    from microtome.remote.connection import Connection, Security
    from microtome.remote.link_probe import probe

    with closing(Connection(server, Security(**security))) as connection:
        hello = protocol.HelloRequest(protocol=protocol.PROTOCOL, microtome=__version__, torch=torch.__version__)
        connection.ask("Hello", hello, timeout)  # which opens the connection
        start = perf_counter()
        told = connection.ask("Hello", hello, timeout)
        handshake_s = perf_counter() - start
        measured = probe(connection, most=min(_LONGEST, told.max_message))
    return {
        "kind": "ping",
        "schema": 1,
        "server": server,
        "model": told.model,
        "fingerprint": told.fingerprint,
        "device": told.device,
        "protocol": told.protocol,
        "microtome": told.microtome,
        "torch": told.torch,
        "handshake_s": handshake_s,
        "rtt_s": measured.rtt_s,
        "rtt_median_s": measured.rtt_s + measured.jitter_s,
        "up_bytes_per_s": measured.up_bytes_per_s,
        "down_bytes_per_s": measured.down_bytes_per_s,
        "max_message": told.max_message,
        "batch": told.batch,
        "codecs": list(told.codecs),
        "cuts": list(told.cuts),
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
    told = [head, *(f"  {name:<11} {value}" for name, value in lines.items())]
    if found["torch"].partition("+")[0] != torch.__version__.partition("+")[0]:
        told.append(f"Note: here is torch {torch.__version__}: a client is refused unless it allows another version")
    return "\n".join(map(printable, told))


def _cuts(cuts: list[str]) -> str:
    names = [at or "(the inputs)" for at in cuts[:_FEW]]
    return f"{len(cuts)}: {', '.join(names)}{', …' if len(cuts) > _FEW else ''}"


def _batch(most: int) -> str:
    return f", up to {most} computed together" if most > 1 else ""
