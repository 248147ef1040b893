"""Errors between two sides, as kinds that a message can name."""

from __future__ import annotations

import torch

from microtome.errors import BadBoundary, MicrotomeError, NoMatch, RemoteError, describe_error
from microtome.remote import protocol
from microtome.remote.optional_packages import grpc

#: Kinds after which the same request may be answered by the edge itself, or later by the server.
PASSING = frozenset({"OUT_OF_MEMORY", "DEADLINE", "DRAINING", "UNREACHABLE"})

#: Statuses that are final: the same call would fail again.
_FINAL = {
    grpc.StatusCode.UNAUTHENTICATED: "wants another token",
    grpc.StatusCode.PERMISSION_DENIED: "does not let this client in",
    grpc.StatusCode.UNIMPLEMENTED: "does not speak this protocol",
    grpc.StatusCode.INVALID_ARGUMENT: "refuses what it is sent",
    grpc.StatusCode.FAILED_PRECONDITION: "cannot do this",
}

#: The most characters of a message that are sent, and shown.
_MESSAGE = 2000


class WrongModel(BadBoundary):
    """A boundary of another model."""


class TooLarge(BadBoundary):
    """More bytes than a side takes."""


class Late(MicrotomeError, TimeoutError):
    """Nobody waits for the answer any more."""


class Draining(MicrotomeError):
    """The server ends: another one, or the same later, may answer."""


_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (WrongModel, "WRONG_MODEL"),
    (TooLarge, "TOO_LARGE"),
    (BadBoundary, "BAD_REQUEST"),
    (NoMatch, "NO_CUT"),
    (Late, "DEADLINE"),
    (Draining, "DRAINING"),
    (MemoryError, "OUT_OF_MEMORY"),
    (torch.OutOfMemoryError, "OUT_OF_MEMORY"),
    (MicrotomeError, "BAD_REQUEST"),
    (BaseException, "MODEL_FAILED"),
)


def kind_of(error: BaseException) -> str:
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # what torch says on a CPU
        return "OUT_OF_MEMORY"
    return next(name for kind, name in _KINDS if isinstance(error, kind))


def as_message(error: BaseException) -> tuple[str, protocol.Error]:
    """The kind of an error, and the message that tells it."""
    try:
        kind, text = kind_of(error), str(error) if isinstance(error, MicrotomeError) else describe_error(error)
    except Exception:  # noqa: BLE001  the model's own, which cannot be shown
        kind, text = "MODEL_FAILED", type(error).__name__
    return kind, protocol.Error(kind=protocol.KINDS.index(kind), message=_sendable(text))


def _sendable(text: str) -> str:
    """Shorten a text and escape lone surrogates, which names from outside may hold and protobuf does not take."""
    return text[:_MESSAGE].encode(errors="backslashreplace").decode()


def from_message(error: protocol.Error, server: str) -> RemoteError:
    """The error that a server told of."""
    kind = protocol.KINDS[error.kind] if 0 <= error.kind < len(protocol.KINDS) else "UNKNOWN"
    return RemoteError(f"{server} could not answer: {error.message[:_MESSAGE]}", kind)


def from_rpc(error: grpc.RpcError, server: str, too_large: str) -> RemoteError:
    """The error that gRPC raised on the side of the client.

    Args:
        too_large: What the server did if its reply has too many bytes.
    """
    code, details = error.code(), error.details()
    if "CERTIFICATE_VERIFY_FAILED" in str(details):
        return RemoteError(f"{server}: TLS verification failed: {details}", "REFUSED")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and str(details).startswith("SERVER:"):
        return RemoteError(f"{server} was sent more than it takes: {details}", "TOO_LARGE")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in str(details):
        return RemoteError(f"{server} {too_large} ({details})", "TOO_LARGE")
    if "Compression algorithm" in str(details):
        return RemoteError(f"{server} compresses messages, which could unpack to anything: {details}", "REFUSED")
    if code in _FINAL:
        return RemoteError(f"{server} {_FINAL[code]}: {details}", "REFUSED")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return RemoteError(f"{server} did not answer in time: {details}", "UNREACHABLE")
    return RemoteError(f"{server} cannot be reached: {details}", "UNREACHABLE")
