"""The kinds of errors on the wire, and their conversion from and to exceptions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import grpc
import torch

from microtome.errors import BadBoundary, MicrotomeError, NoMatch, RemoteError, describe_error
from microtome.remote import protocol
from microtome.remote.tls_files import UNUSABLE_KEY
from microtome.results.metrics import advise

if TYPE_CHECKING:
    from microtome.remote.security import Security

#: Kinds after which the client may compute the same request itself, or send it again later.
TRANSIENT = frozenset({"OUT_OF_MEMORY", "DEADLINE", "DRAINING", "UNREACHABLE"})

#: Statuses that are final: the same call would fail again.
_FINAL = {
    grpc.StatusCode.PERMISSION_DENIED: "denies access to this client",
    grpc.StatusCode.UNIMPLEMENTED: "does not speak this protocol",
    grpc.StatusCode.INVALID_ARGUMENT: "rejects the message",
    grpc.StatusCode.FAILED_PRECONDITION: "cannot do this",
}

#: What gRPC puts before the reason why no connection was made.
_NO_CONNECTION = re.compile(r"failed to connect to all addresses; last error: \w+: \S+: ")
_CONNECTION_REFUSED = "Connection refused"
_NOT_GRPC = "Failed parsing HTTP/2"
_UNVERIFIED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")

#: The most characters of an error message that are sent, and shown.
_MAX_CHARS = 2000


class WrongModel(BadBoundary):
    """A boundary of another model."""


class TooLarge(BadBoundary):
    """More bytes than a limit allows."""


class Late(MicrotomeError, TimeoutError):
    """The deadline of the client has passed."""


class Draining(MicrotomeError):
    """The server is shutting down: another one, or the same one later, may answer."""


class NoSession(MicrotomeError):
    """The session has ended, or never began on this stream."""


_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (WrongModel, "WRONG_MODEL"),
    (TooLarge, "TOO_LARGE"),
    (BadBoundary, "BAD_REQUEST"),
    (NoMatch, "NO_CUT"),
    (Late, "DEADLINE"),
    (Draining, "DRAINING"),
    (NoSession, "NO_SESSION"),
    (MemoryError, "OUT_OF_MEMORY"),
    (torch.OutOfMemoryError, "OUT_OF_MEMORY"),
    (MicrotomeError, "BAD_REQUEST"),
    (BaseException, "MODEL_FAILED"),
)


def _kind_of(error: BaseException) -> str:
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch's message on a CPU
        return "OUT_OF_MEMORY"
    if isinstance(error, RemoteError):  # of the server of the next stage
        return error.kind if error.kind in protocol.KINDS else "UNREACHABLE"
    return next(name for kind, name in _KINDS if isinstance(error, kind))


def to_message(error: BaseException) -> tuple[str, protocol.Error]:
    """Return the kind of an exception, and the message that reports it."""
    try:
        kind, text = _kind_of(error), str(error) if isinstance(error, MicrotomeError) else describe_error(error)
    except Exception:  # noqa: BLE001  an exception of the model whose `__str__` raises
        kind, text = "MODEL_FAILED", type(error).__name__
    # Lone surrogates, which file names may contain, are not valid in protobuf.
    text = text[:_MAX_CHARS].encode(errors="backslashreplace").decode()
    return kind, protocol.Error(kind=protocol.KINDS.index(kind), message=text)


def from_message(error: protocol.Error, server: str) -> RemoteError:
    """Return the exception for an error that a server reported."""
    kind = protocol.KINDS[error.kind] if 0 <= error.kind < len(protocol.KINDS) else "UNKNOWN"
    return RemoteError(f"{server} could not answer: {error.message[:_MAX_CHARS]}", kind)


def from_rpc(error: grpc.RpcError, server: str, security: Security, too_large: str) -> RemoteError:
    """Return the exception for a gRPC error at the client.

    Args:
        security: TLS and token of the client.
        too_large: What happened if the reply exceeds the limit of the channel.
    """
    code, details = error.code(), str(error.details())
    if security.is_encrypted and (failure := _tls_failure(details)):
        return RemoteError(f"{server}{failure}", "REFUSED")
    if code == grpc.StatusCode.UNAUTHENTICATED:
        option = advise("token=", "--token-file")
        problem = (
            "requires a token: pass it" if security.token is None else "rejects the token: pass that of the server"
        )
        return RemoteError(f"{server} {problem} with {option}", "REFUSED")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and details.startswith("SERVER:"):
        return RemoteError(f"the message is larger than {server} accepts: {details}", "TOO_LARGE")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return RemoteError(f"{server} {too_large} ({details})", "TOO_LARGE")
    if "Compression algorithm" in details:
        return RemoteError(f"{server} compresses messages, whose size is then unbounded: {details}", "REFUSED")
    if code in _FINAL:
        return RemoteError(f"{server} {_FINAL[code]}: {details}", "REFUSED")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return RemoteError(f"{server} did not answer in time: {details}", "UNREACHABLE")
    return RemoteError(f"{server} cannot be reached: {_no_connection(details, security)}", "UNREACHABLE")


def is_connection_refused(error: grpc.RpcError) -> bool:
    """Whether the host is there, and nothing listens on the port, or another program does."""
    details = str(error.details())
    return _CONNECTION_REFUSED in details or _NOT_GRPC in details


def _tls_failure(details: str) -> str:
    """Return why a TLS handshake failed for good; empty if it did not."""
    if "WRONG_VERSION_NUMBER" in details:
        server, client = advise("tls_cert=", "--tls-cert"), advise("tls=, ca= and cert=", "--tls, --ca and --cert")
        return f" does not use TLS: start the server with {server}, or leave out {client}"
    if "Failed to create security handshaker" in details:  # the files were checked, so that it is the type of a key
        return f": TLS failed: {advise('ca= or cert=', '--ca or --cert')}: {UNUSABLE_KEY}"
    if "Hostname Verification Check failed" in details:
        option = advise("server_name=", "--server-name")
        return f": TLS verification failed: the certificate is of another host. Pass the name in it with {option}"
    if (unverified := _UNVERIFIED.search(details)) is None:
        return ""
    hint = f". Pass the authority that signed the certificate with {advise('ca=', '--ca')}"
    return f": TLS verification failed: {unverified[1]}{hint if 'issuer' in unverified[1] else ''}"


def _no_connection(details: str, security: Security) -> str:
    """Return why there is no connection, without the words that gRPC puts around the reason."""
    if _CONNECTION_REFUSED in details:
        return "connection refused: nothing listens there. Is the server running, and is the port right?"
    if _NOT_GRPC in details:
        return "another program listens there, which does not use gRPC. Is the port right?"
    if "Domain name not found" in details or "DNS resolution failed" in details:
        return "the name of the host was not found"
    if _NO_CONNECTION.match(details) is None or not ("Socket closed" in details or "Connection reset" in details):
        return _NO_CONNECTION.sub("", details)
    closed = "it closes the connection during the handshake"
    if not security.is_encrypted:
        return f"{closed}. If it uses TLS, add {advise('ca= or tls=True', '--ca or --tls')}"
    if security.cert is None:
        return f"{closed}. If it requires a client certificate, add {advise('cert= and key=', '--cert and --key')}"
    return f"{closed}: it may reject the client certificate"
