"""Open a gRPC channel to a server that is not trusted with this side's memory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from microtome.errors import BadQuery
from microtome.remote.credentials import channel_credentials, is_loopback
from microtome.remote.optional_packages import grpc

#: Bytes of a reply that every channel takes: of a profile, of an echo, of an output that the example does not explain.
REPLY = 32 << 20
#: The most bytes of one message: protobuf reads no more.
MOST = (2 << 30) - 1
_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")


@dataclass(frozen=True)
class Security:
    """Credentials of a client, as files, and the authorities it trusts.

    Attributes:
        tls: Whether the connection is encrypted; it is, too, where a file or a name of the server is given.
        ca: Who signs the server's certificate; None: those that the system believes.
        cert: The client's certificate, and `key` its key.
        server_name: The name in the server's certificate, where it is not that of the address.
    """

    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    token: str | None = field(default=None, repr=False)
    server_name: str | None = None

    @property
    def is_encrypted(self) -> bool:
        return bool(self.tls or self.ca or self.cert or self.key or self.server_name)


def check_address(address: str, security: Security) -> None:
    """Raise if this is no address; warn if a token would go there in plain text."""
    if not isinstance(address, str) or not _is_address(address):
        raise BadQuery(f"a server has an address such as host:7070, got {address!r}")
    if security.token is not None and not security.is_encrypted and not _is_here(address):
        warnings.warn(
            f"the token is sent to {address} without TLS: whoever is on the way can read it and use it. Encrypt the "
            "connection with tls=True or ca= (--tls, --ca)",
            RuntimeWarning,
            stacklevel=4,
        )


def _is_address(address: str) -> bool:
    """Whether it has a host and a port; gRPC takes a port that is too large for another one."""
    host, _, port = address.rpartition(":")
    if address.startswith(_SCHEMES):
        return True
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


def _is_here(address: str) -> bool:
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    scheme = next((one for one in _SCHEMES if address.startswith(one)), "")
    return is_loopback(address.removeprefix(scheme).removeprefix("///"))


def open_channel(address: str, security: Security, reply_bytes: int = REPLY) -> grpc.Channel:
    """A channel on which no reply takes more bytes."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", reply_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: the limit is one of compressed bytes
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),  # a request may take long
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if security.server_name is not None:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    if security.is_encrypted:
        credentials = channel_credentials(security.ca, security.cert, security.key)
        return grpc.secure_channel(address, credentials, options)
    return grpc.insecure_channel(address, options)
