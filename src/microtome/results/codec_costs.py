"""Measured costs of codecs, by the values that cross cuts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from microtome.addresses import strip_first_index
from microtome.errors import BadQuery
from microtome.results.base import Result
from microtome.results.cuts import Live


class CodecCost(NamedTuple):
    """The cost of one codec for one value.

    Attributes:
        nbytes: Bytes of the encoded value.
        encode_s: Seconds to encode it.
        decode_s: Seconds to decode it.
    """

    nbytes: int
    encode_s: float
    decode_s: float

    @classmethod
    def total(cls, costs: Iterable[CodecCost]) -> CodecCost:
        nbytes, encode_s, decode_s = (sum(parts) for parts in zip((0, 0.0, 0.0), *costs, strict=True))
        return cls(int(nbytes), encode_s, decode_s)


@dataclass(frozen=True)
class CodecCosts(Result, kind="codecs"):
    """The costs of codecs on one machine, for every value that crosses a cut of a model.

    Attributes:
        model: The class of the model.
        values: The kind of values that were encoded: the size of a lossless codec depends on it.
        costs: By codec, then by the name of the value.
        environment: The machine.
    """

    model: str
    values: str
    costs: dict[str, dict[str, CodecCost]]
    environment: dict[str, str] = field(default_factory=dict)

    def of(self, live: Iterable[Live], codec: str) -> CodecCost:
        """Return the cost of all values that cross a cut."""
        if codec not in self.costs:
            measured = ", ".join(map(repr, self.costs)) or "none"
            raise BadQuery(f"expected a codec whose costs were measured ({measured}), got {codec!r}")
        known = self.costs[codec]
        names = [value.name if value.name in known else _older_name(value) for value in live]
        if missing := [name for name in names if name not in known]:
            raise BadQuery(f"expected the codec costs of these cuts of {self.model}, got none for {missing[0]!r}")
        return CodecCost.total(known[name] for name in names)

    def __repr__(self) -> str:
        return f"<CodecCosts of {self.model}: {', '.join(self.costs)}>"


def _older_name(value: Live) -> str:
    """Return the name in files of an older microtome, without the `#0` of a first call."""
    source = value.source or ""
    return strip_first_index(source) + value.name.removeprefix(source)
