"""The boundary between two stages of a split model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from microtome.split.decoder import decode
from microtome.split.serialization import encode
from microtome.split.tensor_bytes import moved
from microtome.units import parse_size, size

#: Anything that JSON has: a number, a text, True, False, None, a list or a dict with texts as keys of these.
JSON = Any

_bytes_of = lru_cache(parse_size)  # nearly always the same


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
        fingerprint: Of the model that made it.
        tensors: The values that cross, by name.
        facts: What else the tail must know: numbers, texts, None, and lists and dicts of these.
        spare_bytes: How many bytes the placeholders and views that the facts describe may have beyond what the example
            and the tensors explain; None: any number, since it was made in this process.
    """

    at: str
    fingerprint: str
    tensors: dict[str, Tensor]
    facts: dict[str, JSON]
    spare_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def about(self) -> dict[str, JSON]:
        """The metadata beside the tensors."""
        return {"at": self.at, "fingerprint": self.fingerprint, "facts": self.facts}

    def to(self, device: torch.device | str) -> Self:
        """The same with its tensors there."""
        return replace(self, tensors={name: moved(tensor, device) for name, tensor in self.tensors.items()})

    def to_bytes(self, codec: str = "raw") -> bytes:
        """As bytes that say of themselves what they are; `split/serialization.py` describes how they lie.

        Args:
            codec: How tensors are made smaller; `split/codecs.py` lists the names, and what is lost by those that lose
                something. Nothing is lost by "raw", "zstd" and "lz4".

        Raises:
            BadBoundary: If a tensor is not strided, or a fact would not arrive as it is.
        """
        return encode(self.about, self.tensors, codec)

    @classmethod
    def from_bytes(
        cls, data: bytes | bytearray | memoryview, *, limit: int | str = "4GB", most: int | None = None
    ) -> Self:
        """Read the bytes of `to_bytes`.

        The tensors are on the CPU, in memory of their own, with the strides and the alignment they had: kernels round
        by these. No code is run for what the bytes say, and damage is found out; who can forge bytes can forge a
        boundary.

        Args:
            limit: The most memory that reading may take, in bytes or such as "256MB", the header's objects included and
                `data` itself not. A quarter of it is what the facts may describe beyond what the tensors explain.
            most: The most bytes of the tensors, whatever they were compressed to; None: only `limit` bounds them.

        Raises:
            BadBoundary: If they are no boundary, are damaged, or need more than the limit.
        """
        room = _bytes_of(limit)
        about, tensors = decode(data, room, most)
        return cls(**about, tensors=tensors, spare_bytes=room // 4)

    def __repr__(self) -> str:
        count = len(self.tensors)
        return f"Boundary(at={self.at!r}, {count} tensor{'' if count == 1 else 's'}, {size(self.nbytes)})"
