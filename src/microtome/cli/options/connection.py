"""The options of commands that connect to a server: `--server`, `--timeout`, and those of TLS and tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from microtome.cli.completion import complete_file
from microtome.cli.options.durations import positive_duration
from microtome.endpoints import explain_endpoint

_CA = "PEM file of the authority that signed the server's certificate (default: the system's authorities)."
_SERVER_NAME = "Name to expect in the server's certificate, if it differs from the host."


def check_server(context: click.Context, parameter: click.Parameter, address: str | None) -> str | None:
    """Check the address of a server on the command line, before torch is imported."""
    if address is not None and (error := explain_endpoint(address)):
        raise click.BadParameter(error)
    return address


def check_addresses(context: click.Context, parameter: click.Parameter, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Check the addresses of several servers."""
    for address in addresses:
        check_server(context, parameter, address)
    return addresses


def check_servers(context: click.Context, parameter: click.Parameter, stages: tuple[str, ...]) -> list[list[str]]:
    """Check the addresses of the servers of each stage; several of one stage are separated by commas."""
    return [list(check_addresses(context, parameter, tuple(stage.split(",")))) for stage in stages]


server_option = click.option(
    "--server", required=True, metavar="HOST:PORT", callback=check_server, help="Address of the server."
)


def file_option(name: str, text: str) -> Callable[[Any], Any]:
    """Add an option for the name of a file to a command."""
    return click.option(name, metavar="F", shell_complete=complete_file, help=text)


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the connection options to a command, which receives them as `security` and `timeout`.

    If `--server` is optional and not set, `security` is None, and gRPC is not imported.
    """

    @wraps(command)
    def wrapper(
        *args: Any,
        tls: bool,
        ca: str | None,
        cert: str | None,
        key: str | None,
        token_file: str | None,
        server_name: str | None,
        **options: Any,
    ) -> None:
        if (cert is None) != (key is None):
            raise click.UsageError("--cert and --key go together: a certificate, and its key")
        is_encrypted = tls or ca is not None or cert is not None
        if server_name is not None and not is_encrypted:
            raise click.UsageError("--server-name is compared with a certificate: add --tls or --ca")
        if "server" in options and options["server"] is None:
            if is_encrypted or token_file is not None:
                raise click.UsageError("options of a connection apply to a server: add --server")
            return command(*args, security=None, **options)
        from microtome.remote.security import Security, read_token

        token = None if token_file is None else read_token(token_file)
        return command(*args, security=Security(is_encrypted, ca, cert, key, token, server_name), **options)

    for option in (
        click.option(
            "--timeout",
            type=positive_duration,
            default=10.0,
            metavar="T",
            help="Time to wait for the server when connecting, in seconds or such as 500ms.",
        ),
        click.option("--server-name", metavar="NAME", help=_SERVER_NAME),
        file_option("--token-file", "Authenticate with the token in this file."),
        file_option("--key", "Private key of --cert, PEM."),
        file_option("--cert", "Client certificate, PEM, if the server requires one."),
        file_option("--ca", _CA),
        click.option("--tls", is_flag=True, help="Encrypt the connection; implied by --ca and --cert."),
    ):
        wrapper = option(wrapper)
    return wrapper
