"""The boundary between two stages of a split model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from microtome.split.boundary.decoder import decode
from microtome.split.boundary.gradients import gradients_of, run_backward
from microtome.split.boundary.serialization import encode
from microtome.split.boundary.tensor_bytes import moved
from microtome.units import parse_size, size

#: A JSON value: a number, string, bool or None, or a list or dict (with strings as keys) of these.
JSON = Any

_parse_size = lru_cache(parse_size)  # nearly always called with the same limit


class _Facts:
    """The field `facts`: a record of this process is converted to JSON when that is read, since most never are."""

    def __get__(self, boundary: Boundary | None, owner: type) -> dict[str, JSON]:
        if boundary is None:
            raise AttributeError("a field without a default")
        if (record := boundary.record) is not None:
            self.__set__(boundary, record.to_facts())
        facts: dict[str, JSON] = vars(boundary)["_facts"]
        return facts

    def __set__(self, boundary: Boundary, facts: Any) -> None:
        object.__setattr__(boundary, "_facts", facts)


@dataclass(frozen=True, eq=False, repr=False)
class Boundary:
    """The values that cross from the head of a split model to its tail.

    >>> boundary = Boundary("layer2", "8d1f", {"layer2": torch.ones(2, 3)}, {"batch": 2})
    >>> boundary
    Boundary(at='layer2', 1 tensor, 24 B)
    >>> data = boundary.to_bytes()
    >>> Boundary.from_bytes(data).tensors["layer2"].sum()
    tensor(6.)
    >>> Boundary.from_bytes(data[:-1])
    Traceback (most recent call last):
        ...
    microtome.errors.BadBoundary: truncated boundary: expected 272 bytes, got 271

    Attributes:
        at: The address of the cut.
        fingerprint: The fingerprint of the model.
        tensors: The tensors that cross, by name.
        facts: JSON beside the tensors. Stages write and read a `schema.BoundaryRecord` there.
        spare_bytes: How many bytes the placeholders and views that the facts describe may have beyond what the example
            and the tensors explain; None: unlimited, for a boundary of this process.
    """

    at: str
    fingerprint: str
    tensors: dict[str, Tensor]
    facts: Any = _Facts()
    spare_bytes: int | None = None

    @property
    def record(self) -> Any:
        """The `BoundaryRecord` that a stage of this process wrote, or that was checked; None: facts are unchecked."""
        facts = vars(self)["_facts"]
        return None if isinstance(facts, dict) else facts

    @property
    def nbytes(self) -> int:
        """The total bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device | str) -> Self:
        """A boundary with the tensors on a device."""
        return self.with_tensors({name: moved(tensor, device) for name, tensor in self.tensors.items()})

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """A boundary with other tensors and the same facts."""
        return type(self)(self.at, self.fingerprint, tensors, vars(self)["_facts"], self.spare_bytes)

    def gradients(self) -> Self:
        """Return the gradients of the tensors, by name, after a backward through the tail.

        This is for a boundary that came from another process, whose tensors a stage that was split with `grad=True`
        makes leaves of the graph. Tensors that the output does not depend on have no gradient, and are missing. The
        result is sent back like any boundary, and the head's boundary takes it: `backward`.

        Raises:
            BadQuery: The tensors are no leaves: the head ran in this process, and gradients flow back by themselves.
        """
        return gradients_of(self)  # type: ignore[return-value]

    def backward(self, gradients: Boundary) -> None:
        """Continue the backward in the head, with the gradients of its boundary's tensors that came back.

        >>> import microtome as mt
        >>> from microtome import zoo
        >>> model, x = zoo.build("tiny-resnet")
        >>> head, tail = mt.split(model, x, at="layer1", grad=True)
        >>> sent = head(x)
        >>> received = mt.Boundary.from_bytes(sent.to_bytes())  # in the other process
        >>> tail(received).sum().backward()
        >>> data = received.gradients().to_bytes()
        >>> sent.backward(mt.Boundary.from_bytes(data))  # in the process of the head
        >>> all(weight.grad is not None for weight in model.parameters())
        True

        Raises:
            BadBoundary: They are not gradients of these tensors.
        """
        run_backward(self, gradients)

    def to_bytes(self, codec: str = "raw") -> bytes:
        """Serialize the boundary; `split/boundary/serialization.py` documents the format.

        Args:
            codec: The encoding of tensors; `split/boundary/codecs.py` lists them with their errors. "raw", "zstd" and
                "lz4" are lossless.

        Raises:
            BadBoundary: If a tensor is not strided, or the facts are not JSON.
        """
        return encode(self, codec)

    @classmethod
    def from_bytes(
        cls,
        data: bytes | bytearray | memoryview,
        *,
        limit: int | str = "4GB",
        max_tensor_bytes: int | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Deserialize the bytes of `to_bytes`.

        The tensors are in memory of their own, with their strides and alignment, by which kernels round.
        Nothing in the bytes is executed. Damage is detected; forgery is not.

        Args:
            limit: The maximum memory that decoding may take, in bytes or such as "256MB", without `data` itself. The
                facts may describe a quarter of it beyond what the tensors explain.
            max_tensor_bytes: The maximum bytes of the tensors, uncompressed; None: only `limit` bounds them.
            device: The device of the tensors; None: the CPU.

        Raises:
            BadBoundary: If the bytes are damaged or no boundary, or need more memory than the limit.
        """
        limit_bytes = _parse_size(limit)
        target = None if device is None else torch.device(device)
        header, tensors = decode(data, limit_bytes, max_tensor_bytes, target)
        boundary = cls(header.at, header.fingerprint, tensors, header.facts, limit_bytes // 4)
        return boundary if target is None else boundary.to(target)

    def __repr__(self) -> str:
        count = len(self.tensors)
        return f"Boundary(at={self.at!r}, {count} tensor{'' if count == 1 else 's'}, {size(self.nbytes)})"
