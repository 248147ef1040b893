"""How a command is told to speak with a server: `--tls`, `--ca`, `--cert`, `--key`, `--token-file` and the like."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

_SECONDS = click.FloatRange(min=0, min_open=True)
_TIMEOUT = "Seconds to wait for the server at first."
_CA = "Who signs the server's certificate, PEM; else whom the system believes."


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a client, and as its argument `reach` what `mt.connect` takes of them."""

    @wraps(command)
    def told(
        *args: Any,
        tls: bool,
        ca: str | None,
        cert: str | None,
        key: str | None,
        token_file: str | None,
        server_name: str | None,
        timeout: float,
        **options: Any,
    ) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before it is imported: errors are said once, and by us
        if (cert is None) != (key is None):
            raise click.UsageError("--cert and --key go together: a certificate, and its key")
        encrypted = tls or ca is not None or cert is not None
        if server_name is not None and not encrypted:
            raise click.UsageError("--server-name is compared with a certificate: give --tls or --ca too")
        reach = {"tls": encrypted, "ca": ca, "cert": cert, "key": key, "server_name": server_name}
        command(*args, reach=reach | {"token": _token(token_file), "timeout": timeout}, **options)

    for option in (
        click.option(
            "--timeout", type=click.FloatRange(min=0, min_open=True), default=10.0, metavar="S", help=_TIMEOUT
        ),
        click.option("--server-name", metavar="NAME", help="The name in the server's certificate, if another."),
        click.option("--token-file", metavar="F", help="Show the token in this file."),
        click.option("--key", metavar="F", help="The key of --cert."),
        click.option("--cert", metavar="F", help="This client's certificate, PEM, if the server wants one."),
        click.option("--ca", metavar="F", help=_CA),
        click.option("--tls", is_flag=True, help="Encrypt the connection; --ca and --cert do so too."),
    ):
        told = option(told)
    return told


def _token(file: str | None) -> str | None:
    if file is None:
        return None
    from microtome.remote.credentials import read_token

    return read_token(file)
