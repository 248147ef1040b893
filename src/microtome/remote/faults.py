"""What goes wrong between two sides, as kinds that a message can name."""

from __future__ import annotations

import torch

from microtome.errors import BadBoundary, MicrotomeError, NoMatch, RemoteError, said
from microtome.remote import messages

#: Kinds after which the same request may be answered by the edge itself, or later by the server.
PASSING = frozenset({"OUT_OF_MEMORY", "DEADLINE", "DRAINING", "UNREACHABLE"})

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


def as_message(error: BaseException) -> tuple[str, messages.Error]:
    """The kind of an error, and the message that tells it."""
    try:
        kind, text = kind_of(error), str(error) if isinstance(error, MicrotomeError) else said(error)
    except Exception:  # noqa: BLE001  the model's own, which cannot be shown
        kind, text = "MODEL_FAILED", type(error).__name__
    return kind, messages.Error(kind=messages.KINDS.index(kind), message=_sendable(text))


def _sendable(text: str) -> str:
    """What of a text goes into a message: names that came from outside may hold halves of characters."""
    return text[:_MESSAGE].encode(errors="backslashreplace").decode()


def from_message(error: messages.Error, server: str) -> RemoteError:
    """The error that a server told of."""
    kind = messages.KINDS[error.kind] if 0 <= error.kind < len(messages.KINDS) else "UNKNOWN"
    return RemoteError(f"{server} could not answer: {error.message[:_MESSAGE]}", kind)
