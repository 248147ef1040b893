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
        """The cost of all that crosses a cut."""
        if codec not in self.costs:
            there = ", ".join(map(repr, self.costs)) or "none"
            raise BadQuery(
                f"the costs of codec {codec!r} were not measured ({there} were): measure them, or name another"
            )
        known = self.costs[codec]
        live = [value if value.name in known else _as_in_older_files(value) for value in live]
        missing = [value.name for value in live if value.name not in known]
        if missing:
            raise BadQuery(
                f"the costs of codecs are of other cuts of {self.model}: there is no {missing[0]!r} among them"
            )
        several = [known[value.name] for value in live]
        nbytes, encode_s, decode_s = (sum(parts) for parts in zip((0, 0.0, 0.0), *several, strict=True))
        return CodecCost(int(nbytes), encode_s, decode_s)

    def __repr__(self) -> str:
        return f"<CodecCosts of {self.model}: {', '.join(self.costs)}>"


def _as_in_older_files(value: Live) -> Live:
    """The value under the name that it has in files of an older microtome, without the `#0` of a first call."""
    source = value.source or ""
    return value._replace(name=strip_first_index(source) + value.name.removeprefix(source))
