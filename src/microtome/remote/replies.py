"""Bound and check what a server answers, by the output of the example."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from microtome.errors import BadBoundary, BadFile, RemoteError
from microtome.inputs import Inputs
from microtome.remote import protocol
from microtome.remote.channel import MOST, REPLY
from microtome.remote.connection import Connection
from microtome.results.base import parse
from microtome.results.profile import Profile
from microtome.split.boundary import Boundary
from microtome.split.size_bounds import stated_bytes
from microtome.split.structure_spec import Example, TensorSpec, flatten
from microtome.units import size

#: How many bytes reading a reply may take for each byte of the output: codecs and layouts need room for a moment.
_READING = 12
#: The most characters of a profile, and of what it says of one call; and what a message takes beside them.
_PROFILE, _ROW, _ENVELOPE = 64 << 10, 16 << 10, 16


class Expected:
    """Bounds and checks of the reply to one request."""

    def __init__(self, example: Example, given: Inputs, most: int | None = None) -> None:
        """Compare a request with the example.

        Args:
            most: The most bytes of a reply; None: as many as the example explains.
        """
        _, tensors, plain = flatten((given.args, given.kwargs))
        now = [TensorSpec.of(tensor) for tensor in tensors]
        self._example = example
        self._same_kind = [one.dtype for one in now] == [one.dtype for one in example.inputs]
        self._same_kind = self._same_kind and repr(plain) == repr(example.plain)
        self._same_shapes = self._same_kind and now == list(example.inputs)
        self._same_rank = self._same_kind and not _may_squeeze(now, example.inputs)
        explained = _bytes_of(example.outputs) * _growth(now, example.inputs)
        #: Bytes of the message.
        self.reply_bytes = min(most if most is not None else max(REPLY, 2 * round(explained)), MOST)
        #: Bytes that reading it may take.
        self.reading_bytes = max(_READING * min(2 * round(explained), self.reply_bytes), 2 * self.reply_bytes)

    def check(self, output: Boundary, order: Sequence[str]) -> None:
        """Raise if an output is not one of this model.

        Args:
            order: The names of its tensors, as often as each is in the output.
        """
        for at, (name, known) in enumerate(zip(order, self._example.outputs, strict=True)):
            tensor = output.tensors[name]
            if self._same_kind and tensor.dtype != known.dtype:
                raise _wrong(at, f"dtype {known.dtype}", tensor)
            if self._same_rank and tensor.dim() != len(known.shape):
                raise _wrong(at, f"{len(known.shape)} dimensions", tensor)
            if self._same_shapes and self._example.is_static and tuple(tensor.shape) != known.shape:
                raise _wrong(at, f"shape {known.shape}", tensor)


def _wrong(at: int, expected: str, tensor: Tensor) -> BadBoundary:
    return BadBoundary(
        f"the server's answer is none of this model: expected {expected} for tensor {at} of the output, as on the "
        f"example, got {tensor.dtype} of shape {tuple(tensor.shape)}"
    )


def _bytes_of(several: Sequence[TensorSpec]) -> int:
    return sum(stated_bytes(one.shape, None, one.dtype) for one in several)


def _growth(now: Sequence[TensorSpec], example: Sequence[TensorSpec]) -> float:
    """Bound the growth of an output: by the bytes of the inputs and, for squares of a length, by the longest."""
    before = _bytes_of(example)
    more = max(_bytes_of(now) / before, 1.0) if before else 1.0
    if not _have_same_ranks(now, example):
        return more**2
    lengths = (
        one / max(known, 1)
        for shapes in zip(now, example, strict=True)
        for one, known in zip(shapes[0].shape[1:], shapes[1].shape[1:], strict=True)
    )
    return more * max([1.0, *lengths])


def _may_squeeze(now: Sequence[TensorSpec], example: Sequence[TensorSpec]) -> bool:
    """Whether a dimension of size 1, which `squeeze` removes, has another size in the one or in the other."""
    if not _have_same_ranks(now, example):
        return True
    pairs = (pair for one, known in zip(now, example, strict=True) for pair in zip(one.shape, known.shape, strict=True))
    return any((one == 1) != (known == 1) for one, known in pairs)


def _have_same_ranks(now: Sequence[TensorSpec], example: Sequence[TensorSpec]) -> bool:
    return [len(one.shape) for one in now] == [len(one.shape) for one in example]


def ask_profile(connection: Connection, calls: int, timeout: float) -> Profile:
    """Ask for the profile of the model on the device of the server.

    Args:
        calls: How many the model has, by which the length of the profile is bounded.

    Raises:
        RemoteError: If there is none, or a longer one than the model has calls for.
        BadFile: If it is no profile.
    """
    most = min(_PROFILE + _ROW * calls, MOST - _ENVELOPE)
    expected = f"expected a profile of at most {size(most)} for the {calls} calls of the model"
    try:
        reply = connection.ask("Profile", protocol.ProfileRequest(), timeout, most + _ENVELOPE)
    except RemoteError as error:
        if error.kind != "TOO_LARGE":
            raise
        raise RemoteError(f"{error}: {expected}", "TOO_LARGE") from error
    if len(reply.json) > most:
        raise RemoteError(f"{connection.address}: {expected}, got {size(len(reply.json))}", "TOO_LARGE")
    what = f"what {connection.address} says of its device"
    found = parse(reply.json, what)
    if not isinstance(found, Profile):
        raise BadFile(f"{what} is a {type(found).__name__}, expected a Profile")
    return found
