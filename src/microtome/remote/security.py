"""TLS and tokens of both sides, and the interceptor that rejects calls without the token."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from microtome.errors import BadFile, BadQuery
from microtome.files.reading import read_bytes
from microtome.remote import protocol
from microtome.remote.tls_files import TlsFile, read_pair
from microtome.results.metrics import advise

if TYPE_CHECKING:
    from microtome.remote.peers import Peers
    from microtome.remote.prometheus import Metrics

log = logging.getLogger("microtome.remote")

_HEADER = "authorization"
_SCHEME = "Bearer "
#: Seconds before a wrong token is answered, and how many such answers may wait; beyond that, connections are closed.
DELAY_S, MAX_DELAYED = 0.5, 32


@dataclass(frozen=True)
class Security:
    """TLS and token of a client.

    Attributes:
        tls: Whether to encrypt the connection; implied by every other field but the token.
        ca: PEM file of the authority that signed the server's certificate; None: the system's authorities.
        cert: PEM file of the client's certificate, with `key`, its private key.
        token: The token to authenticate with.
        server_name: The name to expect in the server's certificate, if it differs from the host.
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

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        _check_token(self.token)
        return () if self.token is None else ((_HEADER, _SCHEME + self.token),)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of a channel; None: it is not encrypted.

        Raises:
            BadFile: A file is not what its option expects.
        """
        if not self.is_encrypted:
            return None
        if (self.cert is None) != (self.key is None):
            raise BadQuery("expected a client certificate with its key, got one without the other")
        ca = None if self.ca is None else TlsFile("ca", self.ca).read("certificate")
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(ca)
        cert, key = read_pair(TlsFile("cert", self.cert), TlsFile("key", self.key))
        return grpc.ssl_channel_credentials(ca, key, cert)


@dataclass(frozen=True)
class ServerSecurity:
    """TLS and token of a server.

    Attributes:
        tls_cert: PEM file of its certificate; None: no TLS.
        tls_key: PEM file of the private key of `tls_cert`.
        client_ca: PEM file of the authority that signs client certificates; None: clients need none.
        token: The token that clients must send; None: none.
    """

    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_token(self.token)
        if self.token == "":
            raise BadQuery("expected a token of one line of ASCII, got an empty one")

    def credentials(self) -> grpc.ServerCredentials | None:
        """Return the credentials of a port; None: it is not encrypted.

        Raises:
            BadFile: A file is not what its option expects.
        """
        if self.tls_cert is None and self.tls_key is None:
            if self.client_ca is not None:
                raise BadQuery(f"client certificates need TLS: add {_cert_and_key()}")
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise BadQuery(f"TLS needs both {_cert_and_key()}")
        cert, key = read_pair(TlsFile("tls_cert", self.tls_cert), TlsFile("tls_key", self.tls_key))
        ca = None if self.client_ca is None else TlsFile("client_ca", self.client_ca).read("certificate")
        return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)

    def describe_files(self) -> str:
        """Return the names of the files of TLS."""
        return ", ".join(repr(file) for file in (self.tls_cert, self.client_ca) if file is not None)

    def risks(self) -> str:
        """Return what others can do if they reach the server, and the options against it; empty: nothing."""
        tls, token = _cert_and_key(), advise("token=", "--token-file")
        is_open = self.token is None and self.client_ca is None
        if self.tls_cert is None and is_open:
            return (
                "there is no TLS and no token: anybody can use the model, read what is sent and answer in its place. "
                f"Add {tls}, and {token}"
            )
        if self.tls_cert is None:
            return (
                "there is no TLS: anybody on the way can read what is sent, with the token, and answer in its place. "
                f"Add {tls}"
            )
        return f"there is no token: anybody can use the model. Add {token}" if is_open else ""

    def authenticates(self, metadata: Iterable[tuple[str, Any]]) -> bool:
        """Whether the metadata of a call has the token, if one is required."""
        if self.token is None:
            return True
        sent = next((value for key, value in metadata if key == _HEADER), "")
        sent = sent if isinstance(sent, bytes) else str(sent).encode()
        return hmac.compare_digest(sent, (_SCHEME + self.token).encode())


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Reject calls without the token before any of their messages is read. Health checks need none."""

    def __init__(self, security: ServerSecurity, metrics: Metrics, peers: Peers) -> None:
        self._security = security
        self._metrics = metrics
        self._peers = peers
        self._delayed = 0

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        is_protected = details.method.startswith(f"/{protocol.SERVICE}/")
        if handler is None or not is_protected or self._security.authenticates(details.invocation_metadata):
            return handler
        return grpc.stream_stream_rpc_method_handler(self._reject)

    async def _reject(self, _: Any, context: Any) -> None:
        self._metrics.refused.labels("unauthenticated").inc()
        if self._delayed < MAX_DELAYED:
            log.warning("refused", extra={"peer": context.peer(), "reason": "the token is wrong or missing"})
            self._delayed += 1
            try:
                await asyncio.sleep(DELAY_S)
            finally:
                self._delayed -= 1
        else:
            self._peers.disconnect(context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong or missing")


def read_token(file: str) -> str:
    """Read a token from a file of one line."""
    token = read_bytes(file, 1 << 20).decode(errors="replace").strip()
    if not token or not token.isascii() or "\n" in token:
        raise BadFile(f"expected a token of one line of ASCII in {file!r}")
    return token


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address such as `127.0.0.1:7070`."""
    host = address.rpartition(":")[0].strip("[]")
    if host in ("unix", "unix-abstract", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_token(token: Any) -> None:
    if not isinstance(token, str | None):  # without the token itself, which is a secret
        raise BadQuery(f"expected a token as a str, got {type(token).__name__}")
    if token is not None and token.endswith(("\n", "\r")):
        raise BadQuery("expected a token without a line break at its end: pass token.strip()")
    if token is not None and not (token.isascii() and token.isprintable()):
        raise BadQuery("expected a token of one line of ASCII, got other characters")


def _cert_and_key() -> str:
    return advise("tls_cert= and tls_key=", "--tls-cert and --tls-key")
