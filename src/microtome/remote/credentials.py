"""Certificates and tokens."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from microtome.errors import BadFile, BadQuery
from microtome.files.reading import read_bytes
from microtome.remote.optional_packages import grpc

_HEADER = "authorization"
_SCHEME = "Bearer "


@dataclass(frozen=True)
class Identity:
    """The certificate of a server, and the credentials that it asks of clients, as files.

    Attributes:
        tls_cert: Its certificate, PEM; None: no TLS.
        tls_key: The key of that.
        client_ca: Who signs the certificates of clients; None: they need none.
        token: The secret that clients must send; None: none.
    """

    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check(self.token)
        if self.token == "":  # which anybody knows
            raise BadQuery("a token is one line of ASCII, and this is empty")

    def credentials(self) -> grpc.ServerCredentials | None:
        if self.tls_cert is None and self.tls_key is None:
            if self.client_ca is not None:
                raise BadQuery("certificates of clients can be checked with TLS only: give --tls-cert and --tls-key")
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise BadQuery("TLS needs both --tls-cert and --tls-key")
        ca = None if self.client_ca is None else read_file(self.client_ca)
        pair = [(read_file(self.tls_key), read_file(self.tls_cert))]
        return grpc.ssl_server_credentials(pair, ca, require_client_auth=ca is not None)

    def knows(self, metadata: Iterable[tuple[str, Any]]) -> bool:
        """Whether a call may go on."""
        if self.token is None:
            return True
        said = next((value for key, value in metadata if key == _HEADER), "")
        said = said if isinstance(said, bytes) else str(said).encode()
        return hmac.compare_digest(said, (_SCHEME + self.token).encode())


def _check(token: str | None) -> None:
    if token is not None and not (token.isascii() and token.isprintable()):
        raise BadQuery("a token is one line of ASCII, and this has other characters")


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    _check(token)
    return () if token is None else ((_HEADER, _SCHEME + token),)


def channel_credentials(ca: str | None, cert: str | None, key: str | None) -> grpc.ChannelCredentials:
    """Credentials of a channel: the authority that the client trusts (None: those of the system), and its own."""
    if (cert is None) != (key is None):
        raise BadQuery("a client's certificate needs its key, and the other way round")
    return grpc.ssl_channel_credentials(*(None if file is None else read_file(file) for file in (ca, key, cert)))


def read_file(file: str) -> bytes:
    return read_bytes(file, 1 << 20)


def read_token(file: str) -> str:
    """The first line of a file."""
    token = read_file(file).decode(errors="replace").strip()
    if not token or not token.isascii() or "\n" in token:
        raise BadFile(f"{file!r} holds no token: one line of ASCII is one")
    return token


def is_loopback(listen: str) -> bool:
    host = listen.rpartition(":")[0].strip("[]")
    if host in ("unix", "unix-abstract", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
